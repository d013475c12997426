#include "cuda/memory/spans.h"

#include <stdlib.h>
#include <string.h>

/* The number of items that begin at or before the address. */
static size_t before(const struct spans *spans, uint64_t address) {
    size_t low = 0, high = spans->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (spans->items[middle]->base <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct span *spans_find(const struct spans *spans, uint64_t address) {
    size_t n = before(spans, address);
    if (n == 0 || address - spans->items[n - 1]->base >= spans->items[n - 1]->size) return NULL;
    return spans->items[n - 1];
}

int spans_insert(struct spans *spans, struct span *span) {
    if (spans->count == spans->room) {
        size_t room = spans->room ? 2 * spans->room : 64;
        struct span **items = realloc(spans->items, room * sizeof *items);
        if (!items) return -1;
        spans->items = items;
        spans->room = room;
    }
    size_t at = before(spans, span->base);
    memmove(spans->items + at + 1, spans->items + at, (spans->count - at) * sizeof *spans->items);
    spans->items[at] = span;
    spans->count++;
    return 0;
}

void spans_remove(struct spans *spans, struct span *span) {
    size_t n = before(spans, span->base);
    if (n == 0 || spans->items[n - 1] != span) return;
    memmove(spans->items + n - 1, spans->items + n, (spans->count - n) * sizeof *spans->items);
    spans->count--;
}
