#include "contexts/capture.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "gate/gate.h"
#include "driver/resolve.h"

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

bool is_capturing(CUstream stream) {
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = real.cuStreamIsCapturing(stream, &status);
    /* the legacy stream while another stream is captured: the driver refuses work there, so nothing is to be held up
     * either */
    if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return true;
    return result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

static void changed_by(int step) {
    if (atomic_fetch_add(&captures, step) + step < 0) atomic_store(&captures, 0);
    atomic_fetch_add(&captures_news, 1);
    for (int i = 0; i < gpu_count; i++) gate_refresh(&gpus[i]);
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

/* Counted before the driver knows, so that no launch of the captured stream takes the fast path. */
#define BEGIN(stream, call)                                                                                            \
    captures_hold_off();                                                                                               \
    CUcontext context = context_of(stream);                                                                            \
    changed_by(+1);                                                                                                    \
    CUresult result = call;                                                                                            \
    if (result == CUDA_SUCCESS) list_add(stream, context);                                                             \
    changed_by(result == CUDA_SUCCESS ? 0 : -1); /* a thread may have asked about the stream in between */             \
    captures_let_on();                                                                                                 \
    return result

static CUstream own(CUstream stream) {
    return stream ? stream : CU_STREAM_PER_THREAD;
}

CUresult wrapped_cuStreamBeginCapture(CUstream stream) {
    BEGIN(stream, real.cuStreamBeginCapture(stream));
}
EXPORTED(cuStreamBeginCapture);
CUresult wrapped_cuStreamBeginCapture_ptsz(CUstream stream) {
    BEGIN(own(stream), real.cuStreamBeginCapture_ptsz(stream));
}
EXPORTED(cuStreamBeginCapture_ptsz);
CUresult wrapped_cuStreamBeginCapture_v2(CUstream stream, int mode) {
    BEGIN(stream, real.cuStreamBeginCapture_v2(stream, mode));
}
EXPORTED(cuStreamBeginCapture_v2);
CUresult wrapped_cuStreamBeginCapture_v2_ptsz(CUstream stream, int mode) {
    BEGIN(own(stream), real.cuStreamBeginCapture_v2_ptsz(stream, mode));
}
EXPORTED(cuStreamBeginCapture_v2_ptsz);
CUresult wrapped_cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *after,
                                             const void *edges, size_t count, int mode) {
    BEGIN(stream, real.cuStreamBeginCaptureToGraph(stream, graph, after, edges, count, mode));
}
EXPORTED(cuStreamBeginCaptureToGraph);
CUresult wrapped_cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode *after,
                                                  const void *edges, size_t count, int mode) {
    BEGIN(own(stream), real.cuStreamBeginCaptureToGraph_ptsz(stream, graph, after, edges, count, mode));
}
EXPORTED(cuStreamBeginCaptureToGraph_ptsz);

CUresult wrapped_cuStreamBeginRecaptureToGraph(CUstream stream, int mode, CUgraph graph, void *callback, void *data) {
    BEGIN(stream, real.cuStreamBeginRecaptureToGraph(stream, mode, graph, callback, data));
}
EXPORTED(cuStreamBeginRecaptureToGraph);
CUresult wrapped_cuStreamBeginRecaptureToGraph_ptsz(CUstream stream, int mode, CUgraph graph, void *callback,
                                                    void *data) {
    BEGIN(own(stream), real.cuStreamBeginRecaptureToGraph_ptsz(stream, mode, graph, callback, data));
}
EXPORTED(cuStreamBeginRecaptureToGraph_ptsz);

/* CUDA in graphics: the stream's work goes into a command list of a graphics API, which runs it later. */
CUresult wrapped_cuStreamBeginCaptureToCig(CUstream stream, void *parameters) {
    BEGIN(stream, real.cuStreamBeginCaptureToCig(stream, parameters));
}
EXPORTED(cuStreamBeginCaptureToCig);
CUresult wrapped_cuStreamBeginCaptureToCig_ptsz(CUstream stream, void *parameters) {
    BEGIN(own(stream), real.cuStreamBeginCaptureToCig_ptsz(stream, parameters));
}
EXPORTED(cuStreamBeginCaptureToCig_ptsz);
CUresult wrapped_cuStreamEndCaptureToCig(CUstream stream) {
    CUresult result = real.cuStreamEndCaptureToCig(stream);
    if (result == CUDA_SUCCESS) capture_forget(stream);
    return result;
}
EXPORTED(cuStreamEndCaptureToCig);
CUresult wrapped_cuStreamEndCaptureToCig_ptsz(CUstream stream) {
    CUresult result = real.cuStreamEndCaptureToCig_ptsz(stream);
    if (result == CUDA_SUCCESS) capture_forget(own(stream));
    return result;
}
EXPORTED(cuStreamEndCaptureToCig_ptsz);

/* A capture is over whether EndCapture succeeds or says that the capture was invalid; not if there was none. */
#define END(stream, call)                                                                                              \
    bool capturing = is_capturing(stream);                                                                             \
    CUresult result = call;                                                                                            \
    if (capturing && !is_capturing(stream)) {                                                                          \
        list_remove(stream, NULL, false);                                                                              \
        changed_by(-1);                                                                                                \
    }                                                                                                                  \
    return result

CUresult wrapped_cuStreamEndCapture(CUstream stream, CUgraph *out) {
    END(stream, real.cuStreamEndCapture(stream, out));
}
EXPORTED(cuStreamEndCapture);

CUresult wrapped_cuStreamEndCapture_ptsz(CUstream stream, CUgraph *out) {
    END(own(stream), real.cuStreamEndCapture_ptsz(stream, out));
}
EXPORTED(cuStreamEndCapture_ptsz);

/* A stream that waits for an event of a captured one is captured from then on. */
static void capture_spreads(void) {
    if (captures_in_progress()) atomic_fetch_add(&captures_news, 1);
}

CUresult wrapped_cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    capture_spreads();
    CUresult result = real.cuStreamWaitEvent(stream, event, flags);
    capture_spreads(); /* another thread may have asked about the stream in between */
    return result;
}
EXPORTED(cuStreamWaitEvent);

CUresult wrapped_cuStreamWaitEvent_ptsz(CUstream stream, CUevent event, unsigned flags) {
    capture_spreads();
    CUresult result = real.cuStreamWaitEvent_ptsz(stream, event, flags);
    capture_spreads();
    return result;
}
EXPORTED(cuStreamWaitEvent_ptsz);
