#define _GNU_SOURCE
#include "memory/allowance.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "contexts/lanes.h"
#include "memory/account.h"
#include "memory/block_cache.h"
#include "memory/pool_memory.h"
#include "platform/engine.h"
#include "platform/futex.h"
#include "platform/session_socket.h"
#include "platform/wake.h"

enum allowance_answer {
    ALLOWANCE_REFUSED,  /* beyond a limit: the allocation fails */
    ALLOWANCE_GREW,     /* compare again */
    ALLOWANCE_UNCHECKED /* nobody answers: the allocation is made without the agent */
};

/* The agent answers within half a second even where it has to ask other processes first. A machine whose cores are all
   busy adds to that, and an allocation without the agent's answer may exceed the session's limit. */
#define ANSWER_PATIENCE (2 * SECOND)
/* The agent waits for half a second for what it recalls. */
#define RECALL_PATIENCE (300 * MILLISECOND)

static struct question {
    pthread_mutex_t asking; /* one thread asks at a time */
    _Atomic uint64_t bytes;
    _Atomic uint32_t kind;
    _Atomic uint32_t number; /* of the newest question; questions of one connection and of the next are told apart */
    uint32_t sent;
    _Atomic uint32_t answered; /* futex: the number of the question that was answered last */
    _Atomic uint32_t result;
    _Atomic bool silent; /* the last question had no answer: nobody waits again before the agent has spoken */
    struct {             /* background thread only */
        uint64_t number; /* 0: none */
        uint64_t wanted, until;
    } recall; /* of what is cached, while the driver takes it back */
} questions[MAX_GPUS] = {[0 ... MAX_GPUS - 1] = {.asking = PTHREAD_MUTEX_INITIALIZER}};

static struct question *question_of(const struct gpu *gpu) {
    return &questions[gpu->index];
}

static enum allowance_answer ask(struct gpu *gpu, struct question *question, uint64_t bytes, uint32_t kind) {
    bool wait = !atomic_load(&question->silent);
    atomic_store(&question->bytes, bytes);
    atomic_store(&question->kind, kind);
    uint32_t number = atomic_load(&question->number) + 1;
    atomic_store(&question->number, number);
    wake_up();
    uint64_t deadline = clock_now() + ANSWER_PATIENCE, now;
    uint32_t answered;
    while ((answered = atomic_load(&question->answered)) != number && wait && (now = clock_now()) < deadline) {
        struct timespec left = {(time_t)((deadline - now) / SECOND), (long)((deadline - now) % SECOND)};
        futex_wait(&question->answered, answered, &left);
    }
    if (answered == number)
        return atomic_load(&question->result) == RESERVED_GRANTED ? ALLOWANCE_GREW : ALLOWANCE_REFUSED;
    if (wait) {
        atomic_store(&question->silent, true);
        log_line(LOG_ERROR, "the agent has not answered for %d s; memory of GPU %d is allocated without it",
                 (int)(ANSWER_PATIENCE / SECOND), gpu->index);
    }
    return ALLOWANCE_UNCHECKED;
}

static enum allowance_answer ask_agent(struct gpu *gpu, uint64_t bytes, bool managed, bool own_managed) {
    struct question *question = question_of(gpu);
    if (!atomic_load(&gpu->reserving) || !wake_listens()) return ALLOWANCE_REFUSED; /* the process's own limit */
    int kept = errno;
    uint64_t before = atomic_load(&gpu->allowance);
    pthread_mutex_lock(&question->asking);
    enum allowance_answer answer = ALLOWANCE_GREW; /* for a thread that asked before this one */
    if (atomic_load(&gpu->allowance) <= before)
        answer = ask(gpu, question, bytes, own_managed ? RESERVE_OWN_MANAGED : managed ? RESERVE_MANAGED : 0);
    pthread_mutex_unlock(&question->asking);
    errno = kept;
    return answer;
}

/* The slow path: more than the allowance. The allowance of a session with several busy processes may be gone again
   before it is used, so it is asked for more than once. */
