/* Launches one kernel again and again and says what a launch costs. Run by benchmarks/launch.py.

   launch_loop PTX BATCHES LAUNCHES      prints the nanoseconds per launch of each batch, one a line
   launch_loop --streams N THREADS KIND PTX BATCHES LAUNCHES      each thread launches into N streams of its own in
   turn; prints the nanoseconds of CPU time per launch of each batch of each thread. KIND: plain; contexts (the process
   has two, and the default stream is one of the N); capture (another thread keeps a capture open meanwhile) launch_loop
   --count PTX LAUNCHES      runs itself under ptrace; prints the system calls of the launching thread between the first
   and the last launch, then those of all other threads in that time, then its milliseconds */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "loop.h"

typedef int (*launch_call)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                           void **, void **);

static char ptx[1 << 20];

static int load_driver(const char *ptx_path) {
    FILE *file = fopen(ptx_path, "rb");
    if (!file || !fread(ptx, 1, sizeof ptx - 1, file)) {
        fprintf(stderr, "cannot read %s\n", ptx_path);
        return 1;
    }
    fclose(file);
    if (!(driver = dlopen("libcuda.so.1", RTLD_NOW))) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    return 0;
}

static int measure(const char *ptx_path, int batches, long launches, int marked) {
    if (load_driver(ptx_path)) return 1;
    void *context, *module, *function, *stream;
    must("cuInit", ((int (*)(unsigned))find("cuInit"))(0));
    must("cuDevicePrimaryCtxRetain", ((int (*)(void **, int))find("cuDevicePrimaryCtxRetain"))(&context, 0));
    must("cuCtxSetCurrent", ((int (*)(void *))find("cuCtxSetCurrent"))(context));
    must("cuModuleLoadData", ((int (*)(void **, const void *))find("cuModuleLoadData"))(&module, ptx));
    must("cuModuleGetFunction",
         ((int (*)(void **, void *, const char *))find("cuModuleGetFunction"))(&function, module, "spin"));
    must("cuStreamCreate", ((int (*)(void **, unsigned))find("cuStreamCreate"))(&stream, 1));
    launch_call launch = (launch_call)find("cuLaunchKernel");
    unsigned long long nothing = 0;
    void *arguments[] = {&nothing};
    for (int i = 0; i < 1000; i++)
        must("cuLaunchKernel", launch(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, NULL));
    double began = now();
    if (marked) syscall(SYS_getppid); /* the tracer counts between two of these */
    for (int batch = 0; batch < batches; batch++) {
        double start = now();
        for (long i = 0; i < launches; i++) launch(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, NULL);
        if (!marked) printf("%.3f\n", (now() - start) / (double)launches);
    }
    if (marked) {
        syscall(SYS_getppid);
        printf("%.3f\n", (now() - began) / 1e6);
    }
    return 0;
}

#define MOST_THREADS 16

static struct {
    int streams, threads, batches, has_default;
    long launches;
    void *context, *function;
    launch_call launch;
    pthread_barrier_t ready;
    double *results;
} many;

