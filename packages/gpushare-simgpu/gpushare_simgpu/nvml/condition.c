/* Utilization, and constants instead of sensors: the temperature and power of a GPU with that utilization. */
#include <string.h>

#include "nvml/library.h"

#define IDLE_MILLIWATTS 40000u
#define FULL_MILLIWATTS 250000u
#define IDLE_CELSIUS    34u
#define FULL_CELSIUS    72u

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization) {
    REQUIRE_UNDIVIDED(device, utilization);
    unsigned busy = nvml_busy_percent(nvml_number(device));
    *utilization = (nvmlUtilization_t){.gpu = busy, .memory = busy / 2};
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *milliwatts) {
    REQUIRE_GPU(device, milliwatts);
    *milliwatts = IDLE_MILLIWATTS + (FULL_MILLIWATTS - IDLE_MILLIWATTS) / 100 * nvml_busy_percent(nvml_number(device));
    return NVML_SUCCESS;
}

static nvmlReturn_t power_limit(nvmlDevice_t device, unsigned *milliwatts) {
    REQUIRE_GPU(device, milliwatts);
    *milliwatts = FULL_MILLIWATTS;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPowerManagementLimit(nvmlDevice_t device, unsigned *milliwatts) {
    return power_limit(device, milliwatts);
}

EXPORT nvmlReturn_t nvmlDeviceGetPowerManagementDefaultLimit(nvmlDevice_t device, unsigned *milliwatts) {
    return power_limit(device, milliwatts);
}

EXPORT nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned *milliwatts) {
    return power_limit(device, milliwatts);
}

static unsigned celsius(int gpu) {
    return IDLE_CELSIUS + (FULL_CELSIUS - IDLE_CELSIUS) * nvml_busy_percent(gpu) / 100;
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned sensor, unsigned *temperature) {
    REQUIRE_GPU(device, temperature);
    REQUIRE(sensor == 0, NVML_ERROR_INVALID_ARGUMENT);
    *temperature = celsius(nvml_number(device));
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature) {
    REQUIRE_GPU(device, temperature);
    REQUIRE(temperature->version == (sizeof *temperature | 1u << 24), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    REQUIRE(temperature->sensor == 0, NVML_ERROR_INVALID_ARGUMENT);
    temperature->temperature = (int)celsius(nvml_number(device));
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t device, unsigned *state) {
    REQUIRE_GPU(device, state);
    *state = 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetFanSpeed(nvmlDevice_t device, unsigned *percent) {
    REQUIRE_GPU(device, percent);
    return NVML_ERROR_NOT_SUPPORTED; /* cooled by the server */
}

EXPORT nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, unsigned *mode) {
    REQUIRE_GPU(device, mode);
    *mode = 1;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, unsigned *mode) {
    REQUIRE_DEVICE(device, mode);
    REQUIRE(!nvml_divided(nvml_number(device)), NVML_ERROR_NOT_SUPPORTED);
    *mode = 0; /* any number of processes */
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetDisplayMode(nvmlDevice_t device, unsigned *mode) {
    REQUIRE_GPU(device, mode);
    *mode = 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetDisplayActive(nvmlDevice_t device, unsigned *active) {
    return nvmlDeviceGetDisplayMode(device, active);
}

EXPORT nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned *current, unsigned *pending) {
    REQUIRE_GPU(device, current);
    return NVML_ERROR_NOT_SUPPORTED;
}

static nvmlReturn_t clock_mhz(nvmlDevice_t device, unsigned which, unsigned *mhz) {
    static const unsigned CLOCKS[] = {1530, 1530, 877, 1372}; /* graphics, SM, memory, video */
    REQUIRE_GPU(device, mhz);
    REQUIRE(which < sizeof CLOCKS / sizeof *CLOCKS, NVML_ERROR_INVALID_ARGUMENT);
    *mhz = CLOCKS[which];
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned which, unsigned *mhz) {
    return clock_mhz(device, which, mhz);
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned which, unsigned *mhz) {
    return clock_mhz(device, which, mhz);
}
