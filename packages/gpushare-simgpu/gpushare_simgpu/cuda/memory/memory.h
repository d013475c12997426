/* Memory of this process: allocations (what programs hold) in regions (what has pages).
 *
 * All memory is host memory, mapped and committed lazily, at the same address on "device" and host. What is simulated
 * is where its pages are: plain device memory holds frames of VRAM from allocation to free; a managed page holds one
 * while it is resident. */
#ifndef SIMGPU_MEMORY_H
#define SIMGPU_MEMORY_H

#include <pthread.h>

#include "cuda/streams/context.h"

enum memory_kind { KIND_PLAIN, KIND_MANAGED, KIND_HOST, KIND_REGISTERED, KIND_MAPPED };

struct page {
    uint32_t frame;
    int8_t gpu;        /* where it was put last; -1 nowhere. frames_holds() tells whether it is still there */
    uint8_t populated; /* it has content: a move costs a transfer */
    uint8_t read_mostly;
    int8_t preferred;     /* advice: a device, CU_DEVICE_CPU or CU_DEVICE_INVALID */
    int8_t prefetched;    /* last prefetch: likewise */
    uint32_t accessed_by; /* advice: bit 31 the host, bit n device n */
};

/* First member of everything that is found by address. */
struct span {
    uint64_t base, size;
};

struct region {
    struct span span;
    uint32_t id; /* with the page's index: the page's name in the frames */
    enum memory_kind kind;
    int gpu; /* plain: where its frames are */
    uint32_t count;
    struct page *pages;
    struct slots *slots; /* a region shared by small allocations; NULL otherwise */
    struct region *next; /* in the list of shared regions */
};

struct allocation {
    struct span span;
    uint64_t requested; /* bytes asked for */
    uint64_t id;
    enum memory_kind kind;
    struct region *region; /* NULL for host memory */
    struct context *context;
    int device;
    unsigned flags;
    struct pool *pool;
    struct physical *physical; /* mapped */
    int access;                /* mapped: 0 none, 1 read, 3 read and write */
    int sync_memops;
};

/* Guards all of the below; taken before any GPU's lock. */
extern pthread_mutex_t memory_lock;

struct allocation *allocation_find(uint64_t address);
struct region *region_find(uint64_t address);
struct allocation *allocation_add(uint64_t base, uint64_t size, enum memory_kind kind, struct context *context);
void allocation_drop(struct allocation *allocation);
void allocations_visit(void (*visit)(struct allocation *, void *), void *data);

/* A region over memory that is there already, without frames. */
struct region *region_add(uint64_t base, uint64_t size, enum memory_kind kind, int gpu);
void region_drop(struct region *region);
/* Gives plain memory its frames, evicting managed pages; waits for the evictions. */
CUresult region_commit(struct region *region);
/* The same without waiting: the number of pages that it evicted. With the GPU's lock held, and enough frames that are
 * free or managed. */
uint64_t region_claim(struct region *region);
void region_release(struct region *region);
void regions_visit(void (*visit)(struct region *, void *), void *data);

/* Address space, aligned to pages of VRAM and as long as whole ones; NULL when there is none. */
void *space_reserve(uint64_t size, int usable);
void space_release(uint64_t base, uint64_t size);
uint64_t page_up(uint64_t size);

/* With the lock not held. */
CUresult memory_allocate(struct context *context, int device, enum memory_kind kind, uint64_t size, unsigned flags,
                         struct pool *pool, CUdeviceptr *address);
CUresult memory_free(CUdeviceptr address);
void memory_free_context(struct context *context);

/* True when a kernel on that device may use all of it. */
int memory_accessible(uint64_t address, uint64_t size, int device, int writing);

#endif
