/* Everything at once, for the sanitizers: threads that allocate, launch, copy and free in streams that come and go,
   graphs that are captured meanwhile, children that are forked, while the agent on the other side grants and revokes at
   random. What a kernel wrote must be what is read. Linked against libgpushare.so first and the driver second, so that
   each call goes through a wrapper.

   preload_stress PTX SECONDS */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuDevicePrimaryCtxRelease_v2(int device);
int cuCtxCreate_v2(void **context, unsigned flags, int device);
int cuCtxDestroy_v2(void *context);
int cuCtxSetCurrent(void *context);
int cuEventCreate(void **event, unsigned flags);
int cuEventRecord(void *event, void *stream);
int cuEventSynchronize(void *event);
int cuEventDestroy_v2(void *event);
int cuModuleLoadData(void **module, const void *image);
int cuModuleGetFunction(void **function, void *module, const char *name);
int cuStreamCreate(void **stream, unsigned flags);
int cuStreamDestroy_v2(void *stream);
int cuStreamSynchronize(void *stream);
int cuStreamBeginCapture_v2(void *stream, int mode);
int cuStreamEndCapture(void *stream, void **graph);
int cuGraphInstantiateWithFlags(void **exec, void *graph, uint64_t flags);
int cuGraphLaunch(void *exec, void *stream);
int cuGraphExecDestroy(void *exec);
int cuGraphDestroy(void *graph);
int cuMemAlloc_v2(uint64_t *at, size_t bytes);
int cuMemFree_v2(uint64_t at);
int cuMemAllocAsync(uint64_t *at, size_t bytes, void *stream);
int cuMemFreeAsync(uint64_t at, void *stream);
int cuMemGetInfo_v2(size_t *available, size_t *total);
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes);
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream);
int cuMemsetD32_v2(uint64_t at, unsigned value, size_t n);
int cuPointerGetAttribute(void *data, int attribute, uint64_t at);
int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status);
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **params, void **extra);

int nvmlInit_v2(void);
int nvmlDeviceGetCount_v2(unsigned *count);
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device);
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory);
int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates);
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *processes);
int nvmlDeviceGetProcessUtilization(void *device, void *samples, unsigned *count, unsigned long long seen);

#define WORDS   4096u
#define THREADS 6

static void *context, *fill;
static _Atomic int failures;
static _Atomic long rounds;
static time_t end;

static int check(const char *what, int code) {
    if (code && atomic_fetch_add(&failures, 1) < 10) fprintf(stderr, "%s: CUDA error %d\n", what, code);
    return code;
}
#define DO(call) check(#call, call)

static void count_failure(const char *what, unsigned long long value, unsigned long long other) {
    if (atomic_fetch_add(&failures, 1) < 10) fprintf(stderr, "%s: %llu, %llu\n", what, value, other);
}

static void fill_words(uint64_t at, uint32_t value, void *stream) {
    uint64_t n = WORDS;
    void *params[] = {&at, &n, &value};
    DO(cuLaunchKernel(fill, 1, 1, 1, 1, 1, 1, 0, stream, params, NULL));
}

static void expect(const char *where, const uint32_t *words, uint32_t value) {
    for (unsigned i = 0; i < WORDS; i++)
        if (words[i] != value && atomic_fetch_add(&failures, 1) < 10)
            fprintf(stderr, "%s: word %u is %u, not %u\n", where, i, words[i], value);
}

static void *work(void *number) {
    unsigned seed = (unsigned)(uintptr_t)number;
    uint32_t *words = malloc(4 * WORDS);
    DO(cuCtxSetCurrent(context));
    while (time(NULL) < end) {
        uint32_t value = (uint32_t)rand_r(&seed);
        void *stream = NULL, *event;
        uint64_t at;
        size_t available, total;
        unsigned managed = 0; /* some drivers write one byte, some four */
        switch (rand_r(&seed) % 5) {
        case 0: /* synchronous, in the default stream */
            if (DO(cuMemAlloc_v2(&at, 4 * WORDS))) break;
            fill_words(at, value, NULL);
            DO(cuMemcpyDtoH_v2(words, at, 4 * WORDS));
            DO(cuPointerGetAttribute(&managed, 8, at + 5));
            DO(cuMemFree_v2(at));
            expect("default stream", words, value);
            if (managed) count_failure("plain memory said to be managed", managed, 0);
            break;
        case 1: /* a stream of its own, destroyed with work in it */
            DO(cuStreamCreate(&stream, 1));
            if (DO(cuMemAlloc_v2(&at, 4 * WORDS))) break;
            fill_words(at, value, stream);
            DO(cuEventCreate(&event, 2));
            DO(cuEventRecord(event, stream));
            DO(cuStreamDestroy_v2(stream));
            DO(cuEventSynchronize(event));
            DO(cuEventDestroy_v2(event));
            DO(cuMemcpyDtoH_v2(words, at, 4 * WORDS));
            DO(cuMemFree_v2(at));
            expect("destroyed stream", words, value);
            break;
        case 2: /* stream-ordered memory */
            DO(cuStreamCreate(&stream, 1));
            for (int i = 0; i < 4; i++) {
                if (DO(cuMemAllocAsync(&at, 4 * WORDS, stream))) break;
                fill_words(at, value + (uint32_t)i, stream);
                DO(cuMemcpyDtoHAsync_v2(words, at, 4 * WORDS, stream));
                DO(cuMemFreeAsync(at, stream));
                DO(cuStreamSynchronize(stream));
                expect("stream-ordered", words, value + (uint32_t)i);
            }
            DO(cuStreamDestroy_v2(stream));
            break;
        case 3: /* memory and what is said of it */
            DO(cuMemGetInfo_v2(&available, &total));
            if (available > total) count_failure("more memory available than there is", available, total);
            if (DO(cuMemAlloc_v2(&at, (size_t)(rand_r(&seed) % (1 << 20)) + 4 * WORDS))) break;
            DO(cuMemsetD32_v2(at, value, WORDS));
            DO(cuMemcpyDtoH_v2(words, at, 4 * WORDS));
            DO(cuMemFree_v2(at));
            expect("memset", words, value);
            break;
        case 4: { /* the same function by another way */
            void *function = NULL;
            DO(cuGetProcAddress_v2("cuMemAlloc", &function, 12000, 0, NULL));
            Dl_info place;
            if (!dladdr(function, &place) || !strstr(place.dli_fname, "libgpushare"))
                count_failure("not the library's cuMemAlloc", (uintptr_t)function, (uintptr_t)cuMemAlloc_v2);
            if (DO(((int (*)(uint64_t *, size_t))function)(&at, 4 * WORDS))) break;
            DO(cuMemFree_v2(at));
            break;
        }
        }
        atomic_fetch_add(&rounds, 1);
    }
    DO(cuCtxSetCurrent(NULL));
    free(words);
    return NULL;
}

