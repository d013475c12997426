#define _GNU_SOURCE
#include "lease/worker.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "contexts/contexts.h"
#include "gate/gate.h"
#include "gate/shortage.h"
#include "lease/bursts.h"
#include "lease/lease.h"
#include "lease/suspension.h"
#include "memory/allocations.h"
#include "memory/allowance.h"
#include "platform/settings.h"
#include "platform/wake.h"

#ifndef SYS_sched_setattr /* not defined in glibc 2.17 */
#ifdef __x86_64__
#define SYS_sched_setattr 314
#else
#define SYS_sched_setattr 274
#endif
#endif

#define GREETING_PATIENCE (1 * SECOND)
/* Waits between connection attempts. They stay short: a process must be arbitrated again within a second of the agent's
   return, and an attempt without a listening agent costs only some microseconds. A process that the agent refuses
   (ERROR) waits longer. */
#define FIRST_BACKOFF   (100 * MILLISECOND)
#define LAST_BACKOFF    (250 * MILLISECOND)
#define REFUSED_BACKOFF (5 * SECOND)
#define SLICE           (200 * MILLISECOND / 1000)
#define MEMORY_INTERVAL (10 * MILLISECOND)

static _Atomic uint32_t first_try; /* futex: 1 when the first connection has been greeted or has failed */

/* GPUSHARE_SOCKET as read at cuInit: later the program may change its environment, which then cannot be read safely. */
static char *socket_path;

static struct {
    bool greeted;
    int devices_to_come;
    uint64_t retry_at, backoff;
    bool refused;        /* by an ERROR on this connection */
    uint64_t last_error; /* the code of the last ERROR on this or an earlier connection; 0: none since WELCOME */
    uint64_t greeting_until, greeted_at;
    uint64_t agent_features; /* from its WELCOME */
} session;

/* The last MEMORY of each GPU. */
static struct {
    uint64_t sent_at;
    struct account_figures figures;
} sent_memory[MAX_GPUS];

static void first_try_over(void) {
    if (atomic_exchange(&first_try, 1)) return;
    futex_wake(&first_try);
}

/* The meaning of an ERROR frame's code (docs/reference/protocol.md). */
static const char *error_meaning(uint64_t code) {
    switch (code) {
    case ERROR_MALFORMED: return "the agent could not read a message of this process";
    case ERROR_VERSION: return "the agent uses another version of the protocol; restart the server";
    case ERROR_NOT_ALLOWED: return "the agent does not let this process use the session's socket";
    case ERROR_SESSION_CLOSED: return "the session has ended";
    default: return "the agent refuses this process for a reason that this library does not know";
    }
}

static void log_lost(enum log_level level, const char *why) {
    log_line(level, "%s; GPU work continues without the agent", why);
}

static void connection_lost(const char *why) {
    if (session.greeted && !session.refused) log_lost(LOG_INFO, why);
    frame_socket_close(&frame_socket_agent);
    uint64_t now = clock_now(), most = session.refused ? REFUSED_BACKOFF : LAST_BACKOFF;
    /* an agent that repeatedly greets and then refuses is also tried less and less often */
    if (session.greeted && (!session.refused || now - session.greeted_at > REFUSED_BACKOFF))
        session.backoff = FIRST_BACKOFF;
    uint64_t wait = session.backoff < most ? session.backoff : most;
    session.backoff = 2 * wait;
    session.greeted = session.refused = false;
    /* a quarter of the wait is random, so that processes that lost the same agent do not connect simultaneously */
    uint64_t chance = (now ^ (uint64_t)getpid() << 20) * 0x9E3779B97F4A7C15ull >> 32;
    session.retry_at = now + wait - (wait / 4 * chance >> 32);
    atomic_store(&shortage_answered, false);
    suspension_disconnected();
    for (int i = 0; i < gpu_count; i++) {
        lease_without_agent(&gpus[i]);
        bursts_observe_end(&gpus[i]);
        allowance_end(&gpus[i]);
    }
    first_try_over();
}

