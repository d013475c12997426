/* Carrying out an operation, on the worker of its stream. */
#ifndef SIMGPU_EXECUTE_H
#define SIMGPU_EXECUTE_H

#include "cuda/streams/stream.h"

/* Gives the instant at which it ended; `ready` is when it could begin. */
uint64_t execute(struct stream *stream, const struct operation *operation, uint64_t ready);

uint64_t execute_copy(struct stream *stream, const struct rectangle *copy, uint64_t ready);
uint64_t execute_prefetch(struct stream *stream, uint64_t address, uint64_t size, int device, uint64_t ready);

#endif
