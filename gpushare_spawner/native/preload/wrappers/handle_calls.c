/* Wrappers of the calls that create or release memory handles: for VMM's physical memory, which is only counted, and
   for objects that the process shares with other processes or APIs (ties.h). Also managed variables of modules. */
#include <pthread.h>
#include <stdlib.h>

#include "memory/allocations.h"
#include "memory/allowance.h"
#include "memory/ties.h"
#include "platform/settings.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- VMM: physical memory exists until its handles are released and its last mapping is removed ---- */

struct physical {
    size_t bytes;
    struct gpu *gpu;  /* NULL: memory of another process, which is not counted */
    unsigned handles; /* the number of handles */
    unsigned mappings;
    bool tied; /* whether it has a tie (ties.h) */
};

/* A handle of physical memory. After as many releases as references the driver may return the same value again. */
struct handle {
    struct tree_node place; /* by value */
    struct physical *physical;
    unsigned references; /* created or retained, not yet released */
};

struct mapping {
    struct tree_node place; /* by address */
    size_t bytes;
    struct physical *physical;
};

static struct tree_node *handles;
static struct tree_node *mappings;

/* With the lock held: */

static struct physical *physical_of(CUmemHandle handle) {
    struct tree_node *node = *tree_link(&handles, handle, 0);
    return node ? tree_record(node, struct handle, place)->physical : NULL;
}

static void drop_if_unused(struct physical *entry) {
    if (entry->handles || entry->mappings) return;
    if (entry->gpu) account_return(entry->gpu, entry->bytes, ACCOUNT_PLAIN);
    if (entry->tied) ties_remove(TIE_PHYSICAL, (uintptr_t)entry);
    free(entry);
}

/* Record a handle. False: no memory, and the handle is not recorded. */
static bool add_handle(CUmemHandle value, struct physical *physical) {
    struct tree_node *node = *tree_link(&handles, value, 0);
    if (node) {
        tree_record(node, struct handle, place)->references++;
        return true;
    }
    struct handle *handle = malloc(sizeof *handle);
    if (!handle) return false;
    *handle = (struct handle){{.key = value}, physical, 1};
    tree_insert(&handles, &handle->place);
    physical->handles++;
    return true;
}

static void release_handle(CUmemHandle value) {
    struct tree_node **link = tree_link(&handles, value, 0);
    struct handle *handle = *link ? tree_record(*link, struct handle, place) : NULL;
    if (!handle || --handle->references) return;
    tree_remove(link);
    handle->physical->handles--;
    drop_if_unused(handle->physical);
    free(handle);
}

static struct mapping *mapping_up_to(CUdeviceptr at) {
    struct tree_node *node = tree_last_up_to(mappings, at);
    return node ? tree_record(node, struct mapping, place) : NULL;
}

/* Return the mapping that contains an address. */
static struct mapping *mapping_of(CUdeviceptr at) {
    struct mapping *mapping = mapping_up_to(at);
    return mapping && at - mapping->place.key < mapping->bytes ? mapping : NULL;
}

/* Remove the mappings that begin in a range. Returns them as a list of left links. Physical memory stays counted. */
static struct tree_node *take_mappings(CUdeviceptr at, size_t bytes) {
    struct tree_node *taken = NULL;
    struct mapping *mapping;
    while (bytes && (mapping = mapping_up_to(at + bytes - 1)) && mapping->place.key >= at) {
        tree_remove(tree_link(&mappings, mapping->place.key, 0));
        mapping->place.left = taken;
        taken = &mapping->place;
    }
    return taken;
}

static void drop_mappings(struct tree_node *taken) {
    while (taken) {
        struct mapping *mapping = tree_record(taken, struct mapping, place);
        taken = taken->left;
        mapping->physical->mappings--;
        drop_if_unused(mapping->physical);
        free(mapping);
    }
}

static void put_back_mappings(struct tree_node *taken) {
    while (taken) {
        struct tree_node *next = taken->left;
        tree_insert(&mappings, taken);
        taken = next;
    }
}

static void tie(struct physical *entry, enum tie_kind kind) {
    if (entry->tied) return;
    entry->tied = true;
    ties_add((struct tie){kind, TIE_PHYSICAL, (uintptr_t)entry, 0, entry->bytes, NULL});
}