static uint64_t own_features(void) {
    switch (settings_engine()) {
    case ENGINE_SUSPEND: return LIBRARY_FEATURES | FEATURE_SUSPEND;
    case ENGINE_OBSERVE: return FEATURE_OBSERVE;
    default: return LIBRARY_FEATURES;
    }
}

static void connect_now(void) {
    if (!socket_path || !frame_socket_connect(&frame_socket_agent, socket_path)) {
        connection_lost("no agent listens on the session's socket");
        return;
    }
    session.greeted = false;
    session.greeting_until = clock_now() + 30 * SECOND;
    session.devices_to_come = -1;
    struct frame hello = {.type = FRAME_HELLO,
                          .f = {ROLE_CUDA_PROCESS, (uint64_t)getpid(), LIBRARY_VERSION, own_features()}};
    if (!frame_socket_send(&frame_socket_agent, &hello)) connection_lost("the agent does not take frames");
}

/* Whether the agent accepts reports of bursts, with engine `observe`. */
static bool agent_takes_bursts(void) {
    return session.agent_features & FEATURE_OBSERVE;
}

static void send_memory(struct gpu *gpu, uint64_t now) {
    atomic_store(&gpu->changed, false);
    if (settings_engine() == ENGINE_OBSERVE && !(agent_takes_bursts() && atomic_load(&gpu->shared))) return;
    account_settle(); /* a thread that changes the account now either sees `changed` cleared or is included in the
                         account here */
    struct account_figures memory = account_reported(gpu), *last = &sent_memory[gpu->index].figures;
    bool again = atomic_exchange(&gpu->restate, false);
    bool same = memory.managed == last->managed && memory.plain == last->plain && memory.short_of == last->short_of;
    if (!again && same) return;
    sent_memory[gpu->index].sent_at = now;
    *last = memory;
    gpu_send(gpu, (struct frame){.type = FRAME_MEMORY, .f = {memory.managed, memory.plain, memory.short_of}});
}

/* Begin operation on a GPU after WELCOME: with leases, with reports of bursts, or without the agent. */
static void begin_on(struct gpu *gpu) {
    bool observes = settings_engine() == ENGINE_OBSERVE, shared = atomic_load(&gpu->shared);
    if (shared && observes && agent_takes_bursts()) bursts_observe(gpu);
    if (shared && !observes) {
        lease_begin(gpu);
        allowance_begin(gpu, session.agent_features & FEATURE_RESERVE);
    } else {
        lease_without_agent(gpu);
        allowance_end(gpu);
    }
}

static void greeting_complete(void) {
    session.greeted = true;
    atomic_store(&shortage_answered, settings_engine_suspends() && session.agent_features & FEATURE_SUSPEND);
    session.greeted_at = clock_now();
    session.last_error = 0;
    for (int i = 0; i < gpu_count; i++) {
        struct gpu *gpu = &gpus[i];
        sent_memory[i].figures = (struct account_figures){0, 0, 0};
        atomic_store(&gpu->changed, true);
        begin_on(gpu);
    }
    suspension_connected(session.agent_features & FEATURE_SUSPEND);
    first_try_over();
}

static void handle_error(const struct frame *frame) {
    session.refused = true;
    /* logged only once, because a refused process retries every few seconds; the end of a session is not an error */
    if (frame->f[ERROR_CODE] != session.last_error)
        log_lost(frame->f[ERROR_CODE] == ERROR_SESSION_CLOSED ? LOG_INFO : LOG_ERROR,
                 error_meaning(frame->f[ERROR_CODE]));
    session.last_error = frame->f[ERROR_CODE];
}

