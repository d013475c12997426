/* Lookup and identification of GPUs. */
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "common/uuid.h"
#include "nvml/library.h"

static nvmlReturn_t tell(char *out, unsigned length, const char *text) {
    REQUIRE(length > strlen(text), NVML_ERROR_INSUFFICIENT_SIZE);
    snprintf(out, length, "%s", text);
    return NVML_SUCCESS;
}

static void device_uuid(int number, char text[UUID_TEXT]) {
    const struct state *state = nvml_state();
    uuid_text(mig_is_instance(state, number) ? "MIG" : "GPU", state->gpus[number].uuid, text);
}

static void serial_text(int gpu, char text[24]) {
    const uint8_t *u = nvml_state()->gpus[gpu].uuid;
    snprintf(text, 24, "1%010u", (unsigned)(u[12] << 24 | u[13] << 16 | u[14] << 8 | u[15]));
}

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    REQUIRE(nvml_state(), NVML_ERROR_UNINITIALIZED);
    REQUIRE(count, NVML_ERROR_INVALID_ARGUMENT);
    *count = (unsigned)nvml_state()->settings.devices;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCount(unsigned *count) {
    return nvmlDeviceGetCount_v2(count);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    REQUIRE(nvml_state(), NVML_ERROR_UNINITIALIZED);
    REQUIRE(device && index < nvml_state()->settings.devices, NVML_ERROR_INVALID_ARGUMENT);
    *device = nvml_handle((int)index);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *device) {
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    REQUIRE(nvml_state(), NVML_ERROR_UNINITIALIZED);
    REQUIRE(device && uuid, NVML_ERROR_INVALID_ARGUMENT);
    for (int number = 0; number < (int)nvml_state()->numbers; number++) {
        char text[UUID_TEXT];
        if (nvml_number(nvml_handle(number)) < 0) continue;
        device_uuid(number, text);
        if (strcasecmp(text, uuid) == 0) {
            *device = nvml_handle(number);
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device) {
    REQUIRE(nvml_state(), NVML_ERROR_UNINITIALIZED);
    REQUIRE(device && serial, NVML_ERROR_INVALID_ARGUMENT);
    for (int gpu = 0; gpu < (int)nvml_state()->settings.devices; gpu++) {
        char text[24];
        serial_text(gpu, text);
        if (strcmp(text, serial) == 0) {
            *device = nvml_handle(gpu);
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *text, nvmlDevice_t *device) {
    unsigned domain, bus, slot, function = 0;
    REQUIRE(nvml_state(), NVML_ERROR_UNINITIALIZED);
    REQUIRE(device && text, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(sscanf(text, "%x:%x:%x.%x", &domain, &bus, &slot, &function) >= 3, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(domain == 0 && slot == 0 && function == 0 && bus >= 1 && bus <= nvml_state()->settings.devices,
            NVML_ERROR_NOT_FOUND);
    *device = nvml_handle((int)bus - 1);
    return NVML_SUCCESS;
}

/* For an instance: its index on its GPU. */
EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index) {
    REQUIRE_DEVICE(device, index);
    int number = nvml_number(device);
    *index = (unsigned)(mig_is_instance(nvml_state(), number) ? mig_index(nvml_state(), number) : number);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned *minor) {
    REQUIRE_GPU(device, minor);
    *minor = (unsigned)nvml_number(device);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length) {
    char text[MIG_NAME];
    REQUIRE_DEVICE(device, name);
    mig_name(nvml_state(), nvml_number(device), text);
    return tell(name, length, text);
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length) {
    char text[UUID_TEXT];
    REQUIRE_DEVICE(device, uuid);
    device_uuid(nvml_number(device), text);
    return tell(uuid, length, text);
}

EXPORT nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned length) {
    char text[24];
    REQUIRE_GPU(device, serial);
    serial_text(nvml_number(device), text);
    return tell(serial, length, text);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    REQUIRE_GPU(device, pci);
    unsigned bus = (unsigned)nvml_number(device) + 1;
    *pci = (nvmlPciInfo_t){.bus = bus, .pci_device_id = 0x1db110de, .pci_subsystem_id = 0x121210de};
    snprintf(pci->bus_id_legacy, sizeof pci->bus_id_legacy, "0000:%02X:00.0", bus & 0xff);
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", bus & 0xff);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetBoardId(nvmlDevice_t device, unsigned *board) {
    REQUIRE_GPU(device, board);
    *board = ((unsigned)nvml_number(device) + 1) << 8;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceOnSameBoard(nvmlDevice_t first, nvmlDevice_t second, int *same) {
    REQUIRE_GPU(first, same);
    REQUIRE(nvml_number(second) >= 0, NVML_ERROR_INVALID_ARGUMENT);
    *same = first == second;
    return NVML_SUCCESS;
}
