/* The background thread: one for each process, started by cuInit. It owns the socket, the leases and the pager. It
   holds no lock while it sleeps, and waits for no other thread of the program. */
#pragma once

/* Start the thread, and wait (a second at most) for the agent's WELCOME, which determines how memory is allocated. */
void worker_start(void);
