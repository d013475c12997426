/* A sorted list of pointers to objects that cover address ranges, for looking up the object at any address. */
#ifndef SIMGPU_SPANS_H
#define SIMGPU_SPANS_H

#include "cuda/memory/memory.h"

struct spans {
    struct span **items;
    size_t count, room;
};

struct span *spans_find(const struct spans *spans, uint64_t address);
int spans_insert(struct spans *spans, struct span *span);
void spans_remove(struct spans *spans, struct span *span);

#endif
