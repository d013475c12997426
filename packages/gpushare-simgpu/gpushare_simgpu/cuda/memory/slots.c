#include "cuda/memory/slots.h"

#include <stdlib.h>

struct slots {
    uint32_t count, used;
    uint32_t hint; /* where the last search ended */
    uint8_t taken[];
};

struct slots *slots_make(uint64_t bytes) {
    uint32_t count = (uint32_t)(bytes / SLOT);
    struct slots *slots = calloc(1, sizeof *slots + count);
    if (slots) slots->count = count;
    return slots;
}

void slots_drop(struct slots *slots) {
    free(slots);
}

static int64_t search(struct slots *slots, uint32_t from, uint32_t until, uint32_t wanted) {
    uint32_t run = 0;
    for (uint32_t i = from; i < until; i++) {
        run = slots->taken[i] ? 0 : run + 1;
        if (run == wanted) return (int64_t)i + 1 - wanted;
    }
    return -1;
}

int64_t slots_take(struct slots *slots, uint64_t bytes) {
    uint32_t wanted = (uint32_t)((bytes + SLOT - 1) / SLOT);
    if (slots->count - slots->used < wanted) return -1;
    int64_t first = search(slots, slots->hint, slots->count, wanted);
    if (first < 0) first = search(slots, 0, slots->count, wanted);
    if (first < 0) return -1;
    for (uint32_t i = 0; i < wanted; i++) slots->taken[first + i] = 1;
    slots->used += wanted;
    slots->hint = (uint32_t)first + wanted;
    return first * SLOT;
}

void slots_give_back(struct slots *slots, uint64_t offset, uint64_t bytes) {
    uint32_t first = (uint32_t)(offset / SLOT), count = (uint32_t)((bytes + SLOT - 1) / SLOT);
    for (uint32_t i = 0; i < count; i++) slots->taken[first + i] = 0;
    slots->used -= count;
}

int slots_empty(const struct slots *slots) {
    return slots->used == 0;
}