static bool take_after_asking(struct gpu *gpu, const struct memory_wanted *wanted, bool own) {
    uint64_t total = atomic_load(&gpu->total);
    for (int rounds = 0; rounds < 16; rounds++) {
        if (own && !atomic_load(&gpu->reserving)) return account_take_within(gpu, wanted, UINT64_MAX);
        switch (ask_agent(gpu, account_growth(gpu, wanted), wanted->account == ACCOUNT_MANAGED, own)) {
        case ALLOWANCE_REFUSED:
            /* an agent that went meanwhile leaves the process its own limit */
            return !atomic_load(&gpu->reserving) && account_take_within(gpu, wanted, 0);
        case ALLOWANCE_UNCHECKED: return account_take_within(gpu, wanted, own || !total ? UINT64_MAX : total);
        case ALLOWANCE_GREW: break;
        }
        if (account_take_within(gpu, wanted, 0)) return true;
    }
    return false;
}

/* Whether the session would have more than it is shown with what is wanted. */
static bool at_the_limit(struct gpu *gpu, const struct memory_wanted *wanted) {
    uint64_t total = atomic_load(&gpu->total), used = account_used(gpu) + atomic_load(&gpu->others);
    size_t growth = account_growth(gpu, wanted);
    return total && (growth > total || used > total - growth);
}

/* Give back what the program has freed itself, and what is kept for its next allocations. */
static bool give_freed_back(struct gpu *gpu, size_t bytes) {
    bool cached = block_cache_trim(gpu, bytes);
    return pool_memory_release(gpu, true) || cached;
}

static bool take(struct gpu *gpu, const struct memory_wanted *wanted, bool limited) {
    bool fits = account_take_within(gpu, wanted, 0);
    /* what the program has freed itself must not be what is missing; short of the limit asking is cheaper than freeing
     */
    if (!fits && at_the_limit(gpu, wanted) && give_freed_back(gpu, wanted->bytes))
        fits = account_take_within(gpu, wanted, 0);
    if (!fits) fits = take_after_asking(gpu, wanted, !limited);
    if (!fits && give_freed_back(gpu, wanted->bytes))
        fits = account_take_within(gpu, wanted, 0) || take_after_asking(gpu, wanted, !limited);
    if (fits) account_changed(gpu);
    if (unlikely(engine_suspends()) && lanes_passage) lanes_passage->wanted = fits ? wanted->bytes : LANES_REFUSED;
    return fits;
}

bool allowance_take(struct gpu *gpu, size_t bytes, bool managed, bool limited) {
    struct memory_wanted wanted = {bytes, managed ? ACCOUNT_MANAGED : ACCOUNT_PLAIN, NULL};
    return take(gpu, &wanted, limited);
}

bool allowance_take_from_pool(struct gpu *gpu, size_t bytes, CUmempool pool) {
    return take(gpu, &(struct memory_wanted){bytes, ACCOUNT_POOLED, pool}, true);
}

/* A waiting thread goes on. */
static void answer(struct question *question, uint32_t number, uint32_t result) {
    atomic_store(&question->silent, false);
    atomic_store(&question->result, result);
    atomic_store(&question->answered, number);
    futex_wake(&question->answered);
}

static void tell(struct gpu *gpu, enum frame_type type, uint64_t f0, uint64_t f1, uint64_t f2, uint64_t f3,
                 uint64_t f4) {
    struct frame frame = {.type = (uint16_t)type, .f = {f0, f1, f2, f3, f4}};
    memcpy(frame.gpu, gpu->uuid.bytes, 16);
    session_socket_send(&frame);
}

void allowance_begin(struct gpu *gpu, bool grants) {
    struct question *question = question_of(gpu);
    question->recall.number = 0;
    atomic_store(&gpu->others, 0);
    if (!grants) {
        allowance_end(gpu);
        return;
    }
    atomic_store(&gpu->allowance, 0);
    atomic_store(&gpu->reserving, true);
    atomic_store(&question->silent, false);
    uint64_t used = account_used(gpu);
    tell(gpu, FRAME_RESERVE, used, used, 0, 0, 0);
    question->sent = atomic_load(&question->answered); /* a thread that waits asks this agent again */
}

