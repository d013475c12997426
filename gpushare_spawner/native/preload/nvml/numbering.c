#include "nvml/numbering.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "driver/gpus.h"
#include "nvml/figures.h"

/* Several threads may ask at once. The first answer stays until the process ends: others may read it already. */
static struct numbering {
    int count;
    unsigned char uuids[MAX_GPUS][16];
} *_Atomic decided;

int numbering_count(void) {
    struct numbering *at = atomic_load_explicit(&decided, memory_order_acquire), *none = NULL;
    if (at) return at->count;
    if (!(at = calloc(1, sizeof *at))) return -1;
    at->count = figures_gpus(at->uuids, MAX_GPUS);
    if (atomic_compare_exchange_strong(&decided, &none, at)) return at->count;
    free(at);
    return none->count;
}

const unsigned char *numbering_uuid(int index) {
    return atomic_load_explicit(&decided, memory_order_acquire)->uuids[index];
}

int numbering_index(const unsigned char uuid[16]) {
    for (int i = 0; i < numbering_count(); i++)
        if (memcmp(numbering_uuid(i), uuid, 16) == 0) return i;
    return -1;
}
