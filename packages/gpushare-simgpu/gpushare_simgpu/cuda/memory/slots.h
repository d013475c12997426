/* Small allocations share a page of VRAM, in slots of 512 bytes (CUDA promises alignment to at least 256). */
#ifndef SIMGPU_SLOTS_H
#define SIMGPU_SLOTS_H

#include <stdint.h>

#define SLOT 512u

struct slots *slots_make(uint64_t bytes);
void slots_drop(struct slots *slots);
/* Take `bytes` contiguous free bytes. Returns their offset, or -1. */
int64_t slots_take(struct slots *slots, uint64_t bytes);
void slots_give_back(struct slots *slots, uint64_t offset, uint64_t bytes);
int slots_empty(const struct slots *slots);

#endif