/* Without the lock held: */

/* Record new physical memory and its handle. False: no memory. */
static bool add_physical(CUmemHandle handle, struct physical physical, enum tie_kind *kind) {
    struct physical *entry = malloc(sizeof *entry);
    if (!entry) return false;
    *entry = physical;
    pthread_mutex_lock(&lock);
    bool added = add_handle(handle, entry);
    bool referenced = entry->handles > 0;
    if (referenced && kind) tie(entry, *kind);
    pthread_mutex_unlock(&lock);
    if (!referenced) free(entry);
    return added;
}

/* Record memory of another process, or of several processes. */
static void add_foreign(CUmemHandle handle, enum tie_kind kind) {
    if (!add_physical(handle, (struct physical){0}, &kind)) ties_lost();
}

CUresult wrapped_cuMemCreate(CUmemHandle *out, size_t bytes, const CUmemAllocationProp *prop,
                             unsigned long long flags) {
    bool device = out && prop && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    struct gpu *gpu = device ? gpu_of_device(prop->location.id) : NULL;
    if (!gpu) return real.cuMemCreate(out, bytes, prop, flags);
    if (!allowance_take(gpu, bytes, false, true)) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = real.cuMemCreate(out, bytes, prop, flags);
    if (result != CUDA_SUCCESS || !add_physical(*out, (struct physical){.bytes = bytes, .gpu = gpu}, NULL))
        account_return(gpu, bytes, ACCOUNT_PLAIN);
    return result;
}