static bool handle_welcome(const struct frame *frame) {
    if (frame->type != FRAME_WELCOME || frame->f[WELCOME_DEVICES] > MAX_GPUS) return false;
    allocations_set_conversion(frame->f[WELCOME_FLAGS] & WELCOME_OVERSUBSCRIBED);
    session.agent_features = frame->f[WELCOME_FEATURES];
    for (int i = 0; i < gpu_count; i++) atomic_store(&gpus[i].shared, false);
    session.devices_to_come = (int)frame->f[WELCOME_DEVICES];
    if (session.devices_to_come == 0) greeting_complete();
    return true;
}

/* `gpu`: NULL for a GPU that the driver does not show to this process. */
static void handle_device(struct gpu *gpu, const struct frame *frame) {
    if (gpu) {
        atomic_store(&gpu->shared, true);
        /* another layer determines the memory that is shown */
        atomic_store(&gpu->total, settings_engine() == ENGINE_OBSERVE ? 0 : frame->f[DEVICE_TOTAL]);
    }
    if (!session.greeted && --session.devices_to_come <= 0) {
        session.devices_to_come = 0;
        greeting_complete();
    }
}

/* Handle a frame about a GPU. False: it is another frame. */
static bool handle_gpu_frame(struct gpu *gpu, const struct frame *frame) {
    switch (frame->type) {
    case FRAME_GRANT:
        if (frame->f[GRANT_LEASE]) suspension_lease_granted();
        lease_granted(gpu, frame);
        return true;
    case FRAME_REVOKE: lease_revoked(gpu, frame); return true;
    case FRAME_PAGE_OUT: lease_page_out(gpu, frame); return true;
    case FRAME_PAGE_IN: lease_page_in(gpu, frame); return true;
    case FRAME_RESERVED: allowance_reserved(gpu, frame); return true;
    case FRAME_RECALL: allowance_recalled(gpu, frame); return true;
    case FRAME_SESSION_MEMORY: allowance_others(gpu, frame); return true;
    default: return false;
    }
}

/* Handle a frame. False: the frame is not expected now. */
static bool handle(const struct frame *frame) {
    struct gpu *gpu = gpu_of_uuid(frame->gpu);
    if (frame->type == FRAME_ERROR) {
        handle_error(frame);
        return false;
    }
    if (session.devices_to_come < 0) return handle_welcome(frame);
    if (frame->type == FRAME_DEVICE) {
        handle_device(gpu, frame);
        return true;
    }
    if (!session.greeted) return false;
    switch (frame->type) {
    case FRAME_SUSPEND:
        if (settings_engine_suspends()) suspension_requested(frame);
        return settings_engine_suspends();
    case FRAME_RESUMED: suspension_resumed(frame); return true;
    case FRAME_TIER:                /* takes effect through GRANT, REVOKE and PAGE_OUT */
    case FRAME_STATUS: return true; /* for observers */
    default: return gpu && handle_gpu_frame(gpu, frame);
    }
}

static void read_socket(void) {
    struct frame frame;
    bool expected = true;
    int received;
    while (expected && (received = frame_socket_receive(&frame_socket_agent, &frame)) > 0) expected = handle(&frame);
    if (frame_socket_agent.file < 0) {
        connection_lost("the agent does not take frames"); /* an answer could not be sent */
    } else if (!expected) {
        char why[64];
        snprintf(why, sizeof why, "the agent sent an unexpected frame (type %u)", frame.type);
        connection_lost(why);
    } else if (received < 0) {
        connection_lost("the connection to the agent ended");
    }
}

