#include "memory/allocations.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "platform/settings.h"

static struct tree_node *root;
static uint64_t newest;
static struct {
    struct allocation *newest, *oldest;
    struct allocation *next; /* the next allocation of the walk in progress */
} by_use[MAX_GPUS];

/* Records are allocated in blocks and reused, so that an allocation does not wait for malloc. With the lock held. */
#define RECORDS_AT_ONCE 64
static struct allocation *spare_records;

static __attribute__((noinline, cold)) void more_records(void) {
    struct allocation *block = malloc(RECORDS_AT_ONCE * sizeof *block);
    for (int i = 0; block && i < RECORDS_AT_ONCE; i++) {
        block[i].place.order = 0; /* addresses are unique */
        block[i].older = spare_records;
        spare_records = &block[i];
    }
}

static struct allocation *record_new(void) {
    if (unlikely(!spare_records)) more_records();
    struct allocation *record = spare_records;
    if (record) spare_records = record->older;
    return record;
}

static void record_spare(struct allocation *record) {
    record->older = spare_records;
    spare_records = record;
}

/* Copy the fields that are valid in a copy; the other fields belong to the record. */
static void copy_fields(struct allocation *to, const struct allocation *from) {
    __builtin_memcpy(to, from, offsetof(struct allocation, walk));
}

static struct allocation *record_of(struct tree_node *node) {
    return node ? tree_record(node, struct allocation, place) : NULL;
}

/* Return the last allocation that begins at or below `at`. */
static struct allocation *last_up_to(CUdeviceptr at) {
    return record_of(tree_last_up_to(root, at));
}

static struct allocation *containing(CUdeviceptr at) {
    struct allocation *best = last_up_to(at);
    return best && at - best->at < best->bytes ? best : NULL;
}

static inline bool is_managed(enum allocation_kind kind) {
    return kind <= ALLOCATION_MANAGED;
}

static inline enum account account_for(enum allocation_kind kind) {
    return is_managed(kind) ? ACCOUNT_MANAGED : kind == ALLOCATION_PLAIN ? ACCOUNT_PLAIN : ACCOUNT_POOLED;
}

static void link_newest(struct allocation *node) {
    if (!is_managed(node->kind)) return;
    int g = node->gpu->index;
    node->newer = NULL;
    node->older = by_use[g].newest;
    if (node->older)
        node->older->newer = node;
    else
        by_use[g].oldest = node;
    by_use[g].newest = node;
}

static void unlink_by_use(struct allocation *node) {
    if (!is_managed(node->kind)) return;
    int g = node->gpu->index;
    /* a walk that has stopped here restarts at the next step; visited records contain the walk's number */
    if (by_use[g].next == node) by_use[g].next = NULL;
    *(node->newer ? &node->newer->older : &by_use[g].newest) = node->older;
    *(node->older ? &node->older->newer : &by_use[g].oldest) = node->newer;
}

static void insert(struct allocation *node) {
    node->walk = 0; /* no walk has visited it */
    node->place.key = node->at;
    tree_insert(&root, &node->place);
    link_newest(node);
}

static inline void unlink_record(struct tree_node **link) {
    struct allocation *node = record_of(*link);
    tree_remove(link);
    unlink_by_use(node);
    record_spare(node);
}

static inline void drop(struct tree_node **link) {
    const struct allocation *node = record_of(*link);
    account_subtract(node->gpu, node->capacity, account_for(node->kind));
    unlink_record(link);
}

/* With the lock held. */
static __attribute__((noinline, cold)) void drop_stale(struct allocation *stale, CUdeviceptr at, size_t capacity) {
    do drop(tree_link(&root, stale->at, 0));
    while ((stale = last_up_to(at + capacity - 1)) && stale->at + stale->capacity > at);
}

/* With the lock held. */
static void record_add(struct gpu *gpu, CUdeviceptr at, size_t bytes, size_t capacity, enum allocation_kind kind,
                       CUcontext context) {
    struct allocation *stale = last_up_to(at + capacity - 1);
    if (unlikely(stale && stale->at + stale->capacity > at)) drop_stale(stale, at, capacity);
    struct allocation *node = record_new();
    if (!node) return; /* the memory stays counted, and the driver frees it */
    node->at = at;
    node->bytes = bytes;
    node->capacity = capacity;
    node->kind = kind;
    node->gpu = gpu;
    node->context = context;
    node->number = ++newest;
    insert(node);
}

static CUcontext current_context(void) {
    CUcontext context = NULL;
    return real.cuCtxGetCurrent(&context) == CUDA_SUCCESS ? context : NULL;
}

