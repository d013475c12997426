/* Execution of an operation by its stream's worker. */
#ifndef SIMGPU_EXECUTE_H
#define SIMGPU_EXECUTE_H

#include "cuda/streams/stream.h"

/* Execute an operation. Returns the instant of its end; `ready`: the earliest instant of its start. */
uint64_t execute(struct stream *stream, const struct operation *operation, uint64_t ready);

uint64_t execute_copy(struct stream *stream, const struct rectangle *copy, uint64_t ready);
uint64_t execute_prefetch(struct stream *stream, uint64_t address, uint64_t size, int device, uint64_t ready);

#endif
