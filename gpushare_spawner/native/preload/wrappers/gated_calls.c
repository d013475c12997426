/* Wrappers of the calls that may wait: every call that puts work on a GPU (cuLaunchKernel and the
   other STREAMED entries of driver/driver_calls.h), which passes the gate, and, with engine
   `suspend`, every other call that a suspended process must not make. A call of the latter kind that lacks device
   memory is repeated after the agent has freed memory. With other engines these calls go directly to the driver or to
   the wrapper that all engines use. */
#include "driver/driver.h"
#include "gate/launch.h"
#include "gate/shortage.h"
#include "platform/settings.h"

#define GATED(name, parameters, arguments, stream)                                                                     \
    CUresult wrapped_##name parameters {                                                                               \
        struct passage *passage = launch_enter(stream);                                                                \
        CUresult result = real.name arguments;                                                                         \
        launch_leave(passage);                                                                                         \
        return result;                                                                                                 \
    }                                                                                                                  \
    EXPORTED(name);

#define SINGLE(name, symbol, version, parameters, arguments, stream) GATED(name, parameters, arguments, stream)
#define STREAMED(name, symbol, version, twin, parameters, arguments, stream)                                           \
    GATED(name, parameters, arguments, stream)                                                                         \
    GATED(name##_ptsz, parameters, arguments, driver_twin_stream(stream))
#define IMPLICIT(name, symbol, version, twin, parameters, arguments)                                                   \
    GATED(name, parameters, arguments, NULL)                                                                           \
    GATED(name##_ptds, parameters, arguments, CU_STREAM_PER_THREAD)

#define WITH_SUSPEND(name, parameters, arguments, with_suspend, without)                                               \
    __attribute__((used)) CUresult suspendable_##name parameters {                                                     \
        struct passage *passage = launch_enter_call();                                                                 \
        CUresult result;                                                                                               \
        unsigned tries = 0;                                                                                            \
        do result = with_suspend arguments;                                                                            \
        while (unlikely(result == CUDA_ERROR_OUT_OF_MEMORY) && shortage_waited(passage, tries++));                     \
        if (unlikely(tries)) shortage_ended(passage);                                                                  \
        launch_leave(passage);                                                                                         \
        return result;                                                                                                 \
    }                                                                                                                  \
    __attribute__((visibility("default"))) CUresult name parameters {                                                  \
        return unlikely(settings_engine_suspends()) ? suspendable_##name arguments : without arguments;                \
    }

#define WATCHED(name, symbol, version, per_thread, parameters, arguments)                                              \
    CUresult wrapped_##name parameters;                                                                                \
    WITH_SUSPEND(name, parameters, arguments, wrapped_##name, wrapped_##name)
#define COUNTED(name, symbol, version, per_thread, parameters, arguments)                                              \
    CUresult wrapped_##name parameters;                                                                                \
    WITH_SUSPEND(name, parameters, arguments, wrapped_##name, real.name)
#define SUSPENDABLE(name, symbol, version, per_thread, parameters, arguments)                                          \
    WITH_SUSPEND(name, parameters, arguments, real.name, real.name)
#include "driver/driver_calls.h"
