/* Model information of a GPU. */
#include "nvml/library.h"

/* Return a value that is the same for a GPU and its instances. */
static nvmlReturn_t same(nvmlDevice_t device, unsigned *out, unsigned value) {
    REQUIRE_DEVICE(device, out);
    *out = value;
    return NVML_SUCCESS;
}

static nvmlReturn_t constant(nvmlDevice_t device, unsigned *out, unsigned value) {
    REQUIRE_GPU(device, out);
    *out = value;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
    REQUIRE_DEVICE(device, major && minor);
    *major = 8;
    *minor = 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, unsigned *architecture) {
    return same(device, architecture, 7); /* Ampere */
}

EXPORT nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, unsigned *brand) {
    return same(device, brand, 0); /* unknown */
}

EXPORT nvmlReturn_t nvmlDeviceGetNumGpuCores(nvmlDevice_t device, unsigned *cores) {
    REQUIRE_UNDIVIDED(device, cores);
    return constant(device, cores, 5120);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryBusWidth(nvmlDevice_t device, unsigned *bits) {
    return constant(device, bits, 4096);
}

EXPORT nvmlReturn_t nvmlDeviceGetMultiGpuBoard(nvmlDevice_t device, unsigned *several) {
    return constant(device, several, 0);
}

EXPORT nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t device, unsigned *generation) {
    return constant(device, generation, 3);
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t device, unsigned *generation) {
    return constant(device, generation, 3);
}

EXPORT nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t device, unsigned *width) {
    return constant(device, width, 16);
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t device, unsigned *width) {
    return constant(device, width, 16);
}
