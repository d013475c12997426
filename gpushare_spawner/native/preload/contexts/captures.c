#include "contexts/captures.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "driver/driver.h"
#include "driver/gpus.h"

#define CUDA_ERROR_STREAM_CAPTURE_IMPLICIT 906

_Atomic int captures;
_Atomic uint32_t captures_news = 1;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER; /* of beginning a capture, and of calls that one forbids */

/* A capture that was begun and not ended: by its stream, so that it is not counted for ever when the stream or its
   context goes instead. */
struct capture {
    CUstream stream;
    CUcontext context;
    struct capture *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the list; the last that is taken */
static struct capture *list;

void captures_hold_off(void) {
    pthread_mutex_lock(&turn);
}

void captures_let_on(void) {
    pthread_mutex_unlock(&turn);
}

void captures_forget(void) {
    atomic_store(&captures, 0);
    list = NULL;
    pthread_mutex_init(&lock, NULL);
    pthread_mutex_init(&turn, NULL); /* whoever held it is not in the child */
}

bool capture_records(CUstream stream) {
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = real.cuStreamIsCapturing(stream, &status);
    /* the legacy stream while another stream is captured: the driver refuses work there, so nothing is to be held up
     * either */
    if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return true;
    return result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

static void (*on_change)(struct gpu *gpu);

void captures_on_change(void (*call)(struct gpu *gpu)) {
    on_change = call;
}

static void changed_by(int step) {
    if (atomic_fetch_add(&captures, step) + step < 0) atomic_store(&captures, 0);
    atomic_fetch_add(&captures_news, 1);
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

/* Take out the captures in this stream, or where that is NULL those of the context. Returns how many there were. */
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

bool capture_forget(CUstream stream) {
    if (!captures_in_progress() || !stream || !list_remove(stream, NULL, true)) return false;
    changed_by(-1);
    return true;
}

void capture_remember(CUstream stream) {
    list_add(stream, context_of(stream));
    changed_by(+1);
}

void captures_of_context_gone(CUcontext context) {
    int gone = captures_in_progress() ? list_remove(NULL, context, true) : 0;
    if (gone) changed_by(-gone);
}

CUcontext capture_begin(CUstream stream) {
    captures_hold_off();
    CUcontext context = context_of(stream);
    changed_by(+1);
    return context;
}

void capture_begun(CUstream stream, CUcontext context, bool begun) {
    if (begun) list_add(stream, context);
    changed_by(begun ? 0 : -1); /* a thread may have asked about the stream in between */
    captures_let_on();
}

void capture_end(CUstream stream) {
    list_remove(stream, NULL, false);
    changed_by(-1);
}

void captures_spread(void) {
    if (captures_in_progress()) atomic_fetch_add(&captures_news, 1);
}