void allowance_end(struct gpu *gpu) {
    struct question *question = question_of(gpu);
    uint64_t total = atomic_load(&gpu->total);
    question->recall.number = 0;
    atomic_store(&gpu->others, 0);
    atomic_store(&gpu->reserving, false);
    atomic_store(&gpu->allowance, total ? total : UINT64_MAX);
    answer(question, atomic_load(&question->number), RESERVED_GRANTED);
}

void allowance_reserved(struct gpu *gpu, const struct frame *frame) {
    if (!atomic_load(&gpu->reserving)) return;
    uint64_t allowance = atomic_load(&gpu->allowance);
    uint64_t added = frame->f[0] <= UINT64_MAX - allowance ? frame->f[0] : UINT64_MAX - allowance;
    atomic_store(&gpu->allowance, allowance + added);
    atomic_store(&gpu->others, frame->f[3]);
    if (frame->f[2]) answer(question_of(gpu), (uint32_t)frame->f[2], (uint32_t)frame->f[1]);
}

static uint64_t unused(const struct gpu *gpu) {
    uint64_t allowance = atomic_load(&gpu->allowance), used = account_used(gpu);
    return allowance > used ? allowance - used : 0;
}

static void give_back(struct gpu *gpu, uint64_t wanted, uint64_t number) {
    uint64_t allowance = atomic_load(&gpu->allowance), given = unused(gpu);
    if (given > wanted) given = wanted;
    atomic_store(&gpu->allowance, allowance - given);
    account_settle(); /* a thread that allocates now either sees the smaller allowance, or is seen here */
    uint64_t used = account_used(gpu);
    if (used > allowance - given) {
        uint64_t kept = used - (allowance - given);
        if (kept > given) kept = given;
        given -= kept;
        atomic_store(&gpu->allowance, allowance - given);
    }
    tell(gpu, FRAME_RETURN, given, used, number, 0, 0);
}

void allowance_recalled(struct gpu *gpu, const struct frame *frame) {
    struct question *question = question_of(gpu);
    if (!atomic_load(&gpu->reserving)) return;
    if (question->recall.number) give_back(gpu, question->recall.wanted, question->recall.number);
    question->recall.wanted = frame->f[0];
    question->recall.number = frame->f[1];
    question->recall.until = clock_now() + RECALL_PATIENCE;
    if (!frame->f[1]) give_back(gpu, frame->f[0], 0);
}

static uint64_t recall_step(struct gpu *gpu, struct question *question, uint64_t now, bool device_quiet) {
    if (!question->recall.number) return UINT64_MAX;
    pool_memory_release(gpu, false);
    if (now < question->recall.until && unused(gpu) < question->recall.wanted && atomic_load(&gpu->cached)) {
        /* what the program has freed is nobody's; the driver takes it at once when there is no work to wait for */
        if (device_quiet) block_cache_give_back(gpu);
        return question->recall.until;
    }
    give_back(gpu, question->recall.wanted, question->recall.number);
    question->recall.number = 0;
    return UINT64_MAX;
}

void allowance_others(struct gpu *gpu, const struct frame *frame) {
    if (frame->f[0] == SESSION_MEMORY_OTHERS) atomic_store(&gpu->others, frame->f[1]);
}

uint64_t allowance_step(struct gpu *gpu, uint64_t now, bool device_quiet) {
    struct question *question = question_of(gpu);
    if (!atomic_load(&gpu->reserving)) return UINT64_MAX;
    uint32_t number = atomic_load(&question->number);
    if (number != question->sent) {
        question->sent = number;
        uint64_t used = account_used(gpu), bytes = atomic_load(&question->bytes);
        uint64_t wanted = bytes <= UINT64_MAX - used ? used + bytes : UINT64_MAX;
        tell(gpu, FRAME_RESERVE, wanted, used, bytes, number, atomic_load(&question->kind));
    }
    return recall_step(gpu, question, now, device_quiet);
}
