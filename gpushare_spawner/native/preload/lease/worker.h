/* The background thread: one per process, started by cuInit. It owns the socket, the leases and the pager. It
   holds no lock while it sleeps, and waits for no other thread of the program. */
#pragma once

/* Start it, and wait (a second at most) for the agent's WELCOME: the first allocation must know how it is to be made.
 */
void worker_start(void);

/* In a forked child: there is no such thread any more, and its files are closed. */
void worker_forget(void);
