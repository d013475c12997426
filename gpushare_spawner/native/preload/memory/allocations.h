/* The program's allocations on each GPU, by address and in the order of use, and the conversion of device memory into
   managed memory, which can leave the GPU. Functions for records take the accounts' lock for tens of nanoseconds; none
   waits for the device. */
#pragma once

#include "contexts/captures.h"
#include "memory/account.h"
#include "memory/tree.h"

enum allocation_kind {
    ALLOCATION_CONVERTED, /* managed memory instead of device memory */
    ALLOCATION_MANAGED,   /* managed memory that the program requested */
    ALLOCATION_PLAIN,     /* device memory */
    ALLOCATION_POOLED,    /* device memory from one of the driver's pools */
};

struct allocation {
    CUdeviceptr at;
    size_t bytes;    /* requested */
    size_t capacity; /* obtained from the driver, and counted; more than `bytes` if blocks are rounded up */
    enum allocation_kind kind;
    struct gpu *gpu;
    CUcontext context;
    uint64_t number; /* number of the record; a later context with the same handle has only higher numbers */
    /* only in the record; not valid in a copy: */
    uint64_t walk;                    /* the last walk of the pager that visited it */
    size_t walked;                    /* number of bytes that this walk has visited */
    struct tree_node place;           /* by address */
    struct allocation *newer, *older; /* by use, within the GPU; managed memory only */
};

/* Record a new allocation, which is already counted. Older records at its addresses belong to a context that is being
   destroyed; they are removed and subtracted from the account. */
void allocations_add(struct gpu *gpu, CUdeviceptr at, size_t bytes, size_t capacity, enum allocation_kind kind);

/* Count and record a new allocation in one step. False: it now exceeds the allowance. */
bool allocations_add_within(struct gpu *gpu, CUdeviceptr at, size_t bytes, enum allocation_kind kind);

/* Copy the record of the allocation that contains `at`, up to its number. False: there is none. */
bool allocations_find(CUdeviceptr at, struct allocation *copy);

/* The same for converted memory only. */
bool allocations_find_converted(CUdeviceptr at, struct allocation *copy);

/* Remove the record of the allocation that begins at `at`, and copy it, up to its number. Its bytes stay counted: the
   caller subtracts them (account_return) when the driver has freed them, which may be after work that takes seconds.
   False: there is none. */
bool allocations_remove(CUdeviceptr at, struct allocation *copy);

/* After the driver's free of a removed allocation: subtract its bytes from the account, or restore the record where the
   free failed. Returns `result`. */
CUresult allocations_freed(const struct allocation *copy, CUresult result);

/* Return the newest number. Read before a context is destroyed, it separates that context's allocations from those of a
   later context with the same handle. */
uint64_t allocations_newest(void);

/* Remove the allocations of a destroyed context up to that number, and subtract them from the account. */
void allocations_remove_context(CUcontext context, uint64_t until);

/* Move all allocations of a context to another context. */
void allocations_move_context(CUcontext from, CUcontext to);

/* Walk over the managed allocations of a GPU, newest first or oldest first. `visit` is called with the lock held, for
   the next part of an allocation with that allocation's number; it returns false to stop, and the part is then visited
   again. A walk continues where it stopped, even if memory was allocated or freed in between. Returns true at the end
   of the list. */
typedef bool (*allocation_visit)(void *closure, CUcontext context, CUdeviceptr at, size_t bytes, uint64_t number);
bool allocations_walk(struct gpu *gpu, uint64_t walk, bool newest_first, size_t part, allocation_visit visit,
                      void *closure);

/* ---- conversion ---- */

/* Whether the session is oversubscribed and the user has not disabled conversion. */
HIDDEN _Atomic bool allocation_conversion;

/* Whether allocations on this GPU are converted: the GPU supports it and is one of the session's. */
static inline bool allocation_converts(const struct gpu *gpu) {
    return atomic_load_explicit(&allocation_conversion, memory_order_relaxed) && gpu->can_manage &&
           atomic_load_explicit(&gpu->shared, memory_order_relaxed);
}

/* Read GPUSHARE_MANAGED and the engine, at cuInit. No lock. */
void allocations_prepare_conversion(void);

/* Set whether the session is oversubscribed. Background thread, at WELCOME. No lock. */
void allocations_set_conversion(bool oversubscribed);

/* Allocate managed memory whose preferred location is the GPU. Calls the driver. Inline, because a call would slow down
   each allocation. */
static inline CUresult allocation_convert(const struct gpu *gpu, CUdeviceptr *out, size_t bytes) {
    CUresult result = real.cuMemAllocManaged(out, bytes, CU_MEM_ATTACH_GLOBAL);
    if (result != CUDA_SUCCESS || captures_in_progress()) return result;
    /* pages that were moved to the host return when they are used, and stay; a driver without cuMemAdvise keeps its own
       preference */
    if (driver_has(cuMemAdvise))
        real.cuMemAdvise(*out, bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, gpu->device);
    else if (driver_has(cuMemAdvise_v2))
        real.cuMemAdvise_v2(*out, bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
                            (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, gpu->device});
    return result;
}
