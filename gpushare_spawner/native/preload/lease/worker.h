/* The background thread: one for each process, started by cuInit. It owns the socket, the leases and the pager. It
   holds no lock while it sleeps and does not wait for other threads of the program. */
#pragma once

/* Start the thread and wait (at most a second) for the agent's WELCOME, which determines how memory is allocated. */
void worker_start(void);
