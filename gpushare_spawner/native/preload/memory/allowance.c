#define _GNU_SOURCE
#include "memory/allowance.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "contexts/lanes.h"
#include "memory/account.h"
#include "memory/block_cache.h"
#include "platform/settings.h"
#include "platform/wake.h"

enum allowance_answer {
    ALLOWANCE_REFUSED,  /* a limit is exceeded: the allocation fails */
    ALLOWANCE_GREW,     /* compare again */
    ALLOWANCE_UNCHECKED /* no answer: the allocation is made without the agent's consent */
};

/* The agent answers within half a second, even if it first recalls memory from other processes; it takes longer if all
   cores are busy. An allocation without its answer may exceed the session's limit. */
#define ANSWER_PATIENCE (2 * SECOND)
/* The agent waits half a second for recalled memory. */
#define RECALL_PATIENCE (300 * MILLISECOND)

/* The request for a larger allowance on each GPU. */
static struct allowance_request {
    pthread_mutex_t lock; /* held by the thread that makes this request */
    _Atomic uint64_t bytes;
    _Atomic uint32_t kind;
    _Atomic uint32_t number; /* number of the newest request; continues across connections */
    uint32_t sent;
    _Atomic uint32_t answered; /* futex: the number of the last answered request */
    _Atomic uint32_t result;
    _Atomic bool silent; /* the last request was not answered, so no thread waits before the next answer */
    struct {             /* background thread only */
        uint64_t number; /* 0: none */
        uint64_t bytes, until;
    } recall; /* the recall of cached memory while the memory is returned to the driver */
} requests[MAX_GPUS] = {[0 ... MAX_GPUS - 1] = {.lock = PTHREAD_MUTEX_INITIALIZER}};

static struct allowance_request *request_of(const struct gpu *gpu) {
    return &requests[gpu->index];
}

static enum allowance_answer send_request(struct gpu *gpu, struct allowance_request *request, uint64_t bytes,
                                          uint32_t kind) {
    bool wait = !atomic_load(&request->silent);
    atomic_store(&request->bytes, bytes);
    atomic_store(&request->kind, kind);
    uint32_t number = atomic_load(&request->number) + 1;
    atomic_store(&request->number, number);
    wake_up();
    uint64_t deadline = clock_now() + ANSWER_PATIENCE, now;
    uint32_t answered;
    while ((answered = atomic_load(&request->answered)) != number && wait && (now = clock_now()) < deadline) {
        struct timespec left = {(time_t)((deadline - now) / SECOND), (long)((deadline - now) % SECOND)};
        futex_wait(&request->answered, answered, &left);
    }
    if (answered == number)
        return atomic_load(&request->result) == RESERVED_GRANTED ? ALLOWANCE_GREW : ALLOWANCE_REFUSED;
    if (wait) {
        atomic_store(&request->silent, true);
        log_line(LOG_ERROR, "the agent has not answered for %d s; memory of GPU %d is allocated without it",
                 (int)(ANSWER_PATIENCE / SECOND), gpu->index);
    }
    return ALLOWANCE_UNCHECKED;
}

static enum allowance_answer ask_agent(struct gpu *gpu, uint64_t bytes, bool managed, bool own_managed) {
    struct allowance_request *request = request_of(gpu);
    if (!atomic_load(&gpu->reserving) || !wake_listens()) return ALLOWANCE_REFUSED; /* the process's own limit */
    int kept = errno;
    uint64_t before = atomic_load(&gpu->allowance);
    pthread_mutex_lock(&request->lock);
    enum allowance_answer answer = ALLOWANCE_GREW; /* through an earlier thread's request */
    if (atomic_load(&gpu->allowance) <= before)
        answer = send_request(gpu, request, bytes, own_managed ? RESERVE_OWN_MANAGED : managed ? RESERVE_MANAGED : 0);
    pthread_mutex_unlock(&request->lock);
    errno = kept;
    return answer;
}

/* Count a request that exceeds the allowance, with the agent's consent. In a session with several busy processes the
   larger allowance may be recalled before it is used, so several requests may be needed. */
