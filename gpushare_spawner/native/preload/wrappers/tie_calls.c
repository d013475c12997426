/* The wrappers of calls that share something with other processes or APIs, or that show a managed variable: with engine
   `suspend` only. VMM's are in plain_memory.c, pools' in stream_ordered.c. */
#include "contexts/contexts.h"
#include "driver/driver.h"
#include "memory/allocations.h"
#include "memory/ties.h"
#include "wrappers/plain_memory.h"

static CUcontext current_context(void) {
    CUcontext context = NULL;
    return real.cuCtxGetCurrent(&context) == CUDA_SUCCESS ? context : NULL;
}

void tie_calls_exported(CUdeviceptr at) {
    struct allocation allocation;
    if (allocations_find(at, &allocation))
        ties_add_once((struct tie){TIE_EXPORTED, TIE_ALLOCATION, allocation.at, allocation.number, allocation.bytes,
                                   allocation.context});
    else
        plain_memory_exported(at);
}

CUresult wrapped_cuIpcOpenMemHandle(CUdeviceptr *out, CUipcMemHandle handle, unsigned flags) {
    CUresult result = real.cuIpcOpenMemHandle(out, handle, flags);
    if (result == CUDA_SUCCESS) ties_add((struct tie){TIE_OPENED, TIE_ADDRESS, *out, 0, 0, current_context()});
    return result;
}

CUresult wrapped_cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle handle, unsigned flags) {
    CUresult result = real.cuIpcOpenMemHandle_v2(out, handle, flags);
    if (result == CUDA_SUCCESS) ties_add((struct tie){TIE_OPENED, TIE_ADDRESS, *out, 0, 0, current_context()});
    return result;
}

CUresult wrapped_cuIpcCloseMemHandle(CUdeviceptr at) {
    CUresult result = real.cuIpcCloseMemHandle(at);
    if (result == CUDA_SUCCESS) ties_remove(TIE_ADDRESS, at);
    return result;
}

CUresult wrapped_cuMemGetHandleForAddressRange(void *out, CUdeviceptr at, size_t bytes, int type,
                                               unsigned long long flags) {
    CUresult result = real.cuMemGetHandleForAddressRange(out, at, bytes, type, flags);
    if (result == CUDA_SUCCESS) tie_calls_exported(at);
    return result;
}

CUresult wrapped_cuIpcGetEventHandle(CUipcMemHandle *out, CUevent event) {
    CUresult result = real.cuIpcGetEventHandle(out, event);
    if (result == CUDA_SUCCESS)
        ties_add_once((struct tie){TIE_EXPORTED, TIE_EVENT, (uintptr_t)event, 0, 0, current_context()});
    return result;
}

CUresult wrapped_cuIpcOpenEventHandle(CUevent *out, CUipcMemHandle handle) {
    CUresult result = real.cuIpcOpenEventHandle(out, handle);
    if (result == CUDA_SUCCESS) ties_add((struct tie){TIE_OPENED, TIE_EVENT, (uintptr_t)*out, 0, 0, current_context()});
    return result;
}

/* `what` of the call's first argument is over when the call succeeds. */
#define ENDING(name, type, what)                                                                                       \
    CUresult wrapped_##name(type handle) {                                                                             \
        CUresult result = real.name(handle);                                                                           \
        if (result == CUDA_SUCCESS) ties_remove(what, (uintptr_t)handle);                                              \
        return result;                                                                                                 \
    }

ENDING(cuEventDestroy, CUevent, TIE_EVENT)
ENDING(cuEventDestroy_v2, CUevent, TIE_EVENT)
ENDING(cuDestroyExternalMemory, void *, TIE_EXTERNAL)
ENDING(cuDestroyExternalSemaphore, void *, TIE_EXTERNAL)
ENDING(cuGraphicsUnregisterResource, void *, TIE_EXTERNAL)

/* A handle of another API becomes one of CUDA. */
#define OPENING(name, parameters, arguments)                                                                           \
    CUresult wrapped_##name parameters {                                                                               \
        CUresult result = real.name arguments;                                                                         \
        if (result == CUDA_SUCCESS)                                                                                    \
            ties_add((struct tie){TIE_OPENED, TIE_EXTERNAL, (uintptr_t)*out, 0, 0, current_context()});                \
        return result;                                                                                                 \
    }

OPENING(cuImportExternalMemory, (void **out, const void *description), (out, description))
OPENING(cuImportExternalSemaphore, (void **out, const void *description), (out, description))
OPENING(cuGraphicsGLRegisterBuffer, (void **out, unsigned buffer, unsigned flags), (out, buffer, flags))
OPENING(cuGraphicsGLRegisterImage, (void **out, unsigned image, unsigned target, unsigned flags),
        (out, image, target, flags))
OPENING(cuGraphicsEGLRegisterImage, (void **out, void *image, unsigned flags), (out, image, flags))

/* Managed variables of modules. The driver does not say which there are: one counts when the program asks for its
   address, as CUDA's runtime does for each when it loads the module. */
static void variable_shown(CUdeviceptr at, size_t bytes, const void *owner) {
    unsigned char managed = 0;
    if (real.cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, at) != CUDA_SUCCESS || !managed) return;
    ties_add_once((struct tie){TIE_MANAGED, TIE_VARIABLE, at, (uintptr_t)owner, bytes, current_context()});
}

#define SHOWING(name)                                                                                                  \
    CUresult wrapped_##name(CUdeviceptr *out, size_t *bytes, void *owner, const char *variable) {                      \
        CUdeviceptr at = 0;                                                                                            \
        size_t size = 0;                                                                                               \
        CUresult result = real.name(out ? out : &at, bytes ? bytes : &size, owner, variable);                          \
        if (result == CUDA_SUCCESS) variable_shown(out ? *out : at, bytes ? *bytes : size, owner);                     \
        return result;                                                                                                 \
    }

SHOWING(cuModuleGetGlobal_v2)
SHOWING(cuLibraryGetGlobal)
SHOWING(cuLibraryGetManaged)

#define UNLOADING(name)                                                                                                \
    CUresult wrapped_##name(void *owner) {                                                                             \
        CUresult result = real.name(owner);                                                                            \
        if (result == CUDA_SUCCESS) ties_remove_variables((uintptr_t)owner);                                           \
        return result;                                                                                                 \
    }

UNLOADING(cuModuleUnload)
UNLOADING(cuLibraryUnload)
