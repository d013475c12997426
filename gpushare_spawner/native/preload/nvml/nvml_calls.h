/* NVML's functions that are wrapped, and those that are only called. The file that includes this defines WRAPPED and
   CALLED. */
WRAPPED(nvmlDeviceGetCount, (unsigned *count))
WRAPPED(nvmlDeviceGetCount_v2, (unsigned *count))
WRAPPED(nvmlDeviceGetHandleByIndex, (unsigned index, nvmlDevice *device))
WRAPPED(nvmlDeviceGetHandleByIndex_v2, (unsigned index, nvmlDevice *device))
WRAPPED(nvmlDeviceGetIndex, (nvmlDevice device, unsigned *index))
WRAPPED(nvmlDeviceGetMemoryInfo, (nvmlDevice device, nvmlMemory *memory))
WRAPPED(nvmlDeviceGetMemoryInfo_v2, (nvmlDevice device, nvmlMemory_v2 *memory))
WRAPPED(nvmlDeviceGetUtilizationRates, (nvmlDevice device, nvmlUtilization *rates))
WRAPPED(nvmlDeviceGetComputeRunningProcesses, (nvmlDevice device, unsigned *count, nvmlProcess_v1 *out))
WRAPPED(nvmlDeviceGetComputeRunningProcesses_v2, (nvmlDevice device, unsigned *count, nvmlProcess_v2 *out))
WRAPPED(nvmlDeviceGetComputeRunningProcesses_v3, (nvmlDevice device, unsigned *count, nvmlProcess_v2 *out))
WRAPPED(nvmlDeviceGetGraphicsRunningProcesses, (nvmlDevice device, unsigned *count, nvmlProcess_v1 *out))
WRAPPED(nvmlDeviceGetGraphicsRunningProcesses_v2, (nvmlDevice device, unsigned *count, nvmlProcess_v2 *out))
WRAPPED(nvmlDeviceGetGraphicsRunningProcesses_v3, (nvmlDevice device, unsigned *count, nvmlProcess_v2 *out))
WRAPPED(nvmlDeviceGetMPSComputeRunningProcesses, (nvmlDevice device, unsigned *count, nvmlProcess_v1 *out))
WRAPPED(nvmlDeviceGetMPSComputeRunningProcesses_v2, (nvmlDevice device, unsigned *count, nvmlProcess_v2 *out))
WRAPPED(nvmlDeviceGetMPSComputeRunningProcesses_v3, (nvmlDevice device, unsigned *count, nvmlProcess_v2 *out))
WRAPPED(nvmlDeviceGetRunningProcessDetailList, (nvmlDevice device, nvmlProcessDetails *list))
WRAPPED(nvmlDeviceGetProcessUtilization,
        (nvmlDevice device, nvmlProcessUse *out, unsigned *count, unsigned long long seen))
WRAPPED(nvmlDeviceGetProcessesUtilizationInfo, (nvmlDevice device, nvmlProcessUses *list))
WRAPPED(nvmlDeviceGetAccountingPids, (nvmlDevice device, unsigned *count, void *out))
WRAPPED(nvmlDeviceGetAccountingStats, (nvmlDevice device, unsigned pid, void *out))
WRAPPED(nvmlDeviceGetAccountingStats_v2, (nvmlDevice device, void *out))
WRAPPED(nvmlDeviceGetEncoderSessions, (nvmlDevice device, unsigned *count, void *out))
WRAPPED(nvmlDeviceGetFBCSessions, (nvmlDevice device, unsigned *count, void *out))
CALLED(nvmlDeviceGetUUID, (nvmlDevice device, char *uuid, unsigned length))
CALLED(nvmlDeviceGetHandleByUUID, (const char *uuid, nvmlDevice *device))

#undef WRAPPED
#undef CALLED