static bool take_with_consent(struct gpu *gpu, const struct memory_request *memory, bool own) {
    uint64_t total = atomic_load(&gpu->total);
    for (int rounds = 0; rounds < 16; rounds++) {
        if (own && !atomic_load(&gpu->reserving)) return account_take_within(gpu, memory, UINT64_MAX);
        switch (ask_agent(gpu, account_growth(gpu, memory), memory->account == ACCOUNT_MANAGED, own)) {
        case ALLOWANCE_REFUSED:
            /* if the connection ended in the meantime, the process has its own limit */
            return !atomic_load(&gpu->reserving) && account_take_within(gpu, memory, 0);
        case ALLOWANCE_UNCHECKED: return account_take_within(gpu, memory, own || !total ? UINT64_MAX : total);
        case ALLOWANCE_GREW: break;
        }
        if (account_take_within(gpu, memory, 0)) return true;
    }
    return false;
}

/* Whether the session, with the requested memory, would have more than the total that CUDA shows. */
static bool at_the_limit(struct gpu *gpu, const struct memory_request *memory) {
    uint64_t total = atomic_load(&gpu->total), used = account_used(gpu) + atomic_load(&gpu->others);
    size_t growth = account_growth(gpu, memory);
    return total && (growth > total || used > total - growth);
}

/* Release memory that the program has freed: cached blocks, and unused memory of pools. */
static bool release_freed(struct gpu *gpu, size_t bytes) {
    bool cached = block_cache_trim(gpu, bytes);
    return account_pools_trim(gpu, true) || cached;
}

static bool take(struct gpu *gpu, const struct memory_request *memory, bool limited) {
    bool fits = account_take_within(gpu, memory, 0);
    /* at the limit, memory that the program has freed counts against the limit; below it, a request is cheaper than a
       release */
    if (!fits && at_the_limit(gpu, memory) && release_freed(gpu, memory->bytes))
        fits = account_take_within(gpu, memory, 0);
    if (!fits) fits = take_with_consent(gpu, memory, !limited);
    if (!fits && release_freed(gpu, memory->bytes))
        fits = account_take_within(gpu, memory, 0) || take_with_consent(gpu, memory, !limited);
    if (fits) account_changed(gpu);
    if (unlikely(settings_engine_suspends()) && lanes_passage)
        lanes_passage->counted = fits ? memory->bytes : LANES_REFUSED;
    return fits;
}

bool allowance_take(struct gpu *gpu, size_t bytes, bool managed, bool limited) {
    struct memory_request memory = {bytes, managed ? ACCOUNT_MANAGED : ACCOUNT_PLAIN, NULL};
    return take(gpu, &memory, limited);
}

bool allowance_take_from_pool(struct gpu *gpu, size_t bytes, CUmempool pool) {
    return take(gpu, &(struct memory_request){bytes, ACCOUNT_POOLED, pool}, true);
}

/* Wake the thread that waits for the answer. */
static void answer(struct allowance_request *request, uint32_t number, uint32_t result) {
    atomic_store(&request->silent, false);
    atomic_store(&request->result, result);
    atomic_store(&request->answered, number);
    futex_wake(&request->answered);
}

void allowance_begin(struct gpu *gpu, bool grants) {
    struct allowance_request *request = request_of(gpu);
    request->recall.number = 0;
    atomic_store(&gpu->others, 0);
    if (!grants) {
        allowance_end(gpu);
        return;
    }
    atomic_store(&gpu->allowance, 0);
    atomic_store(&gpu->reserving, true);
    atomic_store(&request->silent, false);
    uint64_t used = account_used(gpu);
    gpu_send(gpu, (struct frame){.type = FRAME_RESERVE, .f = {used, used}});
    request->sent = atomic_load(&request->answered); /* the request of a waiting thread is sent again */
}

void allowance_end(struct gpu *gpu) {
    struct allowance_request *request = request_of(gpu);
    uint64_t total = atomic_load(&gpu->total);
    request->recall.number = 0;
    atomic_store(&gpu->others, 0);
    atomic_store(&gpu->reserving, false);
    atomic_store(&gpu->allowance, total ? total : UINT64_MAX);
    answer(request, atomic_load(&request->number), RESERVED_GRANTED);
}

