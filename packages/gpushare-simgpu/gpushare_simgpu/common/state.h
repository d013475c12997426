/* The state that all processes share: one memory-mapped file (SIMGPU_STATE) with the settings, the process slots and,
 * for each GPU, its frames, engines and counters.
 *
 * Any process may be killed at any instant. So locks are robust mutexes, whatever links frames together can be rebuilt
 * from the frames themselves, and what a dead process held is found by its slot. */
#ifndef SIMGPU_STATE_H
#define SIMGPU_STATE_H

#include <pthread.h>
#include <stdint.h>

#include "common/checkpoint.h"
#include "common/mig_profiles.h"
#include "common/settings.h"
#include "common/stats.h"

/* Of GPUs and MIG instances. */
#define MAX_NUMBERS    (MAX_GPUS * (1 + MIG_INSTANCES))
#define MAX_PROCESSES  256
#define NO_FRAME       UINT32_MAX
#define BUSY_BUCKETS   32
#define BUSY_BUCKET_NS (50 * 1000000ull)
/* NVML samples the utilisation of processes six times a second; the buffer holds about ten seconds. */
#define USAGE_PERIODS   64
#define USAGE_PERIOD_NS (1000000000ull / 6)

enum frame_kind { FRAME_FREE, FRAME_PLAIN, FRAME_MANAGED };

/* One page of VRAM. A process finds a page of its own by a frame number it remembers, and knows that the page is still
 * there by owner and page: evicting another's page needs no word to its owner. */
struct frame {
    uint64_t page;  /* which page of its owner: region id and index in the region */
    uint64_t stamp; /* when it came: the order from which the list is rebuilt */
    uint32_t owner; /* process slot + 1 */
    uint32_t kind;
    uint32_t before, after; /* neighbours in its list */
};

struct frame_list {
    uint32_t first, last, count;
};

struct engine {
    uint64_t free_at; /* the instant at which what it has taken on so far is done */
};

/* The compute engine is owned by one process at a time; the others wait in the order in which they came. */
struct turns {
    uint32_t owner;   /* process slot + 1; 0 nobody */
    uint32_t changed; /* futex word: changes with the owner */
    uint64_t turn_began;
    uint64_t next_ticket;
    uint64_t ticket[MAX_PROCESSES]; /* 0: does not wait */
    uint32_t waiting;
};

struct busy {
    uint64_t bucket; /* which stretch of BUSY_BUCKET_NS, or of USAGE_PERIOD_NS */
    uint64_t ns;
};

/* Time that one process computed on one GPU. Kept after its end until its slot is taken again. */
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
    struct frame_list free, managed; /* managed: the one that leaves first, first */
    uint64_t stamp;
    uint32_t held[MAX_PROCESSES];     /* frames of each process */
    uint32_t contexts[MAX_PROCESSES]; /* contexts of each process: it shows on the GPU */
    struct engine compute, h2d, d2h;
    struct turns turns;
    struct busy busy[BUSY_BUCKETS];
    struct usage usage[MAX_PROCESSES];
    uint64_t queued_ns[MAX_PROCESSES]; /* device time of kernels that were launched and have not run; atomic */
    uint64_t ahead_ns[MAX_PROCESSES];  /* the part of them that ran while their process was stopped */
    struct simgpu_stats stats;
};

/* A process holds its slot by a lock on the byte of the state file with the slot's number, which the kernel drops at
 * its death: that works over pid namespaces, in which a pid says nothing. */
struct process {
    int32_t pid;            /* as its own pid namespace numbers it; 0: the slot is free */
    int32_t last_pid;       /* of the process that has, or had, the slot; 0: nobody yet */
    uint64_t start;         /* start time in clock ticks since boot, the same in every namespace */
    uint64_t pid_namespace; /* its number, as /proc/self/ns/pid has it */
    uint32_t stopped;       /* by a signal or a debugger, at the last look */
    uint64_t serial;        /* which process since the file was made: tells one that has a slot from the one before */
};

struct state {
    uint64_t magic;
    uint64_t size; /* of the file */
    struct settings settings;
    uint64_t frames;      /* per GPU */
    uint32_t numbers;     /* how many of gpus[] are in use: the GPUs, and places for instances where MIG is possible */
    pthread_mutex_t lock; /* state_lock */
    uint64_t next_serial;
    uint32_t next_slot; /* slots are taken in turn, so that what an ended process leaves stays readable for a while */
    uint64_t reaped_at;
    struct process processes[MAX_PROCESSES];
    struct checkpoint checkpoints[MAX_PROCESSES]; /* of each process */
    struct gpu gpus[MAX_NUMBERS];                 /* first the GPUs of the machine */
    struct frame all_frames[];                    /* those of GPU 0, then of GPU 1 ... */
};

/* Opens the state, making it if it is not there. NULL after saying why on stderr. The same pointer on every call. */
struct state *state_open(void);

/* The state file, open for the locks of the slots: one open file description for each process and library. -1 if it
 * cannot be opened any more. */
int state_file(void);

/* In a child after fork: without it the child would hold its parent's slot. */
void state_forked(void);

static inline struct frame *gpu_frames(struct state *state, int gpu) {
    return state->all_frames + state->gpus[gpu].first_frame;
}

/* The lock of the process slots and of what is a MIG instance; taken before any GPU's lock. */
void state_lock(struct state *state);
void state_unlock(struct state *state);

void gpu_lock(struct state *state, int gpu);
void gpu_unlock(struct state *state, int gpu);

#endif
