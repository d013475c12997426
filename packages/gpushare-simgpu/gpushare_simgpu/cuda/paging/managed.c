/* Managed memory: prefetch, advice, and attributes of a range. */
#include "cuda/memory/memory.h"
#include "cuda/driver/ptsz.h"
#include "cuda/streams/call_lock.h"
#include "cuda/streams/stream.h"

#define HOST_BIT 31

/* Return a device, CU_DEVICE_CPU, or CU_DEVICE_INVALID for an invalid location. */
static int place_of(CUmemLocation location) {
    switch (location.type) {
    case LOCATION_DEVICE: return device_exists(location.id) ? location.id : CU_DEVICE_INVALID;
    case LOCATION_HOST:
    case LOCATION_HOST_NUMA:
    case LOCATION_HOST_NUMA_CURRENT: return CU_DEVICE_CPU;
    default: return CU_DEVICE_INVALID;
    }
}

/* Whether the range is managed memory in a single allocation. */
static int is_managed(uint64_t address, uint64_t size) {
    pthread_mutex_lock(&memory_lock);
    struct allocation *allocation = allocation_find(address);
    int managed = allocation && allocation->kind == KIND_MANAGED && size > 0 &&
                  size <= allocation->span.base + allocation->span.size - address;
    pthread_mutex_unlock(&memory_lock);
    return managed;
}

