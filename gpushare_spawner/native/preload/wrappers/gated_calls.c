/* The wrappers of every call that puts work on a GPU: through the gate, the real call, out again. */
#include "gate/launch.h"
#include "driver/driver.h"
#include "wrappers/exported.h"

#define GATED(name, parameters, arguments, stream)                                                                     \
    CUresult wrapped_##name parameters {                                                                               \
        struct passage *passage = launch_enter(stream);                                                                \
        CUresult result = real.name arguments;                                                                         \
        launch_leave(passage);                                                                                         \
        return result;                                                                                                 \
    }                                                                                                                  \
    EXPORTED(name);

#define SINGLE(name, asked, version, parameters, arguments, stream) GATED(name, parameters, arguments, stream)
#define STREAMED(name, asked, version, twin, parameters, arguments, stream)                                            \
    GATED(name, parameters, arguments, stream)                                                                         \
    GATED(name##_ptsz, parameters, arguments, own(stream))
#define IMPLICIT(name, asked, version, twin, parameters, arguments)                                                    \
    GATED(name, parameters, arguments, NULL)                                                                           \
    GATED(name##_ptds, parameters, arguments, CU_STREAM_PER_THREAD)
#include "driver/gated_calls.h"
