/* The thread of each process that carries out its checkpoints. */
#ifndef SIMGPU_RESTORE_THREAD_H
#define SIMGPU_RESTORE_THREAD_H

/* At the end of cuInit, which returns when the thread can be asked. Where no thread can be made the process cannot be
 * checkpointed, and works otherwise. */
void restore_thread_start(void);

#endif