static CUresult prefetch_to(CUdeviceptr address, size_t size, int place, CUstream handle) {
    LOCKABLE();
    struct stream *stream;
    CUresult error = stream_resolve(handle, &stream);
    if (error) return error;
    REQUIRE(place != CU_DEVICE_INVALID, CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(is_managed(address, size), CUDA_ERROR_INVALID_VALUE);
    return stream_put(stream, &(struct operation){.kind = OPERATION_PREFETCH, .prefetch = {address, size, place}},
                      NULL);
}

static CUresult prefetch(CUdeviceptr address, size_t size, CUdevice device, CUstream stream) {
    return prefetch_to(address, size, device == CU_DEVICE_CPU || device_exists(device) ? device : CU_DEVICE_INVALID,
                       stream);
}

static CUresult prefetch_v2(CUdeviceptr address, size_t size, CUmemLocation location, unsigned flags, CUstream stream) {
    REQUIRE(flags == 0, CUDA_ERROR_INVALID_VALUE);
    return prefetch_to(address, size, place_of(location), stream);
}

LAST_IS_STREAM(cuMemPrefetchAsync, prefetch, (CUdeviceptr address, size_t size, CUdevice device, CUstream stream),
               address, size, device)
LAST_IS_STREAM(cuMemPrefetchAsync_v2, prefetch_v2,
               (CUdeviceptr address, size_t size, CUmemLocation location, unsigned flags, CUstream stream), address,
               size, location, flags)

static CUresult prefetch_batch(CUdeviceptr *addresses, size_t *sizes, size_t count, CUmemLocation *locations,
                               size_t *indices, size_t location_count, unsigned long long flags, CUstream stream) {
    REQUIRE_INIT();
    REQUIRE(addresses && sizes && count && locations && indices && location_count && flags == 0 && indices[0] == 0,
            CUDA_ERROR_INVALID_VALUE);
    size_t which = 0;
    for (size_t i = 0; i < count; i++) {
        /* each location applies from its index to the next location's index */
        while (which + 1 < location_count && indices[which + 1] <= i) which++;
        CUresult error = prefetch_to(addresses[i], sizes[i], place_of(locations[which]), stream);
        if (error) return error;
    }
    return CUDA_SUCCESS;
}

LAST_IS_STREAM(cuMemPrefetchBatchAsync, prefetch_batch,
               (CUdeviceptr * addresses, size_t *sizes, size_t count, CUmemLocation *locations, size_t *indices,
                size_t location_count, unsigned long long flags, CUstream stream),
               addresses, sizes, count, locations, indices, location_count, flags)

/* Advice is stored and returned; it does not change where pages go. */
static void advise_page(struct page *page, CUmem_advise advice, int place) {
    uint32_t bit = 1u << (place == CU_DEVICE_CPU ? HOST_BIT : place);
    switch (advice) {
    case ADVISE_SET_READ_MOSTLY: page->read_mostly = 1; break;
    case ADVISE_UNSET_READ_MOSTLY: page->read_mostly = 0; break;
    case ADVISE_SET_PREFERRED_LOCATION: page->preferred = (int8_t)place; break;
    case ADVISE_UNSET_PREFERRED_LOCATION: page->preferred = CU_DEVICE_INVALID; break;
    case ADVISE_SET_ACCESSED_BY: page->accessed_by |= bit; break;
    case ADVISE_UNSET_ACCESSED_BY: page->accessed_by &= ~bit; break;
    }
}

static CUresult advise(CUdeviceptr address, size_t size, CUmem_advise advice, int place) {
    LOCKABLE();
    REQUIRE(advice >= ADVISE_SET_READ_MOSTLY && advice <= ADVISE_UNSET_ACCESSED_BY, CUDA_ERROR_INVALID_VALUE);
    int needs_place = advice == ADVISE_SET_PREFERRED_LOCATION || advice >= ADVISE_SET_ACCESSED_BY;
    REQUIRE(!needs_place || place != CU_DEVICE_INVALID, CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(is_managed(address, size), CUDA_ERROR_INVALID_VALUE);
    uint64_t length = driver.state->settings.page;
    pthread_mutex_lock(&memory_lock);
    for (uint64_t at = address / length * length; at < address + size; at += length) {
        struct region *region = region_find(at);
        if (region)
            advise_page(&region->pages[(at - region->span.base) / length], advice, place < CU_DEVICE_CPU ? 0 : place);
    }
    pthread_mutex_unlock(&memory_lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAdvise(CUdeviceptr address, size_t size, CUmem_advise advice, CUdevice device) {
    REQUIRE_INIT();
    return advise(address, size, advice, device == CU_DEVICE_CPU || device_exists(device) ? device : CU_DEVICE_INVALID);
}

EXPORT CUresult cuMemAdvise_v2(CUdeviceptr address, size_t size, CUmem_advise advice, CUmemLocation location) {
    REQUIRE_INIT();
    return advise(address, size, advice, place_of(location));
}

/* Return a value that applies to the whole range, or `mixed` if pages differ. */
static int common(uint64_t address, uint64_t size, int (*value)(const struct page *), int mixed) {
    uint64_t length = driver.state->settings.page;
    int result = mixed, first = 1;
    pthread_mutex_lock(&memory_lock);
    for (uint64_t at = address / length * length; at < address + size; at += length) {
        struct region *region = region_find(at);
        int now = region ? value(&region->pages[(at - region->span.base) / length]) : mixed;
        if (!first && now != result) {
            result = mixed;
            break;
        }
        result = now;
        first = 0;
    }
    pthread_mutex_unlock(&memory_lock);
    return result;
}

static int read_mostly(const struct page *page) {
    return page->read_mostly;
}

static int preferred(const struct page *page) {
    return page->preferred;
}

static int prefetched(const struct page *page) {
    return page->prefetched;
}

static int type_of_place(int place) {
    return place == CU_DEVICE_CPU ? LOCATION_HOST : place >= 0 ? LOCATION_DEVICE : LOCATION_INVALID;
}

static uint32_t accessors(uint64_t address, uint64_t size) {
    uint64_t length = driver.state->settings.page;
    uint32_t all = ~0u;
    pthread_mutex_lock(&memory_lock);
    for (uint64_t at = address / length * length; at < address + size; at += length) {
        struct region *region = region_find(at);
        all &= region ? region->pages[(at - region->span.base) / length].accessed_by : 0;
    }
    pthread_mutex_unlock(&memory_lock);
    return all;
}

static CUresult tell_accessors(int *out, size_t room, uint64_t address, uint64_t size) {
    uint32_t all = accessors(address, size);
    size_t count = 0;
    for (int device = -1; device < driver.devices; device++)
        if ((all & (1u << (device < 0 ? HOST_BIT : device))) && count < room) out[count++] = device;
    while (count < room) out[count++] = CU_DEVICE_INVALID;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRangeGetAttribute(void *data, size_t data_size, CUmem_range_attribute attribute,
                                       CUdeviceptr address, size_t size) {
    REQUIRE_INIT();
    REQUIRE(data && data_size >= sizeof(int) && data_size % sizeof(int) == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(is_managed(address, size), CUDA_ERROR_INVALID_VALUE);
    int *out = data;
    switch (attribute) {
    case RANGE_READ_MOSTLY: *out = common(address, size, read_mostly, 0); return CUDA_SUCCESS;
    case RANGE_PREFERRED_LOCATION:
    case RANGE_PREFERRED_LOCATION_ID: *out = common(address, size, preferred, CU_DEVICE_INVALID); return CUDA_SUCCESS;
    case RANGE_LAST_PREFETCH_LOCATION:
    case RANGE_LAST_PREFETCH_LOCATION_ID:
        *out = common(address, size, prefetched, CU_DEVICE_INVALID);
        return CUDA_SUCCESS;
    case RANGE_PREFERRED_LOCATION_TYPE:
        *out = type_of_place(common(address, size, preferred, CU_DEVICE_INVALID));
        return CUDA_SUCCESS;
    case RANGE_LAST_PREFETCH_LOCATION_TYPE:
        *out = type_of_place(common(address, size, prefetched, CU_DEVICE_INVALID));
        return CUDA_SUCCESS;
    case RANGE_ACCESSED_BY: return tell_accessors(out, data_size / sizeof(int), address, size);
    }
    return CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemRangeGetAttributes(void **data, size_t *sizes, CUmem_range_attribute *attributes, size_t count,
                                        CUdeviceptr address, size_t size) {
    REQUIRE_INIT();
    REQUIRE(data && sizes && attributes, CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++) {
        CUresult error = cuMemRangeGetAttribute(data[i], sizes[i], attributes[i], address, size);
        if (error) return error;
    }
    return CUDA_SUCCESS;
}

/* Attaching to a stream or to the host only matters if host and device must not access the same pages, which is allowed
 * here. */
static CUresult attach(CUdeviceptr address, size_t length, unsigned flags, CUstream handle) {
    LOCKABLE();
    struct stream *stream;
    CUresult error = stream_resolve(handle, &stream);
    if (error) return error;
    REQUIRE(flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST || flags == CU_MEM_ATTACH_SINGLE,
            CUDA_ERROR_INVALID_VALUE);
    REQUIRE(is_managed(address, length ? length : 1), CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamAttachMemAsync(CUstream stream, CUdeviceptr address, size_t length, unsigned flags) {
    return attach(address, length, flags, stream);
}

EXPORT CUresult cuStreamAttachMemAsync_ptsz(CUstream stream, CUdeviceptr address, size_t length, unsigned flags) {
    return attach(address, length, flags, PER_THREAD(stream));
}
