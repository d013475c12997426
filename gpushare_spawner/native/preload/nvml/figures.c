#define _GNU_SOURCE
#include "nvml/figures.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "driver/gpus.h"
#include "platform/engine.h"
#include "platform/frame_socket.h"
#include "platform/sharing.h"

#define FRESH    (1 * SECOND)
#define PATIENCE (500 * MILLISECOND)
#define KEPT     (5 * SECOND) /* an agent that is started again answers by then */
#define LONGEST  (10 * SECOND)

static pthread_mutex_t asking = PTHREAD_MUTEX_INITIALIZER;

struct figures {
    int gpus;
    struct gpu_figures gpu[MAX_GPUS];
};

/* With the lock held. */
static const char *path; /* as it was at the first question: the program may change its environment */
static struct frame_socket connection = FRAME_SOCKET_CLOSED;
static uint64_t asked_at, answered_at; /* 0: not yet */
static uint64_t interval = FRESH;      /* from the end of a question to the next */
static struct figures last, coming;    /* `coming`: of the answer that is being read */

bool figures_wanted(void) {
    static _Atomic int answer; /* 0: not asked yet */
    int known = atomic_load_explicit(&answer, memory_order_relaxed);
    if (!known) {
        const char *setting = getenv("GPUSHARE_NVML");
        bool driver = engine_wanted() == ENGINE_OBSERVE || (setting && strcmp(setting, "driver") == 0);
        known = sharing_wanted() && !driver ? 1 : 2;
        atomic_store_explicit(&answer, known, memory_order_relaxed);
    }
    return known == 1;
}

static void in_child(void) {
    /* a thread of the parent may have held it, in the middle of an answer */
    pthread_mutex_init(&asking, NULL);
    frame_socket_close(&connection);
    asked_at = answered_at = 0;
    interval = FRESH;
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
    uint64_t found = whole ? (part * 100 + whole / 2) / whole : 0;
    return found > 100 ? 100 : (unsigned)found;
}

/* An answer in the course of its frames. */
struct answer {
    int devices, statuses; /* that are still to come; -1: before WELCOME */
    bool movable, with_use;
};

/* False: the answer is not to be used. */
static bool take(struct answer *answer, const struct frame *frame) {
    if (answer->devices < 0) {
        if (frame->type != FRAME_WELCOME || frame->f[5] > MAX_GPUS) return false;
        answer->devices = answer->statuses = (int)frame->f[5];
        answer->movable = (frame->f[4] & WELCOME_OVERSUBSCRIBED) != 0;
        answer->with_use = (frame->f[6] & FEATURE_USE) != 0;
        coming.gpus = 0;
        return true;
    }
    if (frame->type == FRAME_ERROR) return false;
    if (frame->type == FRAME_DEVICE && answer->devices > 0) {
        struct gpu_figures *added = &coming.gpu[coming.gpus++];
        *added = (struct gpu_figures){.movable = answer->movable, .with_use = answer->with_use};
        memcpy(added->uuid, frame->gpu, 16);
        answer->devices--;
        return true;
    }
    struct gpu_figures *gpu = gpu_of(&coming, frame->gpu);
    if (!gpu) return true; /* of the session as a whole */
    struct process_figures *process;
    switch (frame->type) {
    case FRAME_STATUS:
        gpu->used = frame->f[STATUS_MEMORY];
        gpu->total = frame->f[STATUS_TOTAL];
        answer->statuses--;
        break;
    case FRAME_SESSION_MEMORY:
        if (frame->f[0] == SESSION_MEMORY_PROCESS && (process = process_of(gpu, frame->f[1])) != NULL)
            process->bytes = frame->f[2];
        break;
    case FRAME_USE:
        if (frame->f[0] == 0)
            gpu->percent = percent(frame->f[1], frame->f[2]);
        else if ((process = process_of(gpu, frame->f[0])) != NULL)
            process->percent = percent(frame->f[1], frame->f[2]);
        break;
    default: break; /* for other observers */
    }
    return true;
}

/* False: no answer, or none in time, and then it counts as `silent`. */
static bool hear(bool *silent) {
    struct answer answer = {.devices = -1, .statuses = 1};
    uint64_t deadline = clock_now() + PATIENCE, now;
    struct frame frame;
    while (answer.statuses > 0) {
        int got = frame_socket_receive(&connection, &frame);
        if (got < 0 || (got > 0 && !take(&answer, &frame))) return false;
        if ((now = clock_now()) >= deadline) {
            *silent = true;
            return false;
        }
        if (got > 0) continue;
        struct pollfd file = {connection.file, POLLIN, 0};
        /* also after a signal: its handler has run, and the time is bounded */
        poll(&file, 1, (int)((deadline - now) / MILLISECOND) + 1);
    }
    return true;
}

static bool ask(bool *silent) {
    struct frame hello = {.type = FRAME_HELLO,
                          .f = {ROLE_OBSERVER, (uint64_t)getpid(), LIBRARY_VERSION, OBSERVER_FEATURES}};
    struct frame query = {.type = FRAME_QUERY};
    if (!path || !frame_socket_connect(&connection, path)) return false;
    bool answered = frame_socket_send(&connection, &hello) && frame_socket_send(&connection, &query) && hear(silent);
    frame_socket_close(&connection);
    return answered;
}

static void look(void) {
    bool silent = false;
    if (ask(&silent)) {
        struct timespec wall;
        clock_gettime(CLOCK_REALTIME, &wall);
        for (int i = 0; i < coming.gpus; i++)
            coming.gpu[i].at = (uint64_t)wall.tv_sec * 1000000 + (uint64_t)wall.tv_nsec / 1000;
        last = coming;
        answered_at = clock_now();
    }
    asked_at = clock_now();
    /* an agent that hangs costs the program patience each time: less and less often */
    interval = !silent ? FRESH : interval < LONGEST / 2 ? 2 * interval : LONGEST;
}

/* Take the lock, after a question where one is due. False, without the lock: no figures are wanted. */
static bool enter(void) {
    static _Atomic bool watched;
    if (!figures_wanted() || !late_libc_load()) return false;
    /* before the lock is taken: a child must not find it held. Watched twice, by two threads at once, does no harm */
    if (!atomic_load_explicit(&watched, memory_order_relaxed) && late_libc_at_fork(in_child))
        atomic_store_explicit(&watched, true, memory_order_relaxed);
    pthread_mutex_lock(&asking);
    if (!path) {
        const char *setting = getenv("GPUSHARE_SOCKET");
        path = setting ? strdup(setting) : NULL;
    }
    if (!asked_at || clock_now() - asked_at >= interval) {
        /* a thread that is cancelled here would keep the lock */
        int before;
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
        look();
        pthread_setcancelstate(before, &before);
    }
    return true;
}

/* With the lock held: there is an answer to be shown. */
static bool have_answer(void) {
    return answered_at && clock_now() - answered_at < KEPT;
}

int figures_gpus(unsigned char (*uuids)[16], int room) {
    if (!enter()) return -1;
    int count = have_answer() ? last.gpus : -1;
    for (int i = 0; i < count && i < room; i++) memcpy(uuids[i], last.gpu[i].uuid, 16);
    pthread_mutex_unlock(&asking);
    return count;
}

bool figures_of(const unsigned char uuid[16], struct gpu_figures *figures) {
    if (!enter()) return false;
    struct gpu_figures *found = have_answer() ? gpu_of(&last, uuid) : NULL;
    if (found) *figures = *found;
    pthread_mutex_unlock(&asking);
    return found != NULL;
}
