/* Virtual memory management: address space, physical memory, and the mapping between them are separate objects. */
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/mig.h"
#include "cuda/streams/call_lock.h"
#include "cuda/memory/memory.h"

#define PHYSICAL_MAGIC 0x50485953u

/* Physical memory: frames, and an unnamed file that contains the bytes and can be mapped to several addresses. */
struct physical {
    uint32_t magic;
    uint32_t references; /* the handle, and every mapping */
    int file;
    struct region *frames; /* at an otherwise unused address */
    uint64_t size;
    CUmemAllocationProp properties;
};

static struct physical *physical_of(CUmemGenericAllocationHandle handle) {
    struct physical *physical = (struct physical *)(uintptr_t)handle;
    return physical && physical->magic == PHYSICAL_MAGIC ? physical : NULL;
}

/* With memory_lock held. */
static void release(struct physical *physical) {
    if (--physical->references) return;
    struct span span = physical->frames->span;
    region_drop(physical->frames);
    space_release(span.base, span.size);
    close(physical->file);
    physical->magic = 0;
    free(physical);
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties,
                                              unsigned option) {
    REQUIRE_INIT();
    REQUIRE(granularity && properties && option <= 1, CUDA_ERROR_INVALID_VALUE);
    *granularity = driver.state->settings.page;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                            unsigned long long flags) {
    LOCKABLE();
    REQUIRE_INIT();
    REQUIRE(handle && properties && size && flags == 0 && properties->type == 1, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(size % driver.state->settings.page == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(properties->location.type == LOCATION_DEVICE && properties->handle_types == 0, CUDA_ERROR_NOT_SUPPORTED);
    REQUIRE(device_exists(properties->location.id), CUDA_ERROR_INVALID_DEVICE);
    int gpu = driver.gpu[properties->location.id];
    REQUIRE(size <= mig_memory(driver.state, gpu), CUDA_ERROR_OUT_OF_MEMORY);
    struct physical *physical = calloc(1, sizeof *physical);
    REQUIRE(physical, CUDA_ERROR_OUT_OF_MEMORY);
    *physical = (struct physical){PHYSICAL_MAGIC, 1, -1, NULL, size, *properties};
    physical->file = (int)syscall(SYS_memfd_create, "simgpu", 1u /* close on exec */);
    CUresult error = CUDA_ERROR_OUT_OF_MEMORY;
    void *memory = NULL;
    pthread_mutex_lock(&memory_lock);
    if (physical->file >= 0 && ftruncate(physical->file, (off_t)size) == 0 && (memory = space_reserve(size, 0)))
        physical->frames = region_add((uint64_t)(uintptr_t)memory, size, KIND_PLAIN, gpu);
    if (physical->frames && (error = region_commit(physical->frames)) != CUDA_SUCCESS) region_drop(physical->frames);
    pthread_mutex_unlock(&memory_lock);
    if (error) {
        if (memory) space_release((uint64_t)(uintptr_t)memory, size);
        if (physical->file >= 0) close(physical->file);
        free(physical);
        return error;
    }
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)physical;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    LOCKABLE();
    REQUIRE_INIT();
    struct physical *physical = physical_of(handle);
    REQUIRE(physical, CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&memory_lock);
    release(physical);
    pthread_mutex_unlock(&memory_lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                                       CUmemGenericAllocationHandle handle) {
    REQUIRE_INIT();
    struct physical *physical = physical_of(handle);
    REQUIRE(physical && properties, CUDA_ERROR_INVALID_VALUE);
    *properties = physical->properties;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    REQUIRE_INIT();
    REQUIRE(handle, CUDA_ERROR_INVALID_VALUE);
    CUresult error = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    struct allocation *allocation = allocation_find((uint64_t)(uintptr_t)address);
    if (allocation && allocation->kind == KIND_MAPPED) {
        allocation->physical->references++;
        *handle = (CUmemGenericAllocationHandle)(uintptr_t)allocation->physical;
        error = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&memory_lock);
    return error;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wish,
                                    unsigned long long flags) {
    LOCKABLE();
    REQUIRE_INIT();
    uint64_t page = driver.state->settings.page;
    REQUIRE(address && size && size % page == 0 && flags == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE((alignment & (alignment - 1)) == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(alignment <= page, CUDA_ERROR_NOT_SUPPORTED);
    void *memory = space_reserve(size, 0);
    REQUIRE(memory, CUDA_ERROR_OUT_OF_MEMORY);
    *address = (uint64_t)(uintptr_t)memory;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    LOCKABLE();
    REQUIRE_INIT();
    REQUIRE(address && size, CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&memory_lock);
    int mapped = allocation_find(address) != NULL;
    pthread_mutex_unlock(&memory_lock);
    REQUIRE(!mapped, CUDA_ERROR_INVALID_VALUE);
    space_release(address, size);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
    LOCKABLE();
    REQUIRE_INIT();
    struct physical *physical = physical_of(handle);
    REQUIRE(physical && address && size && offset == 0 && flags == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(size <= physical->size && size % driver.state->settings.page == 0, CUDA_ERROR_INVALID_VALUE);
    CUresult error = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    if (!allocation_find(address) && !allocation_find(address + size - 1)) {
        struct allocation *allocation = NULL;
        /* no access until it is granted */
        void *mapped = mmap((void *)(uintptr_t)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->file, 0);
        if (mapped != MAP_FAILED) allocation = allocation_add(address, size, KIND_MAPPED, NULL);
        error = allocation ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
        if (allocation) {
            allocation->device = physical->properties.location.id;
            allocation->physical = physical;
            physical->references++;
        }
    }
    pthread_mutex_unlock(&memory_lock);
    return error;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    LOCKABLE();
    REQUIRE_INIT();
    REQUIRE(address && size, CUDA_ERROR_INVALID_VALUE);
    synchronize_everything();
    CUresult error = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    uint64_t end = address + size;
    for (struct allocation *allocation; address < end; address += size) {
        allocation = allocation_find(address);
        if (!allocation || allocation->kind != KIND_MAPPED || allocation->span.base != address ||
            allocation->span.size > end - address)
            break;
        size = allocation->span.size;
        mmap((void *)(uintptr_t)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
             0);
        release(allocation->physical);
        allocation_drop(allocation);
        error = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&memory_lock);
    return error;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count) {
    LOCKABLE();
    REQUIRE_INIT();
    REQUIRE(address && size && access && count, CUDA_ERROR_INVALID_VALUE);
    int granted = 0;
    for (size_t i = 0; i < count; i++) {
        REQUIRE(access[i].location.type == LOCATION_DEVICE, CUDA_ERROR_NOT_SUPPORTED);
        REQUIRE(device_exists(access[i].location.id), CUDA_ERROR_INVALID_DEVICE);
        granted |= (int)access[i].flags & 3;
    }
    CUresult error = CUDA_SUCCESS;
    pthread_mutex_lock(&memory_lock);
    uint64_t end = address + size;
    for (uint64_t at = address; at < end && !error;) {
        struct allocation *allocation = allocation_find(at);
        if (!allocation || allocation->kind != KIND_MAPPED || allocation->span.base != at ||
            allocation->span.size > end - at) {
            error = CUDA_ERROR_INVALID_VALUE;
            break;
        }
        int protection = (granted & 1 ? PROT_READ : 0) | (granted & 2 ? PROT_WRITE : 0);
        if (mprotect((void *)(uintptr_t)at, allocation->span.size, protection)) error = CUDA_ERROR_OPERATING_SYSTEM;
        allocation->access = granted;
        at += allocation->span.size;
    }
    pthread_mutex_unlock(&memory_lock);
    return error;
}

EXPORT CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address) {
    REQUIRE_INIT();
    REQUIRE(flags && location, CUDA_ERROR_INVALID_VALUE);
    CUresult error = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    struct allocation *allocation = allocation_find(address);
    if (allocation && allocation->kind == KIND_MAPPED) {
        *flags = (unsigned long long)allocation->access;
        error = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&memory_lock);
    return error;
}

/* Here, one process's handles are meaningless to other processes. */
EXPORT CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, unsigned type,
                                             unsigned long long flags) {
    REQUIRE_INIT();
    return CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *from, unsigned type) {
    REQUIRE_INIT();
    return CUDA_ERROR_NOT_SUPPORTED;
}
