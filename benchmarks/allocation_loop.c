/* Allocates and frees again and again, and says what that costs. Run by benchmarks/allocation.py.

   allocation_loop pairs BATCHES PAIRS LIVE   nanoseconds of each batch for one cuMemAlloc and cuMemFree of 64 KiB, one
   a line allocation_loop steps BATCHES STEPS LIVE   the same for one training step's memory: 90 blocks of mixed sizes
   from cuMemAllocAsync, freed in the order of a backward pass

   LIVE allocations of 64 KiB are there all the while. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "loop.h"

typedef unsigned long long address;
static int (*alloc)(address *, size_t);
static int (*free_)(address);
static int (*alloc_async)(address *, size_t, void *);
static int (*free_async)(address, void *);

static void pair(void) {
    address at;
    must("cuMemAlloc", alloc(&at, 65536));
    must("cuMemFree", free_(at));
}

#define LAYERS 30

/* Activations are allocated layer by layer, with a workspace in each layer that is freed at once; the backward pass
   frees them in the other order, with gradients of the same sizes in between. Sequence lengths differ a little from
   step to step. */
static void step(void *stream, int number) {
    address kept[LAYERS], other;
    for (int layer = 0; layer < LAYERS; layer++) {
        size_t bytes = ((size_t)(layer % 7 + 1) << 18) - (size_t)(number % 3) * 4096;
        must("cuMemAllocAsync", alloc_async(&kept[layer], bytes, stream));
        must("cuMemAllocAsync", alloc_async(&other, bytes / 2, stream));
        must("cuMemFreeAsync", free_async(other, stream));
    }
    for (int layer = LAYERS; layer-- > 0;) {
        size_t bytes = ((size_t)(layer % 7 + 1) << 18) - (size_t)(number % 3) * 4096;
        must("cuMemAllocAsync", alloc_async(&other, bytes, stream));
        must("cuMemFreeAsync", free_async(kept[layer], stream));
        must("cuMemFreeAsync", free_async(other, stream));
    }
}

int main(int argc, char **argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: allocation_loop pairs|steps BATCHES COUNT LIVE\n");
        return 2;
    }
    int steps = strcmp(argv[1], "steps") == 0, batches = atoi(argv[2]), count = atoi(argv[3]), live = atoi(argv[4]);
    if (!(driver = dlopen("libcuda.so.1", RTLD_NOW))) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    void *context, *stream;
    must("cuInit", ((int (*)(unsigned))find("cuInit"))(0));
    must("cuDevicePrimaryCtxRetain", ((int (*)(void **, int))find("cuDevicePrimaryCtxRetain"))(&context, 0));
    must("cuCtxSetCurrent", ((int (*)(void *))find("cuCtxSetCurrent"))(context));
    must("cuStreamCreate", ((int (*)(void **, unsigned))find("cuStreamCreate"))(&stream, 1));
    alloc = (int (*)(address *, size_t))find("cuMemAlloc_v2");
    free_ = (int (*)(address))find("cuMemFree_v2");
    int (*synchronize)(void *) = NULL;
    if (steps) {
        alloc_async = (int (*)(address *, size_t, void *))find("cuMemAllocAsync");
        free_async = (int (*)(address, void *))find("cuMemFreeAsync");
        synchronize = (int (*)(void *))find("cuStreamSynchronize");
    }
    for (int i = 0; i < live; i++) must("cuMemAlloc", alloc(&(address){0}, 65536));
    for (int i = 0; i < 20; i++) { /* warm */
        if (steps)
            step(stream, i);
        else
            pair();
    }
    for (int batch = 0; batch < batches; batch++) {
        double start = now();
        for (int i = 0; i < count; i++) {
            if (steps) {
                step(stream, i);
                must("cuStreamSynchronize", synchronize(stream));
            } else {
                pair();
            }
        }
        printf("%.3f\n", (now() - start) / count);
    }
    return 0;
}
