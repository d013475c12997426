/* The state that all processes share: one memory-mapped file (SIMGPU_STATE) with the settings, the process slots and,
 * for each GPU, its frames, engines and counters.
 *
 * * Any process may be killed at any time. So locks are robust mutexes, all links between frames can be rebuilt from
 * the frames themselves, and the resources of a dead process are found by its slot. */
#ifndef SIMGPU_STATE_H
#define SIMGPU_STATE_H

#include <pthread.h>
#include <stdint.h>

#include "common/checkpoint.h"
#include "common/mig_profiles.h"
#include "common/settings.h"
#include "common/stats.h"

/* Maximum number of GPUs and MIG instances. */
#define MAX_NUMBERS    (MAX_GPUS * (1 + MIG_INSTANCES))
#define MAX_PROCESSES  256
#define NO_FRAME       UINT32_MAX
#define BUSY_BUCKETS   32
#define BUSY_BUCKET_NS (50 * 1000000ull)
/* NVML samples the utilization of processes six times a second; the buffer holds about ten seconds. */
#define USAGE_PERIODS   64
#define USAGE_PERIOD_NS (1000000000ull / 6)

enum frame_kind { FRAME_FREE, FRAME_PLAIN, FRAME_MANAGED };

/* One page of VRAM. A process finds its own page by a stored frame number, and checks by owner and page whether the
 * page is still there; so another process can evict the page without notifying its owner. */
struct frame {
    uint64_t page;  /* the owner's page: region id and index in the region */
    uint64_t stamp; /* time of arrival, from which the order of the list is rebuilt */
    uint32_t owner; /* process slot + 1 */
    uint32_t kind;
    uint32_t before, after; /* neighbours in its list */
};

struct frame_list {
    uint32_t first, last, count;
};

struct engine {
    uint64_t free_at; /* the instant at which the work accepted so far is done */
};

/* The compute engine is owned by one process at a time; the others wait in order of arrival. */
struct turns {
    uint32_t owner;   /* process slot + 1; 0: no owner */
    uint32_t changed; /* futex word: changes with the owner */
    uint64_t turn_began;
    uint64_t next_ticket;
    uint64_t ticket[MAX_PROCESSES]; /* 0: not waiting */
    uint32_t waiting;
};

struct busy {
    uint64_t bucket; /* number of the interval of BUSY_BUCKET_NS or USAGE_PERIOD_NS */
    uint64_t ns;
};

/* The compute time of one process on one GPU. Retained after the process's end until its slot is reused. */
struct usage {
    uint64_t total_ns;
    struct busy periods[USAGE_PERIODS];
};

/* A GPU, or a MIG instance of one (common/mig.h). */
struct gpu {
    pthread_mutex_t lock;
    uint8_t uuid[16];
    uint64_t first_frame; /* in all_frames */
    uint32_t frame_count;
    uint32_t mig;                    /* a GPU: it is in MIG mode; an instance: enum mig_stage */
    struct mig_place place;          /* of an instance on its GPU */
    struct frame_list free, managed; /* managed: in the order of eviction */
    uint64_t stamp;
    uint32_t held[MAX_PROCESSES];     /* frames of each process */
    uint32_t contexts[MAX_PROCESSES]; /* contexts of each process; with a context it is shown on the GPU */
    struct engine compute, h2d, d2h;
    struct turns turns;
    struct busy busy[BUSY_BUCKETS];
    struct usage usage[MAX_PROCESSES];
    uint64_t queued_ns[MAX_PROCESSES]; /* device time of launched kernels that have not run; atomic */
    uint64_t ahead_ns[MAX_PROCESSES];  /* the part of it that ran while the process was stopped */
    struct simgpu_stats stats;
};

/* A process holds its slot by a lock on the state file's byte with the slot's number. The kernel drops the lock when
 * the process dies, which works across pid namespaces, in which a pid is meaningless. */
struct process {
    int32_t pid;            /* the pid in its own pid namespace; 0: the slot is free */
    int32_t last_pid;       /* pid of the process that has or had the slot; 0: none yet */
    uint64_t start;         /* start time in clock ticks since boot, the same in every namespace */
    uint64_t pid_namespace; /* its number, from /proc/self/ns/pid */
    uint32_t stopped;       /* whether it was stopped by a signal or a debugger at the last check */
    uint64_t serial;        /* number of the process since the file was created, which distinguishes it from the slot's
                             * previous process */
};

struct state {
    uint64_t magic;
    uint64_t size; /* of the file */
    struct settings settings;
    uint64_t frames;      /* per GPU */
    uint32_t numbers;     /* number of used entries in gpus[]: the GPUs, and places for instances if MIG is supported */
    pthread_mutex_t lock; /* state_lock */
    uint64_t next_serial;
    uint32_t next_slot; /* slots are taken in turn, so that the data of an ended process stay readable for a while */
    uint64_t reaped_at;
    struct process processes[MAX_PROCESSES];
    struct checkpoint checkpoints[MAX_PROCESSES]; /* checkpoint of each process */
    struct gpu gpus[MAX_NUMBERS];                 /* the machine's GPUs come first */
    struct frame all_frames[];                    /* the frames of GPU 0, then of GPU 1, ... */
};

/* Open the state; create it if it does not exist. NULL after an error, which is printed to stderr. Returns the same
 * pointer on every call. */
struct state *state_open(void);

/* Return the state file, opened for the locks of the slots: one open file description for each process and library. -1
 * if it can no longer be opened. */
int state_file(void);

/* Called in a child after fork; otherwise the child would hold its parent's slot. */
void state_forked(void);

static inline struct frame *gpu_frames(struct state *state, int gpu) {
    return state->all_frames + state->gpus[gpu].first_frame;
}

/* The lock of the process slots and the MIG instances; taken before any GPU's lock. */
void state_lock(struct state *state);
void state_unlock(struct state *state);

void gpu_lock(struct state *state, int gpu);
void gpu_unlock(struct state *state, int gpu);

#endif
