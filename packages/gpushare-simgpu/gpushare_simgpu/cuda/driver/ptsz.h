/* Every call that uses the default stream exists twice: the first form uses the legacy default stream, and CUDA's
 * second form, with the suffix _ptsz or _ptds, uses the per-thread default stream. */
#ifndef SIMGPU_PTSZ_H
#define SIMGPU_PTSZ_H

#include "cuda/driver/driver_api.h"

#define PER_THREAD(handle) ((handle) ? (handle) : CU_STREAM_PER_THREAD)

/* For calls whose only parameter is `stream`. */
#define WITH_STREAM(name, body, parameters)                                                                            \
    EXPORT CUresult name parameters {                                                                                  \
        return body(stream);                                                                                           \
    }                                                                                                                  \
    EXPORT CUresult name##_ptsz parameters {                                                                           \
        return body(PER_THREAD(stream));                                                                               \
    }

/* For calls whose last parameter is `stream`; the rest of the arguments follow the parameters. */
#define LAST_IS_STREAM(name, body, parameters, ...)                                                                    \
    EXPORT CUresult name parameters {                                                                                  \
        return body(__VA_ARGS__, stream);                                                                              \
    }                                                                                                                  \
    EXPORT CUresult name##_ptsz parameters {                                                                           \
        return body(__VA_ARGS__, PER_THREAD(stream));                                                                  \
    }

/* For calls on the default stream, without a parameter for it. */
#define ON_DEFAULT_STREAM(name, body, parameters, ...)                                                                 \
    EXPORT CUresult name parameters {                                                                                  \
        return body(__VA_ARGS__, CU_STREAM_LEGACY);                                                                    \
    }                                                                                                                  \
    EXPORT CUresult name##_ptds parameters {                                                                           \
        return body(__VA_ARGS__, CU_STREAM_PER_THREAD);                                                                \
    }

#endif
