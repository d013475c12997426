/* How any thread wakes the background thread, which sleeps until a file becomes readable. */
#pragma once

#include <stdbool.h>

/* Any thread, any lock held. */
bool wake_listens(void); /* there is a background thread */
void wake_up(void);      /* a system call, unless it is known to be awake; nothing where there is no thread */

/* For the thread that starts the background thread. Open the file. False: errno says why. */
bool wake_open(void);
void wake_close(void);

/* For the background thread. */
int wake_file(void);    /* to be polled; -1: none */
void wake_begin(void);  /* before it looks at anything: what happens from here on wakes it again */
void wake_clear(void);  /* the file was readable */
void wake_forget(void); /* in a forked child: there is no such thread any more */
