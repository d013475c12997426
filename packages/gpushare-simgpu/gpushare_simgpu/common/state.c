#include "common/state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/frames.h"
#include "common/mig.h"
#include "common/processes.h"
#include "common/turns.h"
#include "common/uuid.h"

/* "SIMGPU" and the number of the layout */
#define MAGIC (0x5550474d49530000ull + 9)

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static struct state *opened;
static int lock_file = -1;
static struct stat mapped;

static void state_path(char *path, size_t size) {
    const char *given = getenv("SIMGPU_STATE");
    if (given && *given)
        snprintf(path, size, "%s", given);
    else
        snprintf(path, size, "/dev/shm/simgpu-%u", (unsigned)getuid());
}

static void shared_mutex(pthread_mutex_t *mutex) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
}

/* Make a UUID that is the same after a restart with the same path. The path is the same on all nodes of a cluster, so
 * the node's name distinguishes their GPUs. */
static void make_uuid(uint8_t uuid[16], const char *path, int gpu) {
    char real[4096], name[4200 + 256];
    const char *node = getenv("SIMGPU_NODE");
    if (!node) node = "";
    if (!realpath(path, real)) snprintf(real, sizeof real, "%s", path);
    snprintf(name, sizeof name, "%d/%s%s%.253s", gpu, real, *node ? "@" : "", node);
    uuid_make(uuid, name);
}

static uint64_t file_size(const struct settings *settings) {
    return sizeof(struct state) + settings->devices * (settings->memory / settings->page) * sizeof(struct frame);
}

static void make_state(struct state *state, const struct settings *settings, const char *path) {
    state->size = file_size(settings);
    state->settings = *settings;
    state->frames = settings->memory / settings->page;
    shared_mutex(&state->lock);
    for (int i = 0; i < MAX_PROCESSES; i++) shared_mutex(&state->checkpoints[i].caller);
    state->numbers = (uint32_t)settings->devices * (settings->mig ? 1 + MIG_INSTANCES : 1);
    for (int i = 0; i < (int)state->numbers; i++) shared_mutex(&state->gpus[i].lock);
    for (int i = 0; i < (int)settings->devices; i++) {
        make_uuid(state->gpus[i].uuid, path, i);
        mig_divide(state, i, &settings->mig_layouts[i]);
    }
    state->magic = MAGIC;
}

static struct state *map(int file, uint64_t size) {
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

/* Create a complete file under another name and link it to its path, so that no process sees an incomplete file. */
static int create(const char *path) {
    struct settings settings;
    char fresh[4200];
    if (settings_read(&settings)) return -1;
    /* the name contains no pid, because a process in another pid namespace may have the same pid */
    snprintf(fresh, sizeof fresh, "%s.new.XXXXXX", path);
    int file = mkstemp(fresh);
    /* fchmod, because the umask must not apply */
    if (file < 0 || fcntl(file, F_SETFD, FD_CLOEXEC) || ftruncate(file, (off_t)file_size(&settings)) ||
        fchmod(file, (mode_t)settings.mode)) {
        fprintf(stderr, "simgpu: cannot make %s: %s\n", fresh, strerror(errno));
        if (file >= 0) close(file);
        return -1;
    }
    struct state *state = map(file, file_size(&settings));
    int failed = 1;
    if (state) {
        make_state(state, &settings, path);
        munmap(state, file_size(&settings));
        failed = link(fresh, path) && errno != EEXIST;
    }
    if (failed) fprintf(stderr, "simgpu: cannot make %s: %s\n", path, strerror(errno));
    unlink(fresh);
    close(file);
    return failed ? -1 : 0;
}

static struct state *attach(void) {
    char path[4096];
    struct stat status;
    state_path(path, sizeof path);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0 && errno == ENOENT) {
        if (create(path)) return NULL;
        file = open(path, O_RDWR | O_CLOEXEC);
    }
    if (file < 0 || fstat(file, &status)) {
        fprintf(stderr, "simgpu: cannot open %s: %s%s\n", path, strerror(errno),
                errno == EACCES ? " (the program that makes it decides who may: SIMGPU_STATE_MODE=0666 lets all users)"
                                : "");
        if (file >= 0) close(file);
        return NULL;
    }
    struct state *state = NULL;
    if ((uint64_t)status.st_size >= sizeof(struct state)) state = map(file, (uint64_t)status.st_size);
    close(file);
    if (!state || state->magic != MAGIC || state->size != (uint64_t)status.st_size) {
        fprintf(stderr, "simgpu: %s is not a state file of this version: remove it, and end the programs that use it\n",
                path);
        if (state) munmap(state, (size_t)status.st_size);
        return NULL;
    }
    mapped = status;
    return state;
}

/* Not the mapped file: a mapping, which a forked child inherits, would keep the locks after their process ends. */
static int open_for_locks(void) {
    char path[4096];
    struct stat status;
    state_path(path, sizeof path);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file >= 0 && (fstat(file, &status) || status.st_ino != mapped.st_ino || status.st_dev != mapped.st_dev)) {
        close(file);
        file = -1;
    }
    return file;
}

int state_file(void) {
    int file = __atomic_load_n(&lock_file, __ATOMIC_ACQUIRE);
    if (file >= 0) return file;
    pthread_mutex_lock(&opening);
    if (lock_file < 0) __atomic_store_n(&lock_file, open_for_locks(), __ATOMIC_RELEASE);
    file = lock_file;
    pthread_mutex_unlock(&opening);
    return file;
}

void state_forked(void) {
    pthread_mutex_init(&opening, NULL); /* another thread may have held it */
    if (lock_file >= 0) close(lock_file);
    lock_file = -1;
}

struct state *state_open(void) {
    pthread_mutex_lock(&opening);
    if (!opened) opened = attach();
    struct state *state = opened;
    pthread_mutex_unlock(&opening);
    return state;
}

void state_lock(struct state *state) {
    /* even if the lock's owner died, a slot is either complete or free, and an instance either exists or does not */
    if (pthread_mutex_lock(&state->lock) == EOWNERDEAD) pthread_mutex_consistent(&state->lock);
}

void state_unlock(struct state *state) {
    pthread_mutex_unlock(&state->lock);
}

void gpu_lock(struct state *state, int gpu) {
    if (pthread_mutex_lock(&state->gpus[gpu].lock) == EOWNERDEAD) {
        /* a process died while it changed the lists; each frame by itself is consistent */
        frames_rebuild(state, gpu);
        turns_rebuild(state, gpu);
        pthread_mutex_consistent(&state->gpus[gpu].lock);
    }
}

void gpu_unlock(struct state *state, int gpu) {
    pthread_mutex_unlock(&state->gpus[gpu].lock);
}