CUresult wrapped_cuMemRetainAllocationHandle(CUmemHandle *out, void *at) {
    pthread_mutex_lock(&lock);
    CUresult result = real.cuMemRetainAllocationHandle(out, at);
    struct mapping *mapping = result == CUDA_SUCCESS ? mapping_of((CUdeviceptr)(uintptr_t)at) : NULL;
    if (mapping) add_handle(*out, mapping->physical);
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult wrapped_cuMemRelease(CUmemHandle handle) {
    /* removed under the lock together with the driver's release, because the driver may immediately return the handle
       again */
    pthread_mutex_lock(&lock);
    CUresult result = real.cuMemRelease(handle);
    if (result == CUDA_SUCCESS) release_handle(handle);
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult wrapped_cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemHandle handle, unsigned long long flags) {
    struct mapping *mapping = malloc(sizeof *mapping);
    pthread_mutex_lock(&lock);
    CUresult result = real.cuMemMap(at, bytes, offset, handle, flags);
    struct physical *physical = result == CUDA_SUCCESS ? physical_of(handle) : NULL;
    if (mapping && physical) { /* without a record, the memory belongs to a GPU that is not this session's */
        drop_mappings(take_mappings(at, bytes));
        *mapping = (struct mapping){{.key = at}, bytes, physical};
        tree_insert(&mappings, &mapping->place);
        physical->mappings++;
        mapping = NULL;
    }
    pthread_mutex_unlock(&lock);
    free(mapping);
    return result;
}

CUresult wrapped_cuMemUnmap(CUdeviceptr at, size_t bytes) {
    /* removed first, because another thread can map the same addresses as soon as the driver has unmapped them. The
       driver may wait for the device and so is called without the lock. */
    pthread_mutex_lock(&lock);
    struct tree_node *taken = take_mappings(at, bytes);
    pthread_mutex_unlock(&lock);
    CUresult result = real.cuMemUnmap(at, bytes);
    pthread_mutex_lock(&lock);
    if (result == CUDA_SUCCESS)
        drop_mappings(taken);
    else
        put_back_mappings(taken);
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult wrapped_cuMemImportFromShareableHandle(CUmemHandle *out, void *handle, int type) {
    CUresult result = real.cuMemImportFromShareableHandle(out, handle, type);
    if (result == CUDA_SUCCESS) add_foreign(*out, TIE_OPENED);
    return result;
}

/* A multicast object may contain GPUs of several processes. */
CUresult wrapped_cuMulticastCreate(CUmemHandle *out, const void *prop) {
    CUresult result = real.cuMulticastCreate(out, prop);
    if (result == CUDA_SUCCESS) add_foreign(*out, TIE_EXPORTED);
    return result;
}

CUresult wrapped_cuMemExportToShareableHandle(void *out, CUmemHandle handle, int type, unsigned long long flags) {
    CUresult result = real.cuMemExportToShareableHandle(out, handle, type, flags);
    if (result != CUDA_SUCCESS) return result;
    pthread_mutex_lock(&lock);
    struct physical *entry = physical_of(handle);
    if (entry) tie(entry, TIE_EXPORTED);
    pthread_mutex_unlock(&lock);
    return result;
}

static void tie_mapped(CUdeviceptr at) {
    pthread_mutex_lock(&lock);
    struct mapping *mapping = mapping_of(at);
    if (mapping) tie(mapping->physical, TIE_EXPORTED);
    pthread_mutex_unlock(&lock);
}

/* ---- objects that are shared with other processes or APIs: with engine `suspend` only ---- */

static CUcontext current_context(void) {
    CUcontext context = NULL;
    return real.cuCtxGetCurrent(&context) == CUDA_SUCCESS ? context : NULL;
}

/* Record that memory at this address is shared with other processes, until it is freed. */
static void tie_exported(CUdeviceptr at) {
    struct allocation allocation;
    if (allocations_find(at, &allocation))
        ties_add_once((struct tie){TIE_EXPORTED, TIE_ALLOCATION, allocation.at, allocation.number, allocation.bytes,
                                   allocation.context});
    else
        tie_mapped(at);
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
    if (result == CUDA_SUCCESS) tie_exported(at);
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

/* Calls that end the ties of their first argument. */
#define ENDING(name, type, object)                                                                                     \
    CUresult wrapped_##name(type handle) {                                                                             \
        CUresult result = real.name(handle);                                                                           \
        if (result == CUDA_SUCCESS) ties_remove(object, (uintptr_t)handle);                                            \
        return result;                                                                                                 \
    }

ENDING(cuEventDestroy, CUevent, TIE_EVENT)
ENDING(cuEventDestroy_v2, CUevent, TIE_EVENT)
ENDING(cuDestroyExternalMemory, void *, TIE_EXTERNAL)
ENDING(cuDestroyExternalSemaphore, void *, TIE_EXTERNAL)
ENDING(cuGraphicsUnregisterResource, void *, TIE_EXTERNAL)

/* Calls that open an object of another API. */
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

/* Record a managed variable of a module when the program queries its address, as CUDA's runtime does for each variable
   when it loads the module. The driver does not list these variables. */
static void tie_variable(CUdeviceptr at, size_t bytes, const void *owner) {
    unsigned char managed = 0;
    if (real.cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, at) != CUDA_SUCCESS || !managed) return;
    ties_add_once((struct tie){TIE_MANAGED, TIE_VARIABLE, at, (uintptr_t)owner, bytes, current_context()});
}

#define SHOWING(name)                                                                                                  \
    CUresult wrapped_##name(CUdeviceptr *out, size_t *bytes, void *owner, const char *variable) {                      \
        CUdeviceptr at = 0;                                                                                            \
        size_t size = 0;                                                                                               \
        CUresult result = real.name(out ? out : &at, bytes ? bytes : &size, owner, variable);                          \
        if (result == CUDA_SUCCESS) tie_variable(out ? *out : at, bytes ? *bytes : size, owner);                       \
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

CUresult wrapped_cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr at) {
    static _Atomic bool logged;
    struct allocation allocation;
    if (!allocations_find_converted(at, &allocation)) {
        CUresult result = real.cuIpcGetMemHandle(out, at);
        if (result == CUDA_SUCCESS && settings_engine_suspends()) tie_exported(at);
        return result;
    }
    if (!atomic_exchange(&logged, true))
        log_line(LOG_ERROR, "GPU memory cannot be shared between processes (cuIpcGetMemHandle) while this GPU is "
                            "oversubscribed; start the program with GPUSHARE_MANAGED=0 if it needs that: its memory "
                            "then stays on the GPU");
    return CUDA_ERROR_INVALID_VALUE; /* the driver's result for managed memory */
}

RESET_IN_CHILD(handle_calls_reset);
void handle_calls_reset(void) {
    handles = NULL;
    mappings = NULL;
    pthread_mutex_init(&lock, NULL);
}
