/* A forked child is a new process to the agent, and has none of this library's threads. */
#pragma once

void fork_watch(void);
void session_forget(void);