static double cpu_time(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void *launch_into_streams(void *number) {
    void **streams = calloc((size_t)many.streams, sizeof *streams);
    unsigned long long nothing = 0;
    void *arguments[] = {&nothing};
    must("cuCtxSetCurrent", ((int (*)(void *))find("cuCtxSetCurrent"))(many.context));
    int (*create)(void **, unsigned) = (int (*)(void **, unsigned))find("cuStreamCreate");
    for (int i = many.has_default; i < many.streams; i++) must("cuStreamCreate", create(&streams[i], 1));
    for (int i = 0; i < 1000; i++)
        must("cuLaunchKernel",
             many.launch(many.function, 1, 1, 1, 1, 1, 1, 0, streams[i % many.streams], arguments, NULL));
    pthread_barrier_wait(&many.ready);
    double *results = many.results + (size_t)(uintptr_t)number * (size_t)many.batches;
    for (int batch = 0; batch < many.batches; batch++) {
        double start = cpu_time();
        for (long i = 0; i < many.launches; i += many.streams)
            for (int at = 0; at < many.streams; at++)
                many.launch(many.function, 1, 1, 1, 1, 1, 1, 0, streams[at], arguments, NULL);
        results[batch] =
            (cpu_time() - start) / (double)((many.launches + many.streams - 1) / many.streams * many.streams);
    }
    return NULL;
}

static int measure_streams(const char *kind, const char *ptx_path) {
    if (load_driver(ptx_path)) return 1;
    void *module, *other = NULL, *stream = NULL, *graph;
    must("cuInit", ((int (*)(unsigned))find("cuInit"))(0));
    must("cuDevicePrimaryCtxRetain", ((int (*)(void **, int))find("cuDevicePrimaryCtxRetain"))(&many.context, 0));
    must("cuCtxSetCurrent", ((int (*)(void *))find("cuCtxSetCurrent"))(many.context));
    must("cuModuleLoadData", ((int (*)(void **, const void *))find("cuModuleLoadData"))(&module, ptx));
    must("cuModuleGetFunction",
         ((int (*)(void **, void *, const char *))find("cuModuleGetFunction"))(&many.function, module, "spin"));
    many.launch = (launch_call)find("cuLaunchKernel");
    many.results = calloc((size_t)many.threads * (size_t)many.batches, sizeof *many.results);
    if (strcmp(kind, "contexts") == 0) {
        unsigned long long at;
        many.has_default = 1;
        must("cuCtxCreate_v2", ((int (*)(void **, unsigned, int))find("cuCtxCreate_v2"))(&other, 0, 0));
        must("cuMemAlloc_v2", ((int (*)(unsigned long long *, size_t))find("cuMemAlloc_v2"))(&at, 4096));
        /* work in it, so that the library knows it */
        must("cuMemsetD8_v2", ((int (*)(unsigned long long, unsigned char, size_t))find("cuMemsetD8_v2"))(at, 0, 4096));
        must("cuCtxSetCurrent", ((int (*)(void *))find("cuCtxSetCurrent"))(many.context));
    }
    if (strcmp(kind, "capture") == 0) {
        must("cuStreamCreate", ((int (*)(void **, unsigned))find("cuStreamCreate"))(&stream, 1));
        must("cuStreamBeginCapture_v2", ((int (*)(void *, int))find("cuStreamBeginCapture_v2"))(stream, 2));
    }
    pthread_barrier_init(&many.ready, NULL, (unsigned)many.threads);
    pthread_t threads[MOST_THREADS];
    for (int i = 0; i < many.threads; i++) pthread_create(&threads[i], NULL, launch_into_streams, (void *)(uintptr_t)i);
    for (int i = 0; i < many.threads; i++) pthread_join(threads[i], NULL);
    if (stream) must("cuStreamEndCapture", ((int (*)(void *, void **))find("cuStreamEndCapture"))(stream, &graph));
    for (int i = 0; i < many.threads * many.batches; i++) printf("%.3f\n", many.results[i]);
    return 0;
}

static int count(char **command) {
    pid_t child = fork();
    if (child == 0) {
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL)) _exit(125);
        raise(SIGSTOP);
        execv(command[0], command);
        _exit(126);
    }
    int status;
    if (waitpid(child, &status, 0) != child || !WIFSTOPPED(status)) {
        fprintf(stderr, "ptrace is not allowed here\n");
        return 1;
    }
    long options = PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL;
    if (ptrace(PTRACE_SETOPTIONS, child, NULL, (void *)options)) {
        perror("ptrace");
        return 1;
    }
    ptrace(PTRACE_SYSCALL, child, NULL, NULL);
    long own = 0, others = 0;
    int marks = 0;
    pid_t thread;
    while ((thread = waitpid(-1, &status, __WALL)) > 0) {
        if (!WIFSTOPPED(status)) {
            if (thread == child) break;
            continue;
        }
        long signal = 0;
        if (WSTOPSIG(status) == (SIGTRAP | 0x80)) {
            struct {
                unsigned char op, pad[3];
                unsigned arch;
                unsigned long long ip, sp, number, args[6];
            } info; /* ptrace_syscall_info of Linux 5.3, of which the number at entry is read */
            memset(&info, 0, sizeof info);
            long got = ptrace(0x420e /* PTRACE_GET_SYSCALL_INFO */, thread, (void *)sizeof info, &info);
            if (got > 0 && info.op == 1) { /* entry */
                if (thread == child && info.number == SYS_getppid)
                    marks++;
                else if (marks == 1)
                    *(thread == child ? &own : &others) += 1;
            }
        } else if (status >> 16 == 0 && WSTOPSIG(status) != SIGSTOP && WSTOPSIG(status) != SIGTRAP) {
            signal = WSTOPSIG(status);
        }
        ptrace(PTRACE_SYSCALL, thread, NULL, (void *)signal);
    }
    if (marks != 2 || !WIFEXITED(status) || WEXITSTATUS(status)) {
        fprintf(stderr, "the traced program did not get to its end (status %d, marks %d)\n", status, marks);
        return 1;
    }
    printf("%ld\n%ld\n", own, others);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "--count") == 0) {
        char *command[] = {"/proc/self/exe", "--marked", argv[2], argv[3], NULL};
        return count(command);
    }
    if (argc == 4 && strcmp(argv[1], "--marked") == 0) return measure(argv[2], 1, atol(argv[3]), 1);
    if (argc == 4) return measure(argv[1], atoi(argv[2]), atol(argv[3]), 0);
    if (argc == 8 && strcmp(argv[1], "--streams") == 0) {
        many.streams = atoi(argv[2]);
        many.threads = atoi(argv[3]);
        many.batches = atoi(argv[6]);
        many.launches = atol(argv[7]);
        if (many.streams > 0 && many.threads > 0 && many.threads <= MOST_THREADS && many.batches > 0)
            return measure_streams(argv[4], argv[5]);
    }
    fprintf(stderr, "usage: launch_loop PTX BATCHES LAUNCHES | --count PTX LAUNCHES |\n"
                    "       --streams N THREADS plain|contexts|capture PTX BATCHES LAUNCHES\n");
    return 2;
}
