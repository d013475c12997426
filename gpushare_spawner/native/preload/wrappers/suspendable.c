/* With engine `suspend`: every driver call that a suspended process must not make is counted while a thread is inside,
   and waits while the process is suspended. One that lacks device memory is made again when the agent has made room.
   With another engine these calls are as the driver has them, or go to the wrapper that the other engines have too. */
#include "driver/driver.h"
#include "gate/launch.h"
#include "gate/shortage.h"
#include "platform/engine.h"

#define SUSPENDABLE(name, parameters, arguments, with_suspend, without)                                                \
    __attribute__((used)) CUresult suspendable_##name parameters {                                                     \
        struct passage *passage = launch_enter_call();                                                                 \
        CUresult result;                                                                                               \
        unsigned tries = 0;                                                                                            \
        do result = with_suspend arguments;                                                                            \
        while (unlikely(result == CUDA_ERROR_OUT_OF_MEMORY) && shortage_waited(passage, tries++));                     \
        if (unlikely(tries)) shortage_settled(passage);                                                                \
        launch_leave(passage);                                                                                         \
        return result;                                                                                                 \
    }                                                                                                                  \
    __attribute__((visibility("default"))) CUresult name parameters {                                                  \
        return unlikely(engine_suspends()) ? suspendable_##name arguments : without arguments;                         \
    }

#define WATCHED(name, asked, version, per_thread, parameters, arguments)                                               \
    CUresult wrapped_##name parameters;                                                                                \
    SUSPENDABLE(name, parameters, arguments, wrapped_##name, wrapped_##name)
#define COUNTED(name, asked, version, per_thread, parameters, arguments)                                               \
    CUresult wrapped_##name parameters;                                                                                \
    SUSPENDABLE(name, parameters, arguments, wrapped_##name, real.name)
#define HELD(name, asked, version, per_thread, parameters, arguments)                                                  \
    SUSPENDABLE(name, parameters, arguments, real.name, real.name)
#define WRAPPED(name, asked, version, per_thread, parameters)
#define CALLED(name, parameters)
#include "driver/held_calls.h"
#include "driver/driver_calls.h"
