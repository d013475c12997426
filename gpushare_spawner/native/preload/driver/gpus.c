#include "driver/gpus.h"

#include <string.h>

struct gpu gpus[MAX_GPUS];
int gpu_count;

void gpus_read(void) {
    int count = 0;
    if (real.cuDeviceGetCount(&count) != CUDA_SUCCESS) count = 0;
    if (count > MAX_GPUS) count = MAX_GPUS; /* additional GPUs are not arbitrated */
    for (int i = 0; i < count; i++) {
        struct gpu *gpu = &gpus[i];
        memset(gpu, 0, sizeof *gpu);
        gpu->index = i;
        int managed = 0;
        if (real.cuDeviceGet(&gpu->device, i) != CUDA_SUCCESS) gpu->device = i;
        real.cuDeviceGetUuid(&gpu->uuid, gpu->device);
        real.cuDeviceGetAttribute(&managed, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, gpu->device);
        gpu->can_manage = managed != 0;
        gpu->burst = 2; /* lanes start at 0: not active */
        gpu->gate_state = gpu->fast = 1;
        gpu->allowance = UINT64_MAX;
    }
    __atomic_store_n(&gpu_count, count, __ATOMIC_RELEASE); /* NVML's wrappers read it in other threads */
}

struct gpu *gpu_of_device(CUdevice device) {
    for (int i = 0; i < gpu_count; i++)
        if (gpus[i].device == device) return &gpus[i];
    return NULL;
}

struct gpu *gpu_current(void) {
    CUdevice device;
    if (!gpu_count || real.cuCtxGetDevice(&device) != CUDA_SUCCESS) return NULL;
    return gpu_of_device(device);
}

struct gpu *gpu_of_uuid(const unsigned char uuid[16]) {
    for (int i = 0; i < gpu_count; i++)
        if (memcmp(gpus[i].uuid.bytes, uuid, 16) == 0) return &gpus[i];
    return NULL;
}

void gpu_send(const struct gpu *gpu, struct frame frame) {
    memcpy(frame.gpu, gpu->uuid.bytes, sizeof frame.gpu);
    frame_socket_send(&frame_socket_agent, &frame);
}

RESET_IN_CHILD(gpus_reset);
void gpus_reset(void) {
    gpu_count = 0; /* the child's cuInit reads the GPUs again */
}