/* Captures and launches graphs in thread-local mode, beside everything else. */
static void *capture(void *unused) {
    uint32_t *words = malloc(4 * WORDS);
    uint64_t at;
    void *stream, *graph, *exec;
    DO(cuCtxSetCurrent(context));
    DO(cuStreamCreate(&stream, 1));
    DO(cuMemAlloc_v2(&at, 4 * WORDS));
    for (uint32_t value = 1; time(NULL) < end; value++) {
        DO(cuStreamBeginCapture_v2(stream, 1));
        fill_words(at, value, stream);
        DO(cuStreamEndCapture(stream, &graph));
        DO(cuGraphInstantiateWithFlags(&exec, graph, 0));
        DO(cuGraphLaunch(exec, stream));
        DO(cuMemcpyDtoHAsync_v2(words, at, 4 * WORDS, stream));
        DO(cuStreamSynchronize(stream));
        expect("graph", words, value);
        DO(cuGraphExecDestroy(exec));
        DO(cuGraphDestroy(graph));
        usleep(1000);
    }
    DO(cuMemFree_v2(at));
    DO(cuStreamDestroy_v2(stream));
    free(words);
    return unused;
}

/* Contexts that come and go with work and memory in them. */
static void *contexts(void *unused) {
    while (time(NULL) < end) {
        void *own;
        uint64_t at;
        if (DO(cuCtxCreate_v2(&own, 0, 0))) break;
        DO(cuMemAlloc_v2(&at, 4 * WORDS));
        DO(cuMemsetD32_v2(at, 1, WORDS));
        DO(cuCtxDestroy_v2(own));
        usleep(20000);
    }
    return unused;
}

/* What nvidia-smi asks, in two threads. */
static void *monitor(void *unused) {
    while (time(NULL) < end) {
        unsigned count = 0, rates[2], room;
        unsigned long long memory[3];
        void *device;
        char own[64 * 32];
        if (DO(nvmlDeviceGetCount_v2(&count)) || count != 1) break;
        DO(nvmlDeviceGetHandleByIndex_v2(0, &device));
        DO(nvmlDeviceGetMemoryInfo(device, memory));
        DO(nvmlDeviceGetUtilizationRates(device, rates));
        room = 64;
        DO(nvmlDeviceGetComputeRunningProcesses_v3(device, &room, own));
        room = 64;
        nvmlDeviceGetProcessUtilization(device, own, &room, 0);
        usleep(5000);
    }
    return unused;
}

static void children(void) {
    while (time(NULL) < end) {
        pid_t child = fork();
        if (child == 0) {
#ifndef __SANITIZE_THREAD__ /* which does not know threads of a forked child's parent */
            unsigned long long memory[3];
            void *device;
            /* forked while other threads ask the agent */
            _exit(nvmlDeviceGetHandleByIndex_v2(0, &device) || nvmlDeviceGetMemoryInfo(device, memory));
#endif
            _exit(0);
        }
        int status = -1;
        waitpid(child, &status, 0);
        if (status) count_failure("a child's status", (unsigned)status, (unsigned)child);
        usleep(100000);
    }
}

int main(int argc, char **argv) {
    static char ptx[1 << 20];
    if (argc != 3) return 2;
    FILE *file = fopen(argv[1], "rb");
    if (!file || !fread(ptx, 1, sizeof ptx - 1, file)) return 2;
    fclose(file);
    end = time(NULL) + atoi(argv[2]);
    void *module;
    pthread_t threads[THREADS + 4];
    if (DO(nvmlInit_v2())) return 1;
    for (int i = 2; i < 4; i++) pthread_create(&threads[THREADS + i], NULL, monitor, NULL);
    usleep(100000); /* NVML is in use when CUDA comes */
    if (DO(cuInit(0)) || DO(cuDevicePrimaryCtxRetain(&context, 0)) || DO(cuCtxSetCurrent(context)) ||
        DO(cuModuleLoadData(&module, ptx)) || DO(cuModuleGetFunction(&fill, module, "fill_u32")))
        return 1;
    for (uintptr_t i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, work, (void *)(i + 1));
    pthread_create(&threads[THREADS], NULL, capture, NULL);
    pthread_create(&threads[THREADS + 1], NULL, contexts, NULL);
    children();
    for (int i = 0; i < THREADS + 4; i++) pthread_join(threads[i], NULL);
    DO(cuDevicePrimaryCtxRelease_v2(0));
    printf("%ld rounds, %d failures\n", rounds, failures);
    return failures != 0;
}