void allocations_add(struct gpu *gpu, CUdeviceptr at, size_t bytes, size_t capacity, enum allocation_kind kind) {
    CUcontext context = current_context();
    account_lock();
    record_add(gpu, at, bytes, capacity, kind, context);
    account_unlock();
}

bool allocations_add_within(struct gpu *gpu, CUdeviceptr at, size_t bytes, enum allocation_kind kind) {
    CUcontext context = current_context();
    uint64_t held = account_driver_bytes(gpu);
    account_lock();
    bool fits = account_fits(gpu, bytes, held, atomic_load(&gpu->allowance));
    if (fits) {
        account_add(gpu, bytes, account_for(kind));
        record_add(gpu, at, bytes, bytes, kind, context);
    }
    account_unlock();
    if (fits) account_changed(gpu);
    return fits;
}

bool allocations_find(CUdeviceptr at, struct allocation *copy) {
    account_lock();
    struct allocation *node = containing(at);
    if (node) copy_fields(copy, node);
    account_unlock();
    return node != NULL;
}

bool allocations_find_converted(CUdeviceptr at, struct allocation *copy) {
    return allocations_find(at, copy) && copy->kind == ALLOCATION_CONVERTED;
}

bool allocations_remove(CUdeviceptr at, struct allocation *copy) {
    account_lock();
    struct tree_node **link = tree_link(&root, at, 0);
    bool present = *link != NULL;
    if (present) {
        copy_fields(copy, record_of(*link));
        unlink_record(link);
    }
    account_unlock();
    return present;
}

CUresult allocations_freed(const struct allocation *copy, CUresult result) {
    if (likely(result == CUDA_SUCCESS)) {
        account_return(copy->gpu, copy->capacity, account_for(copy->kind));
        return result;
    }
    account_lock();
    struct allocation *node = record_new();
    if (node) {
        copy_fields(node, copy);
        insert(node);
    }
    account_unlock();
    return result;
}

static struct allocation *any_of(struct tree_node *tree, CUcontext context, uint64_t until) {
    struct allocation *node = record_of(tree);
    if (!node || (node->context == context && node->number <= until)) return node;
    struct allocation *match = any_of(tree->left, context, until);
    return match ? match : any_of(tree->right, context, until);
}

uint64_t allocations_newest(void) {
    account_lock();
    uint64_t number = newest;
    account_unlock();
    return number;
}

void allocations_remove_context(CUcontext context, uint64_t until) {
    account_lock();
    struct allocation *node;
    while ((node = any_of(root, context, until))) {
        struct gpu *gpu = node->gpu;
        drop(tree_link(&root, node->at, 0));
        account_changed(gpu);
    }
    account_unlock();
}

static void move(struct tree_node *tree, CUcontext from, CUcontext to) {
    struct allocation *node = record_of(tree);
    if (!node) return;
    if (node->context == from) node->context = to;
    move(tree->left, from, to);
    move(tree->right, from, to);
}

void allocations_move_context(CUcontext from, CUcontext to) {
    account_lock();
    move(root, from, to);
    account_unlock();
}

bool allocations_walk(struct gpu *gpu, uint64_t walk, bool newest_first, size_t part, allocation_visit visit,
                      void *closure) {
    int g = gpu->index;
    bool ended = false;
    account_lock();
    struct allocation *node = by_use[g].next;
    if (!node || node->walk != walk) node = newest_first ? by_use[g].newest : by_use[g].oldest;
    while (true) {
        if (!node) {
            ended = true;
            break;
        }
        if (node->walk != walk) {
            node->walk = walk;
            node->walked = 0;
        }
        if (node->walked >= node->capacity) {
            node = newest_first ? node->older : node->newer;
            continue;
        }
        size_t left = node->capacity - node->walked, bytes = left < part ? left : part;
        if (!visit(closure, node->context, node->at + node->walked, bytes, node->number)) break;
        node->walked += bytes;
    }
    by_use[g].next = node;
    account_unlock();
    return ended;
}

/* ---- conversion ---- */

_Atomic bool allocation_conversion;
static bool switched_off;

void allocations_prepare_conversion(void) {
    const char *setting = getenv("GPUSHARE_MANAGED");
    switched_off = settings_engine() != ENGINE_MANAGED || (setting && strcmp(setting, "0") == 0);
}

void allocations_set_conversion(bool oversubscribed) {
    atomic_store(&allocation_conversion, oversubscribed && !switched_off);
}

RESET_IN_CHILD(allocations_reset);
void allocations_reset(void) {
    root = NULL;
    memset(by_use, 0, sizeof by_use);
    spare_records = NULL;
}
