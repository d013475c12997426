/* Which GPUs there are: the session's. By UUID, serial number or bus NVML finds the others too, as the driver has
   them. */
#include "nvml/numbering.h"
#include "nvml/wrapped_nvml.h"

static nvmlReturn counted(nvmlReturn result, unsigned *count) {
    int shown = result == NVML_SUCCESS && figures_wanted() ? numbering_count() : -1;
    if (shown >= 0) *count = (unsigned)shown;
    return result;
}

nvmlReturn wrapped_nvmlDeviceGetCount(unsigned *count) {
    if (!NVML_HAS(nvmlDeviceGetCount)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    return counted(real_nvml()->nvmlDeviceGetCount(count), count);
}
EXPORTED(nvmlDeviceGetCount);

nvmlReturn wrapped_nvmlDeviceGetCount_v2(unsigned *count) {
    if (!NVML_HAS(nvmlDeviceGetCount_v2)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    return counted(real_nvml()->nvmlDeviceGetCount_v2(count), count);
}
EXPORTED(nvmlDeviceGetCount_v2);

static nvmlReturn by_index(nvmlReturn (*call)(unsigned, nvmlDevice *), unsigned index, nvmlDevice *device) {
    int shown = device && figures_wanted() ? numbering_count() : -1;
    if (shown < 0) return call(index, device);
    /* the driver's answer to an index that no GPU has */
    return index < (unsigned)shown ? real_nvml_handle(numbering_uuid((int)index), device) : call(~0u, device);
}

nvmlReturn wrapped_nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice *device) {
    if (!NVML_HAS(nvmlDeviceGetHandleByIndex)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    return by_index(real_nvml()->nvmlDeviceGetHandleByIndex, index, device);
}
EXPORTED(nvmlDeviceGetHandleByIndex);

nvmlReturn wrapped_nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice *device) {
    if (!NVML_HAS(nvmlDeviceGetHandleByIndex_v2)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    return by_index(real_nvml()->nvmlDeviceGetHandleByIndex_v2, index, device);
}
EXPORTED(nvmlDeviceGetHandleByIndex_v2);

nvmlReturn wrapped_nvmlDeviceGetIndex(nvmlDevice device, unsigned *index) {
    unsigned char uuid[16];
    if (!NVML_HAS(nvmlDeviceGetIndex)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    nvmlReturn result = real_nvml()->nvmlDeviceGetIndex(device, index);
    bool ours = result == NVML_SUCCESS && figures_wanted() && real_nvml_uuid(device, uuid);
    int shown = ours ? numbering_index(uuid) : -1;
    if (shown >= 0) *index = (unsigned)shown;
    return result;
}
EXPORTED(nvmlDeviceGetIndex);
