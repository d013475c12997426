#include "capture.h"

#include <pthread.h>
#include <stdatomic.h>

#include "gate.h"
#include "resolve.h"

#define CUDA_ERROR_STREAM_CAPTURE_IMPLICIT 906

_Atomic int captures;
_Atomic uint32_t captures_news = 1;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER; /* of beginning a capture, and of calls that one forbids */

void captures_hold_off(void) {
    pthread_mutex_lock(&turn);
}

void captures_let_on(void) {
    pthread_mutex_unlock(&turn);
}

void captures_forget(void) {
    atomic_store(&captures, 0);
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

/* Counted before the driver knows, so that no launch of the captured stream takes the fast path. */
#define BEGIN(call)                                                                                                    \
    captures_hold_off();                                                                                               \
    changed_by(+1);                                                                                                    \
    CUresult result = call;                                                                                            \
    changed_by(result == CUDA_SUCCESS ? 0 : -1); /* a thread may have asked about the stream in between */             \
    captures_let_on();                                                                                                 \
    return result

CUresult wrapped_cuStreamBeginCapture(CUstream stream) {
    BEGIN(real.cuStreamBeginCapture(stream));
}
EXPORTED(cuStreamBeginCapture);
CUresult wrapped_cuStreamBeginCapture_ptsz(CUstream stream) {
    BEGIN(real.cuStreamBeginCapture_ptsz(stream));
}
EXPORTED(cuStreamBeginCapture_ptsz);
CUresult wrapped_cuStreamBeginCapture_v2(CUstream stream, int mode) {
    BEGIN(real.cuStreamBeginCapture_v2(stream, mode));
}
EXPORTED(cuStreamBeginCapture_v2);
CUresult wrapped_cuStreamBeginCapture_v2_ptsz(CUstream stream, int mode) {
    BEGIN(real.cuStreamBeginCapture_v2_ptsz(stream, mode));
}
EXPORTED(cuStreamBeginCapture_v2_ptsz);
CUresult wrapped_cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *after,
                                             const void *edges, size_t count, int mode) {
    BEGIN(real.cuStreamBeginCaptureToGraph(stream, graph, after, edges, count, mode));
}
EXPORTED(cuStreamBeginCaptureToGraph);
CUresult wrapped_cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode *after,
                                                  const void *edges, size_t count, int mode) {
    BEGIN(real.cuStreamBeginCaptureToGraph_ptsz(stream, graph, after, edges, count, mode));
}
EXPORTED(cuStreamBeginCaptureToGraph_ptsz);

/* A capture is over whether EndCapture succeeds or says that the capture was invalid; not if there was none. */
CUresult wrapped_cuStreamEndCapture(CUstream stream, CUgraph *out) {
    bool capturing = is_capturing(stream);
    CUresult result = real.cuStreamEndCapture(stream, out);
    if (capturing && !is_capturing(stream)) changed_by(-1);
    return result;
}
EXPORTED(cuStreamEndCapture);

CUresult wrapped_cuStreamEndCapture_ptsz(CUstream stream, CUgraph *out) {
    CUstream meant = stream ? stream : CU_STREAM_PER_THREAD;
    bool capturing = is_capturing(meant);
    CUresult result = real.cuStreamEndCapture_ptsz(stream, out);
    if (capturing && !is_capturing(meant)) changed_by(-1);
    return result;
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
