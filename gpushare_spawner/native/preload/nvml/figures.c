#define _GNU_SOURCE
#include "nvml/figures.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "driver/gpus.h"
#include "platform/frames.h"
#include "platform/settings.h"

#define FRESH            (1 * SECOND)
#define PATIENCE         (500 * MILLISECOND)
#define KEPT             (5 * SECOND) /* a restarted agent answers within this time */
#define LONGEST_INTERVAL (10 * SECOND)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

struct figures {
    int gpus;
    struct gpu_figures gpu[MAX_GPUS];
};

/* With the lock held: */
static const char *path; /* GPUSHARE_SOCKET at the first query, because the program may change its environment later */
static struct frame_socket connection = FRAME_SOCKET_CLOSED;
static uint64_t queried_at, answered_at; /* 0: not yet */
static uint64_t interval = FRESH;        /* from the end of a query to the next */
static struct figures last, incoming;    /* `incoming`: from the answer that is being read */

bool figures_enabled(void) {
    static _Atomic int read; /* 0: not read yet, 1: yes, 2: no */
    int enabled = atomic_load_explicit(&read, memory_order_relaxed);
    if (!enabled) {
        const char *setting = getenv("GPUSHARE_NVML");
        bool driver = settings_engine() == ENGINE_OBSERVE || (setting && strcmp(setting, "driver") == 0);
        enabled = settings_share() && !driver ? 1 : 2;
        atomic_store_explicit(&read, enabled, memory_order_relaxed);
    }
    return enabled == 1;
}

static struct gpu_figures *gpu_of(struct figures *figures, const unsigned char uuid[16]) {
    for (int i = 0; i < figures->gpus; i++)
        if (memcmp(figures->gpu[i].uuid, uuid, 16) == 0) return &figures->gpu[i];
    return NULL;
}

static struct process_figures *process_of(struct gpu_figures *gpu, uint64_t pid) {
    for (int i = 0; i < gpu->processes; i++)
        if (gpu->process[i].pid == pid) return &gpu->process[i];
    if (gpu->processes == FIGURES_PROCESSES) return NULL;
    gpu->process[gpu->processes] = (struct process_figures){.pid = (unsigned)pid};
    return &gpu->process[gpu->processes++];
}

static unsigned percent(uint64_t part, uint64_t whole) {
    uint64_t value = whole ? (part * 100 + whole / 2) / whole : 0;
    return value > 100 ? 100 : (unsigned)value;
}

/* The state of an answer whose frames are being read. */
struct answer {
    int devices, statuses; /* number of frames still expected; -1: before WELCOME */
    bool movable, with_use;
};

/* Add a frame to the answer. False: the answer is invalid. */
static bool add_frame(struct answer *answer, const struct frame *frame) {
    if (answer->devices < 0) {
        if (frame->type != FRAME_WELCOME || frame->f[WELCOME_DEVICES] > MAX_GPUS) return false;
        answer->devices = answer->statuses = (int)frame->f[WELCOME_DEVICES];
        answer->movable = (frame->f[WELCOME_FLAGS] & WELCOME_OVERSUBSCRIBED) != 0;
        answer->with_use = (frame->f[WELCOME_FEATURES] & FEATURE_USE) != 0;
        incoming.gpus = 0;
        return true;
    }
    if (frame->type == FRAME_ERROR) return false;
    if (frame->type == FRAME_DEVICE && answer->devices > 0) {
        struct gpu_figures *added = &incoming.gpu[incoming.gpus++];
        *added = (struct gpu_figures){.movable = answer->movable, .with_use = answer->with_use};
        memcpy(added->uuid, frame->gpu, 16);
        answer->devices--;
        return true;
    }
    struct gpu_figures *gpu = gpu_of(&incoming, frame->gpu);
    if (!gpu) return true; /* about the session as a whole */
    struct process_figures *process;
    switch (frame->type) {
    case FRAME_STATUS:
        gpu->used = frame->f[STATUS_MEMORY];
        gpu->total = frame->f[STATUS_TOTAL];
        answer->statuses--;
        break;
    case FRAME_SESSION_MEMORY:
        if (frame->f[SESSION_MEMORY_KIND] == SESSION_MEMORY_PROCESS &&
            (process = process_of(gpu, frame->f[PROCESS_PID])) != NULL)
            process->bytes = frame->f[PROCESS_BYTES];
        break;
    case FRAME_USE:
        if (frame->f[USE_PID] == 0)
            gpu->percent = percent(frame->f[USE_TIME], frame->f[USE_PERIOD]);
        else if ((process = process_of(gpu, frame->f[USE_PID])) != NULL)
            process->percent = percent(frame->f[USE_TIME], frame->f[USE_PERIOD]);
        break;
    default: break; /* for other observers */
    }
    return true;
}

