/* cuMemAllocAsync and its kin, served by managed memory with a free that keeps the stream's order. */
#pragma once

void stream_ordered_forget(void); /* in a forked child */