void allowance_reserved(struct gpu *gpu, const struct frame *frame) {
    if (!atomic_load(&gpu->reserving)) return;
    uint64_t allowance = atomic_load(&gpu->allowance);
    uint64_t added =
        frame->f[RESERVED_ADDED] <= UINT64_MAX - allowance ? frame->f[RESERVED_ADDED] : UINT64_MAX - allowance;
    atomic_store(&gpu->allowance, allowance + added);
    atomic_store(&gpu->others, frame->f[RESERVED_OTHERS]);
    if (frame->f[RESERVED_NUMBER])
        answer(request_of(gpu), (uint32_t)frame->f[RESERVED_NUMBER], (uint32_t)frame->f[RESERVED_RESULT]);
}

static uint64_t unused(const struct gpu *gpu) {
    uint64_t allowance = atomic_load(&gpu->allowance), used = account_used(gpu);
    return allowance > used ? allowance - used : 0;
}

static void return_unused(struct gpu *gpu, uint64_t bytes, uint64_t number) {
    uint64_t allowance = atomic_load(&gpu->allowance), given = unused(gpu);
    if (given > bytes) given = bytes;
    atomic_store(&gpu->allowance, allowance - given);
    account_settle(); /* a thread that allocates now either sees the smaller allowance or is included in the account
                         here */
    uint64_t used = account_used(gpu);
    if (used > allowance - given) {
        uint64_t kept = used - (allowance - given);
        if (kept > given) kept = given;
        given -= kept;
        atomic_store(&gpu->allowance, allowance - given);
    }
    gpu_send(gpu, (struct frame){.type = FRAME_RETURN, .f = {given, used, number}});
}

void allowance_recalled(struct gpu *gpu, const struct frame *frame) {
    struct allowance_request *request = request_of(gpu);
    if (!atomic_load(&gpu->reserving)) return;
    if (request->recall.number) return_unused(gpu, request->recall.bytes, request->recall.number);
    request->recall.bytes = frame->f[RECALL_BYTES];
    request->recall.number = frame->f[RECALL_NUMBER];
    request->recall.until = clock_now() + RECALL_PATIENCE;
    if (!frame->f[RECALL_NUMBER]) return_unused(gpu, frame->f[RECALL_BYTES], 0);
}

static uint64_t recall_step(struct gpu *gpu, struct allowance_request *request, uint64_t now, bool device_quiet) {
    if (!request->recall.number) return UINT64_MAX;
    account_pools_trim(gpu, false);
    if (now < request->recall.until && unused(gpu) < request->recall.bytes && atomic_load(&gpu->cached)) {
        /* cached blocks can be freed immediately while there is no work to wait for */
        if (device_quiet) block_cache_give_back(gpu);
        return request->recall.until;
    }
    return_unused(gpu, request->recall.bytes, request->recall.number);
    request->recall.number = 0;
    return UINT64_MAX;
}

void allowance_others(struct gpu *gpu, const struct frame *frame) {
    if (frame->f[SESSION_MEMORY_KIND] == SESSION_MEMORY_OTHERS) atomic_store(&gpu->others, frame->f[OTHERS_BYTES]);
}

uint64_t allowance_step(struct gpu *gpu, uint64_t now, bool device_quiet) {
    struct allowance_request *request = request_of(gpu);
    if (!atomic_load(&gpu->reserving)) return UINT64_MAX;
    uint32_t number = atomic_load(&request->number);
    if (number != request->sent) {
        request->sent = number;
        uint64_t used = account_used(gpu), bytes = atomic_load(&request->bytes);
        uint64_t sum = bytes <= UINT64_MAX - used ? used + bytes : UINT64_MAX;
        struct frame frame = {.type = FRAME_RESERVE, .f = {sum, used, bytes, number, atomic_load(&request->kind)}};
        gpu_send(gpu, frame);
    }
    return recall_step(gpu, request, now, device_quiet);
}

RESET_IN_CHILD(allowance_reset);
void allowance_reset(void) {
    memset(requests, 0, sizeof requests);
    for (int i = 0; i < MAX_GPUS; i++) pthread_mutex_init(&requests[i].lock, NULL);
}
