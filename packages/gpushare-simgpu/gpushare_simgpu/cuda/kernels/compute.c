#include "cuda/kernels/compute.h"

#include "common/clock.h"
#include "common/engines.h"
#include "common/mig.h"
#include "common/processes.h"
#include "common/turns.h"
#include "cuda/paging/residency.h"

/* Streams of this process that want the engine, in order; the process as a whole takes turns with other processes. */
static struct line {
    pthread_mutex_t lock;
    pthread_cond_t moved;
    uint64_t next, serving;
} lines[MAX_NUMBERS] = {[0 ... MAX_NUMBERS - 1] = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0}};

static void enter(int gpu) {
    struct line *line = &lines[gpu];
    pthread_mutex_lock(&line->lock);
    uint64_t ticket = line->next++;
    while (line->serving != ticket) pthread_cond_wait(&line->moved, &line->lock);
    pthread_mutex_unlock(&line->lock);
    turns_wait(driver.state, gpu, driver.slot);
}

static void leave(struct stream *stream, int gpu) {
    struct line *line = &lines[gpu];
    pthread_mutex_lock(&line->lock);
    int wanted = line->next > line->serving + 1 || stream_wants_engine(stream);
    gpu_lock(driver.state, gpu);
    /* also removes the ticket that other processes gave it while it was stopped */
    if (!wanted || turns_over(driver.state, gpu, clock_now())) turns_forget(driver.state, gpu, driver.slot);
    gpu_unlock(driver.state, gpu);
    line->serving++;
    pthread_cond_broadcast(&line->moved);
    pthread_mutex_unlock(&line->lock);
}

static uint64_t pages_of(const struct range *range, uint64_t page) {
    return range->size ? (range->address + range->size - 1) / page - range->address / page + 1 : 0;
}

/* Return an address in the n-th page that the work touches. */
static uint64_t nth_page(const struct work *work, uint64_t n, uint64_t page) {
    for (int i = 0; i < work->range_count; i++) {
        const struct range *range = &work->ranges[i];
        uint64_t count = pages_of(range, page);
        if (n < count) return n ? (range->address / page + n) * page : range->address;
        n -= count;
    }
    return 0;
}

/* Touch pages and compute for about one time slice: at most one fault longer, and a rest of the work that is below 1/16
 * slice runs too. Returns the duration. `device_ns`: the device time of the whole work. */
static uint64_t slice(const struct work *work, int number, uint64_t pages, uint64_t device_ns, uint64_t *touched,
                      uint64_t *computed) {
    struct state *state = driver.state;
    struct gpu *gpu = &state->gpus[number];
    uint64_t budget = state->settings.slice_ns, spent = 0, fault_ns = 0;
    for (;;) {
        /* what the touched pages allow; long work on few pages takes many slices for each page */
        uint64_t due = *touched == pages ? device_ns : (uint64_t)((double)device_ns * (double)*touched / (double)pages);
        uint64_t most = spent < budget ? budget - spent : 0;
        if (due - *computed < most + budget / 16) most = due - *computed;
        *computed += most;
        spent += most;
        if (*touched == pages || *computed < due || spent >= budget) break;
        struct moved moved = {0};
        residency_bring(nth_page(work, *touched, state->settings.page), number, 0, &moved);
        ++*touched;
        uint64_t ns = residency_fault_ns(&moved);
        spent += ns;
        fault_ns += ns;
        gpu->stats.faulted_in += moved.in;
        gpu->stats.fault_evicted += moved.evicted;
        gpu->stats.first_touched += moved.first_touched;
        gpu->stats.remote += moved.remote;
    }
    gpu->stats.fault_ns += fault_ns;
    return spent;
}

uint64_t compute_device_ns(int gpu, const struct work *work) {
    return work->device_ns + driver.state->settings.launch_ns +
           clock_transfer_ns(work->passed, mig_hbm(driver.state, gpu));
}

/* Subtract device time from the queued time, at most all of it. */
static void uncount(struct gpu *gpu, uint64_t ns) {
    uint64_t *queued = &gpu->queued_ns[driver.slot], seen = __atomic_load_n(queued, __ATOMIC_RELAXED);
    while (
        !__atomic_compare_exchange_n(queued, &seen, seen > ns ? seen - ns : 0, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

/* Return the part of a slice for which to wait: while this process was stopped, its kernels ran ahead. With the lock
 * held. */
static uint64_t not_ahead(struct gpu *gpu, uint64_t spent, uint64_t *queued) {
    uint64_t ahead = gpu->ahead_ns[driver.slot], part = *queued < spent ? *queued : spent;
    if (ahead > part) ahead = part;
    gpu->ahead_ns[driver.slot] -= ahead;
    *queued -= part;
    uncount(gpu, part - ahead);
    return spent - ahead;
}

uint64_t compute_run(struct stream *stream, const struct work *work, uint64_t ready) {
    struct state *state = driver.state;
    int number = stream->context->gpu, first = 1;
    struct gpu *gpu = &state->gpus[number];
    uint64_t pages = 0, touched = 0, computed = 0, end = ready;
    uint64_t device_ns = compute_device_ns(number, work), queued = work->queued_ns;
    for (int i = 0; i < work->range_count; i++) {
        if (!memory_accessible(work->ranges[i].address, work->ranges[i].size, stream->context->device,
                               work->ranges[i].written))
            __atomic_store_n(&stream->context->error, CUDA_ERROR_ILLEGAL_ADDRESS, __ATOMIC_RELEASE);
        pages += pages_of(&work->ranges[i], state->settings.page);
    }
    enter(number);
    while (!stream->context->error) {
        if (first) processes_reap(state, 0);
        pthread_mutex_lock(&memory_lock);
        gpu_lock(state, number);
        uint64_t spent = slice(work, number, pages, device_ns, &touched, &computed);
        uint64_t all = spent;
        state->processes[driver.slot].stopped = 0;
        spent = not_ahead(gpu, spent, &queued);
        end = spent || !all ? engine_take(&gpu->compute, ready, spent) : clock_now();
        engine_count_busy(gpu, driver.slot, end - spent, end);
        gpu->stats.busy_ns += spent;
        gpu->stats.kernels += first && work->kernel;
        gpu_unlock(state, number);
        pthread_mutex_unlock(&memory_lock);
        if (first && work->compute) work->compute(work->argument);
        first = 0;
        clock_sleep_until(end);
        ready = end;
        if (touched == pages && computed == device_ns) break;
        gpu_lock(state, number);
        int owned = turns_owned(state, number, driver.slot);
        int over = !owned || turns_over(state, number, clock_now());
        if (over && owned) turns_pass_on(state, number);
        gpu_unlock(state, number);
        if (over) turns_wait(state, number, driver.slot);
    }
    if (queued) uncount(gpu, queued); /* an error ended the work */
    leave(stream, number);
    return end;
}
