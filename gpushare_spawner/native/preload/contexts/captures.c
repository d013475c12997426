#include "contexts/captures.h"

#include <pthread.h>
#include <stdlib.h>

#include "driver/gpus.h"

#define CUDA_ERROR_STREAM_CAPTURE_IMPLICIT 906

_Atomic int captures;
_Atomic uint32_t captures_version = 1;
static pthread_mutex_t beginning = PTHREAD_MUTEX_INITIALIZER; /* captures_lock */

/* A capture in progress. Its stream is recorded, so that the capture can be removed when the stream or its context is
   destroyed. */
struct capture {
    CUstream stream;
    CUcontext context;
    struct capture *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* protects the list; taken after all other locks */
static struct capture *list;

void captures_lock(void) {
    pthread_mutex_lock(&beginning);
}

void captures_unlock(void) {
    pthread_mutex_unlock(&beginning);
}

bool capture_records(CUstream stream) {
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = real.cuStreamIsCapturing(stream, &status);
    /* the legacy stream during another stream's capture: the driver refuses work there, so no call needs to wait */
    if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return true;
    return result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

static void (*on_change)(struct gpu *gpu);

void captures_on_change(void (*call)(struct gpu *gpu)) {
    on_change = call;
}

static void changed_by(int step) {
    if (atomic_fetch_add(&captures, step) + step < 0) atomic_store(&captures, 0);
    atomic_fetch_add(&captures_version, 1);
    for (int i = 0; i < gpu_count; i++) on_change(&gpus[i]);
}

static void list_add(CUstream stream, CUcontext context) {
    struct capture *capture = malloc(sizeof *capture);
    if (!capture) return;
    *capture = (struct capture){stream, context, NULL};
    pthread_mutex_lock(&lock);
    capture->next = list;
    list = capture;
    pthread_mutex_unlock(&lock);
}

/* Remove the captures in this stream or, if it is NULL, those of the context. Returns their number. */
static int list_remove(CUstream stream, CUcontext context, bool all) {
    int removed = 0;
    pthread_mutex_lock(&lock);
    for (struct capture **link = &list; *link;) {
        struct capture *capture = *link;
        if (stream ? capture->stream != stream : capture->context != context) {
            link = &capture->next;
            continue;
        }
        *link = capture->next;
        free(capture);
        removed++;
        if (!all) break;
    }
    pthread_mutex_unlock(&lock);
    return removed;
}

static CUcontext context_of(CUstream stream) {
    CUcontext context = NULL;
    if (stream != CU_STREAM_PER_THREAD && real.cuStreamGetCtx(stream, &context) == CUDA_SUCCESS) return context;
    return real.cuCtxGetCurrent(&context) == CUDA_SUCCESS ? context : NULL;
}

bool capture_remove(CUstream stream) {
    if (!captures_in_progress() || !stream || !list_remove(stream, NULL, true)) return false;
    changed_by(-1);
    return true;
}

void capture_restore(CUstream stream) {
    list_add(stream, context_of(stream));
    changed_by(+1);
}

void captures_remove_context(CUcontext context) {
    int removed = captures_in_progress() ? list_remove(NULL, context, true) : 0;
    if (removed) changed_by(-removed);
}

CUcontext capture_begin(CUstream stream) {
    captures_lock();
    CUcontext context = context_of(stream);
    changed_by(+1);
    return context;
}

void capture_begun(CUstream stream, CUcontext context, bool begun) {
    if (begun) list_add(stream, context);
    changed_by(begun ? 0 : -1); /* another thread may have queried the driver for the stream in between */
    captures_unlock();
}

void capture_end(CUstream stream) {
    list_remove(stream, NULL, false);
    changed_by(-1);
}

void captures_spread(void) {
    if (captures_in_progress()) atomic_fetch_add(&captures_version, 1);
}

RESET_IN_CHILD(captures_reset);
void captures_reset(void) {
    atomic_store(&captures, 0);
    list = NULL;
    pthread_mutex_init(&lock, NULL);
    pthread_mutex_init(&beginning, NULL);
}
