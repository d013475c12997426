/* What the program has allocated on each GPU: found by address, ordered by use. Every function here takes the accounts'
   lock, for tens of nanoseconds; none waits for the device. */
#pragma once

#include "memory/account.h"
#include "memory/tree.h"

enum allocation_kind {
    ALLOCATION_CONVERTED, /* managed memory in place of device memory */
    ALLOCATION_MANAGED,   /* managed memory that the program asked for */
    ALLOCATION_PLAIN,     /* device memory */
    ALLOCATION_POOLED,    /* device memory from a pool of the driver */
};

struct allocation {
    CUdeviceptr at;
    size_t bytes;    /* asked for */
    size_t capacity; /* taken from the driver, and accounted for; more than `bytes` where blocks are rounded up */
    enum allocation_kind kind;
    struct gpu *gpu;
    CUcontext context;
    uint64_t number; /* counts what was remembered: a later one is of a later context, even with the same handle */
    /* of the record alone, in no copy: */
    uint64_t walk;                    /* the last walk of the pager that came here */
    size_t walked;                    /* bytes, in that walk */
    struct tree_node place;           /* by address */
    struct allocation *newer, *older; /* by use, within the GPU; plain ones are in no list */
};

/* Remember a new allocation, already accounted for. What lay there belonged to a context that is being destroyed just
 * now: it is forgotten, and given back to the account. */
void allocations_add(struct gpu *gpu, CUdeviceptr at, size_t bytes, size_t capacity, enum allocation_kind kind);

/* Account for a new allocation and remember it, in one step. False: by now it is beyond the allowance. */
bool allocations_add_within(struct gpu *gpu, CUdeviceptr at, size_t bytes, enum allocation_kind kind);

/* The allocation that `at` lies in; a copy, up to its number. */
bool allocations_find(CUdeviceptr at, struct allocation *copy);

/* Forget the one that begins at `at`; a copy, up to its number. Its bytes stay accounted for: the caller gives them
   back (account_return) when the driver has them back, which may be after work that takes seconds. False: unknown. */
bool allocations_remove(CUdeviceptr at, struct allocation *copy);

/* After the driver's free of one that was removed: its bytes go back to the account, or, where it could not be freed
   after all, the record comes back. Returns what the driver said. */
CUresult allocations_freed(const struct allocation *copy, CUresult result);

/* The number of the newest: taken before a context is destroyed, it tells afterwards what was the context's. */
uint64_t allocations_newest(void);

/* The context is gone: what it had up to that number goes back to the account. */
void allocations_of_context_gone(CUcontext context, uint64_t until);

/* What the context had is another's from now on. */
void allocations_context_moved(CUcontext from, CUcontext to);
void allocations_forget(void); /* in a forked child */

/* Walk over the managed allocations of a GPU, newest first or oldest first. `visit` is called with the lock held and
   gets the part that is next, and the number of its allocation; it returns false to stop (the part is then visited
   again). A walk goes on where it stopped, whatever was allocated or freed meanwhile. Returns true at the end of the
   list. */
typedef bool (*allocation_visit)(void *closure, CUcontext context, CUdeviceptr at, size_t bytes, uint64_t number);
bool allocations_walk(struct gpu *gpu, uint64_t walk, bool newest_first, size_t part, allocation_visit visit,
                      void *closure);
