/* The thread of each process that carries out its checkpoints. */
#ifndef SIMGPU_RESTORE_THREAD_H
#define SIMGPU_RESTORE_THREAD_H

/* Called at the end of cuInit, which returns when the thread accepts requests. If no thread can be created, the process
 * cannot be checkpointed but otherwise works. */
void restore_thread_start(void);

#endif