static uint64_t earlier(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

/* Perform one round of due steps. Returns the instant of the next round. */
static uint64_t do_round(void) {
    uint64_t now = clock_now(), next = UINT64_MAX;
    if (frame_socket_agent.file < 0) {
        if (now >= session.retry_at) connect_now();
        if (frame_socket_agent.file < 0) return session.retry_at;
    }
    read_socket();
    if (frame_socket_agent.file < 0) return session.retry_at;
    if (!session.greeted) {
        if (now > session.greeting_until) connection_lost("the agent did not answer HELLO");
        return frame_socket_agent.file < 0 ? session.retry_at : session.greeting_until;
    }
    next = earlier(next, suspension_step(now));
    for (int i = 0; i < gpu_count; i++) {
        struct gpu *gpu = &gpus[i];
        if (atomic_load(&gpu->changed)) {
            uint64_t due = sent_memory[i].sent_at + MEMORY_INTERVAL;
            if (now >= due)
                send_memory(gpu, now);
            else
                next = earlier(next, due);
        }
        next = earlier(next, allowance_step(gpu, now, lease_device_quiet(gpu, now)));
        next = earlier(next, lease_step(gpu));
        next = earlier(next, bursts_observe_step(gpu, now));
    }
    if (frame_socket_agent.file < 0) { /* sending failed during the round */
        connection_lost("the agent does not take frames");
        return session.retry_at;
    }
    return next;
}

/* Shorten this thread's time slice: the scheduler then runs it sooner after it wakes, and for less time in a row, so
   that answers to the agent do not wait for notebooks that keep all cores busy. Needs no privileges; kernels before
   6.12 ignore it, and other kernels may refuse it. */
static void shorten_slice(void) {
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } attributes = {.size = 48, .policy = SCHED_OTHER, .runtime = SLICE};
    _Static_assert(sizeof attributes == 48, "struct sched_attr of Linux 3.14");
    if (sched_getscheduler(0) != SCHED_OTHER) return;
    errno = 0;
    attributes.nice = getpriority(PRIO_PROCESS, 0); /* of this thread */
    if (!errno) syscall(SYS_sched_setattr, 0, &attributes, 0);
}

static void *work(void *unused) {
    shorten_slice();
    /* otherwise a query by this thread would be a forbidden call during another thread's capture and would end the
       capture */
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    real.cuThreadExchangeStreamCaptureMode(&mode);
    while (true) {
        wake_begin();
        uint64_t next = do_round(), now = clock_now();
        struct pollfd files[2] = {{wake_file(), POLLIN, 0}, {frame_socket_agent.file, POLLIN, 0}};
        uint64_t wait = next > now ? next - now : 0;
        struct timespec timeout = {(time_t)(wait / SECOND), (long)(wait % SECOND)};
        /* a file of -1 is ignored */
        if (ppoll(files, 2, next == UINT64_MAX ? NULL : &timeout, NULL) > 0 && files[0].revents) wake_clear();
    }
    return unused;
}

static void at_exit(void) {
    contexts_turns_stop();
    suspension_exit();
    for (int i = 0; i < gpu_count; i++) gate_open(&gpus[i]);
}

void worker_start(void) {
    static bool exit_watched;
    const char *path = getenv("GPUSHARE_SOCKET");
    if (!socket_path && path) socket_path = strdup(path);
    allocations_prepare_conversion();
    session.backoff = FIRST_BACKOFF;
    session.retry_at = 0;
    session.greeted = session.refused = false;
    if (!wake_open()) {
        log_line(LOG_ERROR, "cannot make an eventfd (%s); GPU work of this program runs without the agent",
                 strerror(errno));
        return;
    }
    contexts_turns_allow();
    if (!exit_watched) exit_watched = atexit(at_exit) == 0;

    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals go to the program's own threads */
    pthread_t thread;
    int failed = pthread_create(&thread, &attributes, work, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (failed) {
        log_line(LOG_ERROR, "cannot start a thread (%s); GPU work of this program runs without the agent",
                 strerror(failed));
        wake_close();
        return;
    }
    pthread_setname_np(thread, "gpushare");

    uint64_t deadline = clock_now() + GREETING_PATIENCE, now;
    while (!atomic_load(&first_try) && (now = clock_now()) < deadline) {
        struct timespec left = {(time_t)((deadline - now) / SECOND), (long)((deadline - now) % SECOND)};
        futex_wait(&first_try, 0, &left);
    }
}

RESET_IN_CHILD(worker_reset);
void worker_reset(void) {
    atomic_store(&first_try, 0);
    memset(sent_memory, 0, sizeof sent_memory);
}
