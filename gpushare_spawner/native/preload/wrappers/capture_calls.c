/* The wrappers of calls that begin, end or spread a stream capture. */
#include "contexts/captures.h"
#include "driver/driver.h"
#include "wrappers/exported.h"

#define BEGIN(stream, call)                                                                                            \
    CUcontext context = capture_begin(stream);                                                                         \
    CUresult result = call;                                                                                            \
    capture_begun(stream, context, result == CUDA_SUCCESS);                                                            \
    return result

CUresult wrapped_cuStreamBeginCapture(CUstream stream) {
    BEGIN(stream, real.cuStreamBeginCapture(stream));
}
CUresult wrapped_cuStreamBeginCapture_ptsz(CUstream stream) {
    BEGIN(own(stream), real.cuStreamBeginCapture_ptsz(stream));
}
CUresult wrapped_cuStreamBeginCapture_v2(CUstream stream, int mode) {
    BEGIN(stream, real.cuStreamBeginCapture_v2(stream, mode));
}
CUresult wrapped_cuStreamBeginCapture_v2_ptsz(CUstream stream, int mode) {
    BEGIN(own(stream), real.cuStreamBeginCapture_v2_ptsz(stream, mode));
}
CUresult wrapped_cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *after,
                                             const void *edges, size_t count, int mode) {
    BEGIN(stream, real.cuStreamBeginCaptureToGraph(stream, graph, after, edges, count, mode));
}
CUresult wrapped_cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode *after,
                                                  const void *edges, size_t count, int mode) {
    BEGIN(own(stream), real.cuStreamBeginCaptureToGraph_ptsz(stream, graph, after, edges, count, mode));
}

CUresult wrapped_cuStreamBeginRecaptureToGraph(CUstream stream, int mode, CUgraph graph, void *callback, void *data) {
    BEGIN(stream, real.cuStreamBeginRecaptureToGraph(stream, mode, graph, callback, data));
}
CUresult wrapped_cuStreamBeginRecaptureToGraph_ptsz(CUstream stream, int mode, CUgraph graph, void *callback,
                                                    void *data) {
    BEGIN(own(stream), real.cuStreamBeginRecaptureToGraph_ptsz(stream, mode, graph, callback, data));
}

/* CUDA in graphics: the stream's work goes into a command list of a graphics API, which runs it later. */
CUresult wrapped_cuStreamBeginCaptureToCig(CUstream stream, void *parameters) {
    BEGIN(stream, real.cuStreamBeginCaptureToCig(stream, parameters));
}
CUresult wrapped_cuStreamBeginCaptureToCig_ptsz(CUstream stream, void *parameters) {
    BEGIN(own(stream), real.cuStreamBeginCaptureToCig_ptsz(stream, parameters));
}
CUresult wrapped_cuStreamEndCaptureToCig(CUstream stream) {
    CUresult result = real.cuStreamEndCaptureToCig(stream);
    if (result == CUDA_SUCCESS) capture_forget(stream);
    return result;
}
CUresult wrapped_cuStreamEndCaptureToCig_ptsz(CUstream stream) {
    CUresult result = real.cuStreamEndCaptureToCig_ptsz(stream);
    if (result == CUDA_SUCCESS) capture_forget(own(stream));
    return result;
}

/* A capture is over whether EndCapture succeeds or says that the capture was invalid; not if there was none. */
#define END(stream, call)                                                                                              \
    bool capturing = capture_records(stream);                                                                          \
    CUresult result = call;                                                                                            \
    if (capturing && !capture_records(stream)) {                                                                       \
        capture_end(stream);                                                                                           \
    }                                                                                                                  \
    return result

CUresult wrapped_cuStreamEndCapture(CUstream stream, CUgraph *out) {
    END(stream, real.cuStreamEndCapture(stream, out));
}

CUresult wrapped_cuStreamEndCapture_ptsz(CUstream stream, CUgraph *out) {
    END(own(stream), real.cuStreamEndCapture_ptsz(stream, out));
}

CUresult wrapped_cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    captures_spread();
    CUresult result = real.cuStreamWaitEvent(stream, event, flags);
    captures_spread(); /* another thread may have asked about the stream in between */
    return result;
}

CUresult wrapped_cuStreamWaitEvent_ptsz(CUstream stream, CUevent event, unsigned flags) {
    captures_spread();
    CUresult result = real.cuStreamWaitEvent_ptsz(stream, event, flags);
    captures_spread();
    return result;
}
