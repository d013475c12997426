/* The part of NVML's binary interface that the simulator implements, taken from the published API reference. */
#ifndef SIMGPU_NVML_API_H
#define SIMGPU_NVML_API_H

#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

typedef enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_FUNCTION_NOT_FOUND = 13,
    NVML_ERROR_IN_USE = 19,
    NVML_ERROR_INSUFFICIENT_RESOURCES = 23,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_ERROR_UNKNOWN = 999,
} nvmlReturn_t;

typedef struct device *nvmlDevice_t;

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned gpu, memory; /* percent */
} nvmlUtilization_t;

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} nvmlPciInfo_t;

typedef struct {
    unsigned pid;
    unsigned long long used;
} nvmlProcessInfo_v1_t;

typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
} nvmlProcessInfo_t; /* for the calls with _v2 and _v3 */

typedef struct {
    unsigned pid;
    unsigned long long at;                 /* microseconds of CLOCK_REALTIME */
    unsigned sm, memory, encoder, decoder; /* percent */
} nvmlProcessUtilizationSample_t;

typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
    unsigned long long used_protected;
} nvmlProcessDetail_v1_t;

typedef struct {
    unsigned version, mode, count;
    nvmlProcessDetail_v1_t *entries;
} nvmlProcessDetailList_v1_t;

typedef struct {
    unsigned long long at; /* microseconds of CLOCK_REALTIME */
    unsigned pid, sm, memory, encoder, decoder, jpeg, optical_flow;
} nvmlProcessUtilizationInfo_v1_t;

typedef struct {
    unsigned version, count;
    unsigned long long seen;
    nvmlProcessUtilizationInfo_v1_t *entries;
} nvmlProcessesUtilizationInfo_v1_t;

typedef struct {
    unsigned version, sensor;
    int temperature;
} nvmlTemperature_t;

#define GPU_INSTANCE_PROFILES 18 /* NVML_GPU_INSTANCE_PROFILE_COUNT */
#define PROFILE_NAME_LENGTH   96

/* The properties of an instance of a profile, common to all versions of the profile's struct. */
typedef struct {
    unsigned slices, instances, multiprocessors, copy_engines, decoders, encoders, jpegs, ofas;
} nvmlProfileParts_t;

typedef struct {
    unsigned id, p2p;
    nvmlProfileParts_t parts;
    unsigned long long memory_mib;
} nvmlGpuInstanceProfileInfo_t;

typedef struct {
    unsigned version, id, p2p;
    nvmlProfileParts_t parts;
    unsigned long long memory_mib;
    char name[PROFILE_NAME_LENGTH];
} nvmlGpuInstanceProfileInfo_v2_t;

typedef struct {
    unsigned version, id;
    nvmlProfileParts_t parts;
    unsigned long long memory_mib;
    char name[PROFILE_NAME_LENGTH];
    unsigned capabilities;
} nvmlGpuInstanceProfileInfo_v3_t;

typedef struct {
    unsigned start, size; /* memory slices */
} nvmlGpuInstancePlacement_t;

typedef void *nvmlGpuInstance_t;
typedef void *nvmlComputeInstance_t;

typedef struct {
    nvmlDevice_t device;
    unsigned id, profile_id;
    nvmlGpuInstancePlacement_t placement;
} nvmlGpuInstanceInfo_t;

typedef struct {
    nvmlDevice_t device;
    nvmlGpuInstance_t gpu_instance;
    unsigned id, profile_id;
    nvmlGpuInstancePlacement_t placement; /* compute slices of the GPU instance */
} nvmlComputeInstanceInfo_t;

/* The attributes of a MIG device handle. */
typedef struct {
    unsigned multiprocessors, copy_engines, decoders, encoders, jpegs, ofas, gpu_slices, compute_slices;
    unsigned long long memory_mib;
} nvmlDeviceAttributes_t;

#endif
