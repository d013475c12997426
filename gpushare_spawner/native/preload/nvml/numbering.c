#include "nvml/numbering.h"

#include <stdatomic.h>
#include <string.h>

#include "driver/gpus.h"
#include "nvml/figures.h"

#define UNDECIDED (-2)

static _Atomic int decided = UNDECIDED;
static unsigned char uuids[MAX_GPUS][16];

int numbering_count(void) {
    int count = atomic_load_explicit(&decided, memory_order_acquire);
    if (count != UNDECIDED) return count;
    unsigned char found[MAX_GPUS][16];
    count = figures_gpus(found, MAX_GPUS);
    /* several threads may come here at once: a session keeps its GPUs, so that each that knows them writes the same */
    if (count > 0) memcpy(uuids, found, (size_t)count * sizeof *found);
    int expected = UNDECIDED;
    return atomic_compare_exchange_strong(&decided, &expected, count) ? count : expected;
}

const unsigned char *numbering_uuid(int index) {
    return uuids[index];
}

int numbering_index(const unsigned char uuid[16]) {
    for (int i = 0; i < numbering_count(); i++)
        if (memcmp(uuids[i], uuid, 16) == 0) return i;
    return -1;
}
