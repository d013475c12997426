/* cuGetProcAddress: finds the function for a name and a CUDA version. */
#include <stdlib.h>
#include <string.h>

#include "cuda/driver/driver.h"
#include "cuda/driver/functions.h"

/* True for the checkpoint functions if the driver is configured to be too old for them. The state contains this setting
 * too, but a lookup must not open the state: the user who looks up a function may differ from the user who calls it. */
static int is_hidden(const char *name) {
    const char *support = getenv("SIMGPU_CHECKPOINT");
    return support && strcmp(support, "absent") == 0 && strncmp(name, "cuCheckpoint", strlen("cuCheckpoint")) == 0;
}

/* Find the newest function with this name that is not newer than the requested version. */
static CUresult look_up(const char *name, void **out, int version, uint64_t flags,
                        CUdriverProcAddressQueryResult *status) {
    int best = -1, named = 0;
    CUdriverProcAddressQueryResult ignored;
    status = status ? status : &ignored;
    *status = PROC_NOT_FOUND;
    REQUIRE(name && out, CUDA_ERROR_INVALID_VALUE);
    *out = NULL;
    REQUIRE(version <= DRIVER_VERSION, CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < FUNCTION_COUNT; i++) {
        if (strcmp(FUNCTIONS[i].name, name) != 0 || is_hidden(name)) continue;
        named = 1;
        if (FUNCTIONS[i].version <= version && (best < 0 || FUNCTIONS[i].version > FUNCTIONS[best].version))
            best = (int)i;
    }
    if (best < 0) {
        *status = named ? PROC_VERSION_NOT_SUFFICIENT : PROC_NOT_FOUND;
        return CUDA_ERROR_NOT_FOUND;
    }
    int per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) && FUNCTIONS[best].per_thread;
    void (*function)(void) = per_thread ? FUNCTIONS[best].per_thread : FUNCTIONS[best].function;
    memcpy(out, &function, sizeof function);
    *status = PROC_FOUND;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetProcAddress(const char *name, void **out, int version, uint64_t flags) {
    REQUIRE(flags <= 2, CUDA_ERROR_INVALID_VALUE);
    return look_up(name, out, version, flags, NULL);
}

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags,
                                    CUdriverProcAddressQueryResult *status) {
    REQUIRE(flags <= 2, CUDA_ERROR_INVALID_VALUE);
    return look_up(name, out, version, flags, status);
}