/* Read an answer. False: there is none; `silent` is set if none came in time. */
static bool receive_answer(bool *silent) {
    struct answer answer = {.devices = -1, .statuses = 1};
    uint64_t deadline = clock_now() + PATIENCE, now;
    struct frame frame;
    while (answer.statuses > 0) {
        int received = frame_socket_receive(&connection, &frame);
        if (received < 0 || (received > 0 && !add_frame(&answer, &frame))) return false;
        if ((now = clock_now()) >= deadline) {
            *silent = true;
            return false;
        }
        if (received > 0) continue;
        struct pollfd file = {connection.file, POLLIN, 0};
        /* a signal may end the poll early: its handler has run, and the time is bounded */
        poll(&file, 1, (int)((deadline - now) / MILLISECOND) + 1);
    }
    return true;
}

static bool query_agent(bool *silent) {
    struct frame hello = {.type = FRAME_HELLO,
                          .f = {ROLE_OBSERVER, (uint64_t)getpid(), LIBRARY_VERSION, OBSERVER_FEATURES}};
    struct frame query = {.type = FRAME_QUERY};
    if (!path || !frame_socket_connect(&connection, path)) return false;
    bool answered =
        frame_socket_send(&connection, &hello) && frame_socket_send(&connection, &query) && receive_answer(silent);
    frame_socket_close(&connection);
    return answered;
}

static void query(void) {
    bool silent = false;
    if (query_agent(&silent)) {
        struct timespec wall;
        clock_gettime(CLOCK_REALTIME, &wall);
        for (int i = 0; i < incoming.gpus; i++)
            incoming.gpu[i].at = (uint64_t)wall.tv_sec * 1000000 + (uint64_t)wall.tv_nsec / 1000;
        last = incoming;
        answered_at = clock_now();
    }
    queried_at = clock_now();
    /* an agent that hangs delays the program each time, so it is queried less and less often */
    interval = !silent ? FRESH : interval < LONGEST_INTERVAL / 2 ? 2 * interval : LONGEST_INTERVAL;
}

/* Take the lock, and query the agent if a query is due. False, without the lock: NVML shows the driver's figures. */
static bool enter(void) {
    if (!figures_enabled() || !libc_load()) return false;
    libc_watch_forks(); /* before the lock is taken, so that it is not locked in a child */
    pthread_mutex_lock(&lock);
    if (!path) {
        const char *setting = getenv("GPUSHARE_SOCKET");
        path = setting ? strdup(setting) : NULL;
    }
    if (!queried_at || clock_now() - queried_at >= interval) {
        /* a thread canceled here would keep the lock */
        int before;
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
        query();
        pthread_setcancelstate(before, &before);
    }
    return true;
}

/* Whether there is an answer to show. With the lock held. */
static bool have_answer(void) {
    return answered_at && clock_now() - answered_at < KEPT;
}

int figures_gpus(unsigned char (*uuids)[16], int room) {
    if (!enter()) return -1;
    int count = have_answer() ? last.gpus : -1;
    for (int i = 0; i < count && i < room; i++) memcpy(uuids[i], last.gpu[i].uuid, 16);
    pthread_mutex_unlock(&lock);
    return count;
}

bool figures_of(const unsigned char uuid[16], struct gpu_figures *figures) {
    if (!enter()) return false;
    struct gpu_figures *gpu = have_answer() ? gpu_of(&last, uuid) : NULL;
    if (gpu) *figures = *gpu;
    pthread_mutex_unlock(&lock);
    return gpu != NULL;
}

RESET_IN_CHILD(figures_reset);
void figures_reset(void) {
    pthread_mutex_init(&lock, NULL);
    frame_socket_close(&connection);
    queried_at = answered_at = 0;
    interval = FRESH;
}
