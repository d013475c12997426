/* Device memory that is passed through and only counted: VMM, arrays, memory nodes of graphs. */
#pragma once

void plain_memory_forget(void); /* in a forked child */
