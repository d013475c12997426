/* Memory of this process: allocations, which programs hold, in regions, which have pages.
 *
 * * All memory is host memory, mapped and committed lazily, at the same address on "device" and host. Only the location
 * of its pages is simulated: plain device memory holds frames of VRAM from allocation to free; a managed page holds a
 * frame while it is resident. */
#ifndef SIMGPU_MEMORY_H
#define SIMGPU_MEMORY_H

#include <pthread.h>

#include "cuda/streams/context.h"

enum memory_kind { KIND_PLAIN, KIND_MANAGED, KIND_HOST, KIND_REGISTERED, KIND_MAPPED };

struct page {
    uint32_t frame;
    int8_t gpu;        /* its last GPU; -1: none. frames_holds() returns whether it is still there */
    uint8_t populated; /* it has content, so a move costs a transfer */
    uint8_t read_mostly;
    int8_t preferred;     /* advice: a device, CU_DEVICE_CPU or CU_DEVICE_INVALID */
    int8_t prefetched;    /* target of the last prefetch, with the same values */
    uint32_t accessed_by; /* advice: bit 31 the host, bit n device n */
};

/* The first member of every struct that is looked up by address. */
struct span {
    uint64_t base, size;
};

struct region {
    struct span span;
    uint32_t id; /* together with the page's index, the page's name in the frames */
    enum memory_kind kind;
    int gpu; /* plain: where its frames are */
    uint32_t count;
    struct page *pages;
    struct slots *slots; /* a region shared by small allocations; NULL otherwise */
    struct region *next; /* in the list of shared regions */
};

struct allocation {
    struct span span;
    uint64_t requested; /* requested bytes */
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

/* Protects everything below; taken before any GPU's lock. */
extern pthread_mutex_t memory_lock;

struct allocation *allocation_find(uint64_t address);
struct region *region_find(uint64_t address);
struct allocation *allocation_add(uint64_t base, uint64_t size, enum memory_kind kind, struct context *context);
void allocation_drop(struct allocation *allocation);
void allocations_visit(void (*visit)(struct allocation *, void *), void *data);

/* Add a region over existing memory, without frames. */
struct region *region_add(uint64_t base, uint64_t size, enum memory_kind kind, int gpu);
void region_drop(struct region *region);
/* Give plain memory its frames, evicting managed pages; waits for the evictions. */
CUresult region_commit(struct region *region);
/* The same without waiting; returns the number of evicted pages. With the GPU's lock held, and enough free or managed
 * frames. */
uint64_t region_claim(struct region *region);
void region_release(struct region *region);
void regions_visit(void (*visit)(struct region *, void *), void *data);

/* Reserve address space, aligned to VRAM pages and rounded up to whole pages; NULL if there is none. */
void *space_reserve(uint64_t size, int usable);
void space_release(uint64_t base, uint64_t size);
uint64_t page_up(uint64_t size);

/* Called without the lock. */
CUresult memory_allocate(struct context *context, int device, enum memory_kind kind, uint64_t size, unsigned flags,
                         struct pool *pool, CUdeviceptr *address);
CUresult memory_free(CUdeviceptr address);
void memory_free_context(struct context *context);

/* Whether a kernel on the device may use the whole range. */
int memory_accessible(uint64_t address, uint64_t size, int device, int writing);

#endif
