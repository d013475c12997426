#include "nvml/nvml.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver/gpus.h"
#include "nvml/figures.h"
#include "wrappers/reported.h"

#define DECLARED(name, parameters) nvmlReturn wrapped_##name parameters;
#define IGNORED(name, parameters)
NVML_CALLS(DECLARED, IGNORED)

/* ---- the real libnvidia-ml: `functions()->nvmlDeviceGetCount(...)` calls it ---- */

struct nvml_functions {
#define SLOT(name, parameters) nvmlReturn(*name) parameters;
    NVML_CALLS(SLOT, SLOT)
};

/* Several threads may look up the functions simultaneously. The first table stays until the process ends, because other
   threads may already read it. */
static struct nvml_functions *_Atomic loaded;
static const struct nvml_functions none;

/* Characters instead of pointers, which the dynamic linker would have to relocate in every process. */
#define NAME(name, parameters) #name "\0"
static const char names[] = NVML_CALLS(NAME, NAME);

/* Return NVML's functions; NULL for functions that NVML lacks, and for all functions before `load`. */
static const struct nvml_functions *functions(void) {
    const struct nvml_functions *table = atomic_load_explicit(&loaded, memory_order_acquire);
    return table ? table : &none;
}

/* Look up the functions in the libnvidia-ml.so.1 that the program has loaded. False while none is loaded. Any thread;
   takes no lock of this library, only the dynamic linker's. */
static bool load(void) {
    if (atomic_load_explicit(&loaded, memory_order_acquire)) return true;
    if (!libc_load()) return false;
    /* RTLD_NOLOAD: this library never loads NVML into a program that has none */
    void *library = dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_NOLOAD);
    struct nvml_functions *table = library ? malloc(sizeof *table) : NULL, *absent = NULL;
    if (table) {
        const char *name = names;
        for (size_t i = 0; i < sizeof *table / sizeof(void *); i++, name += strlen(name) + 1)
            ((void **)table)[i] = libc_dlsym(library, name);
        if (!atomic_compare_exchange_strong(&loaded, &absent, table)) free(table);
    }
    dlerror(); /* clears the error, so that the program's next dlerror() reports only its own calls */
    return table != NULL;
}

/* Whether NVML has the function. If not, the wrapper returns NVML_ERROR_FUNCTION_NOT_FOUND, because a program that is
   linked against another version may still call it. */
#define NVML_HAS(name) (load() && functions()->name)

static int hex(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

static bool uuid_text(nvmlDevice device, char text[NVML_UUID_TEXT]) {
    return functions()->nvmlDeviceGetUUID &&
           functions()->nvmlDeviceGetUUID(device, text, NVML_UUID_TEXT) == NVML_SUCCESS;
}

/* Whether this is the handle of a GPU or of a part of a GPU, and NVML is initialized. */
static bool is_device(nvmlDevice device) {
    char text[NVML_UUID_TEXT];
    return uuid_text(device, text);
}

/* Read the UUID of a GPU. False: NVML is not initialized, or this is not the handle of a whole GPU. */
static bool read_uuid(nvmlDevice device, unsigned char uuid[16]) {
    char text[NVML_UUID_TEXT] = "";
    if (!uuid_text(device, text)) return false;
    if (strncmp(text, "GPU-", 4) != 0) return false;
    const char *at = text + 4;
    for (int i = 0; i < 16; i++) {
        if (*at == '-') at++;
        int high = hex(at[0]), low = high < 0 ? -1 : hex(at[1]);
        if (low < 0) return false;
        uuid[i] = (unsigned char)(high * 16 + low);
        at += 2;
    }
    return true;
}

/* Read the handle of a GPU by its UUID. Returns NVML's result. */
static nvmlReturn read_handle(const unsigned char uuid[16], nvmlDevice *device) {
    char text[NVML_UUID_TEXT] = "GPU", *at = text + 3;
    if (!functions()->nvmlDeviceGetHandleByUUID) return NVML_ERROR_FUNCTION_NOT_FOUND;
    for (int i = 0; i < 16; i++) /* a dash before the bytes 0, 4, 6, 8 and 10 */
        at += sprintf(at, i == 0 || (i >= 4 && i <= 10 && i % 2 == 0) ? "-%02x" : "%02x", uuid[i]);
    return functions()->nvmlDeviceGetHandleByUUID(text, device);
}

/* ---- figures ---- */

/* Read the figures to show for a GPU. False: show the driver's figures and errors. */
static bool shown_figures(nvmlDevice device, struct gpu_figures *figures) {
    unsigned char uuid[16];
    return figures_enabled() && read_uuid(device, uuid) && figures_of(uuid, figures);
}

/* The same for lists of processes. For a GPU that is not the session's, and for all GPUs while the agent does not
   answer, the lists are empty, so that they do not show other users' processes. */
static bool shown_processes(nvmlDevice device, struct gpu_figures *figures) {
    if (!figures_enabled() || !is_device(device)) return false;
    if (!shown_figures(device, figures)) *figures = (struct gpu_figures){0};
    return true;
}

/* ---- GPUs ----

   For this process NVML numbers only the session's GPUs, in CUDA's order. The numbers are determined by the first call
   that needs them and never change, because a program that has counted the GPUs must not see other GPUs later. If the
   agent does not answer at that call, the driver's numbers remain. By UUID, serial number or bus, NVML also finds the
   other GPUs. */

/* Several threads may query simultaneously. The first answer stays until the process ends, because other threads may
   already read it. */
static struct numbering {
    int count;
    unsigned char uuids[MAX_GPUS][16];
} *_Atomic numbering;

/* Return the number of the session's GPUs; -1: the driver's numbers apply. */
static int shown_count(void) {
    struct numbering *fixed = atomic_load_explicit(&numbering, memory_order_acquire), *new;
    if (fixed) return fixed->count;
    if (!(new = calloc(1, sizeof *new))) return -1;
    new->count = figures_gpus(new->uuids, MAX_GPUS);
    if (atomic_compare_exchange_strong(&numbering, &fixed, new)) return new->count;
    free(new);
    return fixed->count;
}

/* Return the UUID of a GPU by its number. To be called after shown_count(). */
static const unsigned char *shown_uuid(int index) {
    return atomic_load_explicit(&numbering, memory_order_acquire)->uuids[index];
}

/* Return the number of a GPU; -1: it is not the session's. */
static int shown_index(const unsigned char uuid[16]) {
    for (int i = 0; i < shown_count(); i++)
        if (memcmp(shown_uuid(i), uuid, 16) == 0) return i;
    return -1;
}

static nvmlReturn show_count(nvmlReturn result, unsigned *count) {
    int shown = result == NVML_SUCCESS && figures_enabled() ? shown_count() : -1;
    if (shown >= 0) *count = (unsigned)shown;
    return result;
}

nvmlReturn wrapped_nvmlDeviceGetCount(unsigned *count) {
    if (!NVML_HAS(nvmlDeviceGetCount)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    return show_count(functions()->nvmlDeviceGetCount(count), count);
}
EXPORTED(nvmlDeviceGetCount);

nvmlReturn wrapped_nvmlDeviceGetCount_v2(unsigned *count) {
    if (!NVML_HAS(nvmlDeviceGetCount_v2)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    return show_count(functions()->nvmlDeviceGetCount_v2(count), count);
}
EXPORTED(nvmlDeviceGetCount_v2);

static nvmlReturn by_index(nvmlReturn (*call)(unsigned, nvmlDevice *), unsigned index, nvmlDevice *device) {
    int shown = device && figures_enabled() ? shown_count() : -1;
    if (shown < 0) return call(index, device);
    /* the driver's result for an index that no GPU has */
    return index < (unsigned)shown ? read_handle(shown_uuid((int)index), device) : call(~0u, device);
}

nvmlReturn wrapped_nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice *device) {
    if (!NVML_HAS(nvmlDeviceGetHandleByIndex)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    return by_index(functions()->nvmlDeviceGetHandleByIndex, index, device);
}
EXPORTED(nvmlDeviceGetHandleByIndex);

nvmlReturn wrapped_nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice *device) {
    if (!NVML_HAS(nvmlDeviceGetHandleByIndex_v2)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    return by_index(functions()->nvmlDeviceGetHandleByIndex_v2, index, device);
}
EXPORTED(nvmlDeviceGetHandleByIndex_v2);

nvmlReturn wrapped_nvmlDeviceGetIndex(nvmlDevice device, unsigned *index) {
    unsigned char uuid[16];
    if (!NVML_HAS(nvmlDeviceGetIndex)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    nvmlReturn result = functions()->nvmlDeviceGetIndex(device, index);
    bool whole = result == NVML_SUCCESS && figures_enabled() && read_uuid(device, uuid);
    int shown = whole ? shown_index(uuid) : -1;
    if (shown >= 0) *index = (unsigned)shown;
    return result;
}
EXPORTED(nvmlDeviceGetIndex);

/* ---- memory: the share is shown as the GPU's memory. A process that has called cuInit uses CUDA's own figures, any
   other process the agent's ---- */

struct shown_memory {
    uint64_t total, used, available;
};

static bool compute_memory(nvmlDevice device, uint64_t really_free, struct shown_memory *shown) {
    unsigned char uuid[16];
    struct gpu_figures figures;
    if (!figures_enabled() || !read_uuid(device, uuid)) return false;
    struct gpu *gpu = __atomic_load_n(&gpu_count, __ATOMIC_ACQUIRE) ? gpu_of_uuid(uuid) : NULL;
    if (gpu && reported_memory(gpu, really_free, &shown->available, &shown->total, &shown->used)) return true;
    if (!figures_of(uuid, &figures)) return false;
    shown->total = figures.total;
    shown->used = figures.used < figures.total ? figures.used : figures.total;
    shown->available = shown->total - shown->used;
    if (!figures.movable && really_free < shown->available) shown->available = really_free;
    return true;
}

nvmlReturn wrapped_nvmlDeviceGetMemoryInfo(nvmlDevice device, nvmlMemory *memory) {
    struct shown_memory shown;
    if (!NVML_HAS(nvmlDeviceGetMemoryInfo)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    nvmlReturn result = functions()->nvmlDeviceGetMemoryInfo(device, memory);
    if (result == NVML_SUCCESS && compute_memory(device, memory->free, &shown)) {
        memory->total = shown.total;
        memory->free = shown.available;
        memory->used = shown.total - shown.available; /* includes reserved memory */
    }
    return result;
}
EXPORTED(nvmlDeviceGetMemoryInfo);

nvmlReturn wrapped_nvmlDeviceGetMemoryInfo_v2(nvmlDevice device, nvmlMemory_v2 *memory) {
    struct shown_memory shown;
    if (!NVML_HAS(nvmlDeviceGetMemoryInfo_v2)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    nvmlReturn result = functions()->nvmlDeviceGetMemoryInfo_v2(device, memory);
    if (result == NVML_SUCCESS && compute_memory(device, memory->free, &shown)) {
        memory->total = shown.total;
        memory->free = shown.available;
        memory->used = shown.used;
        /* memory of other sessions, if no memory can leave the GPU */
        memory->reserved = shown.total - shown.used - shown.available;
    }
    return result;
}
EXPORTED(nvmlDeviceGetMemoryInfo_v2);

/* ---- processes: the session's processes, all as compute processes. Other processes that NVML lists are not shown,
   because NVML does not indicate which of them belong to the session ---- */

/* Write a list of processes by NVML's convention: `count` is the capacity of `out`, which may be NULL if the capacity
   is 0, and becomes the number of processes. `put` writes an entry. */
static nvmlReturn list_processes(const struct gpu_figures *figures, unsigned *count, void *out,
                                 void (*put)(void *out, unsigned at, const struct process_figures *process)) {
    unsigned processes = (unsigned)figures->processes, room = *count;
    if (room && !out) return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned i = 0; i < processes && i < room; i++) put(out, i, &figures->process[i]);
    *count = processes;
    return processes > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

static void put_v1(void *out, unsigned at, const struct process_figures *process) {
    ((nvmlProcess_v1 *)out)[at] = (nvmlProcess_v1){.pid = process->pid, .used = process->bytes};
}

static void put_v2(void *out, unsigned at, const struct process_figures *process) {
    ((nvmlProcess_v2 *)out)[at] = (nvmlProcess_v2){
        .pid = process->pid, .used = process->bytes, .gpu_instance = NVML_NO_ID, .compute_instance = NVML_NO_ID};
}

static void put_detail(void *out, unsigned at, const struct process_figures *process) {
    ((nvmlProcessDetail *)out)[at] = (nvmlProcessDetail){.pid = process->pid,
                                                         .used = process->bytes,
                                                         .gpu_instance = NVML_NO_ID,
                                                         .compute_instance = NVML_NO_ID,
                                                         .used_protected = NVML_NO_VALUE};
}

#define LISTS(name, type, put, compute)                                                                                \
    nvmlReturn wrapped_##name(nvmlDevice device, unsigned *count, type *out) {                                         \
        struct gpu_figures figures;                                                                                    \
        if (!NVML_HAS(name)) return NVML_ERROR_FUNCTION_NOT_FOUND;                                                     \
        if (!count || !shown_processes(device, &figures)) return functions()->name(device, count, out);                \
        if (!(compute)) figures.processes = 0;                                                                         \
        return list_processes(&figures, count, out, put);                                                              \
    }                                                                                                                  \
    EXPORTED(name);

LISTS(nvmlDeviceGetComputeRunningProcesses, nvmlProcess_v1, put_v1, true)
LISTS(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcess_v2, put_v2, true)
LISTS(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcess_v2, put_v2, true)
LISTS(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcess_v1, put_v1, false)
LISTS(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcess_v2, put_v2, false)
LISTS(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcess_v2, put_v2, false)
LISTS(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcess_v1, put_v1, false)
LISTS(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcess_v2, put_v2, false)
LISTS(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcess_v2, put_v2, false)

nvmlReturn wrapped_nvmlDeviceGetRunningProcessDetailList(nvmlDevice device, nvmlProcessDetails *list) {
    struct gpu_figures figures;
    if (!NVML_HAS(nvmlDeviceGetRunningProcessDetailList)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    if (!list || list->version != NVML_VERSION_OF(nvmlProcessDetails, 1) || list->mode > NVML_MODE_MPS ||
        !shown_processes(device, &figures))
        return functions()->nvmlDeviceGetRunningProcessDetailList(device, list);
    if (list->mode != NVML_MODE_COMPUTE) figures.processes = 0;
    return list_processes(&figures, &list->count, list->entries, put_detail);
}
EXPORTED(nvmlDeviceGetRunningProcessDetailList);

/* Return NVML's result for an empty list. For other lists with pids: finished processes, and processes that encode or
   capture video. */
static nvmlReturn empty(nvmlReturn (*list)(nvmlDevice, unsigned *, void *), nvmlDevice device) {
    unsigned long long scratch; /* not written, because the capacity is 0 */
    unsigned count = 0;
    nvmlReturn result = list(device, &count, &scratch);
    return result == NVML_ERROR_INSUFFICIENT_SIZE ? NVML_SUCCESS : result;
}

#define EMPTY(name)                                                                                                    \
    nvmlReturn wrapped_##name(nvmlDevice device, unsigned *count, void *out) {                                         \
        if (!NVML_HAS(name)) return NVML_ERROR_FUNCTION_NOT_FOUND;                                                     \
        if (!count || !figures_enabled()) return functions()->name(device, count, out);                                \
        nvmlReturn result = empty(functions()->name, device);                                                          \
        if (result == NVML_SUCCESS) *count = 0;                                                                        \
        return result;                                                                                                 \
    }                                                                                                                  \
    EXPORTED(name);

EMPTY(nvmlDeviceGetAccountingPids)
EMPTY(nvmlDeviceGetEncoderSessions)
EMPTY(nvmlDeviceGetFBCSessions)

/* Return the driver's result for a process without a record. */
static nvmlReturn not_accounted(nvmlDevice device) {
    nvmlReturn result = functions()->nvmlDeviceGetAccountingPids
                            ? empty(functions()->nvmlDeviceGetAccountingPids, device)
                            : NVML_ERROR_FUNCTION_NOT_FOUND;
    return result == NVML_SUCCESS ? NVML_ERROR_NOT_FOUND : result;
}

nvmlReturn wrapped_nvmlDeviceGetAccountingStats(nvmlDevice device, unsigned pid, void *out) {
    if (!NVML_HAS(nvmlDeviceGetAccountingStats)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    if (!out || !figures_enabled()) return functions()->nvmlDeviceGetAccountingStats(device, pid, out);
    return not_accounted(device);
}
EXPORTED(nvmlDeviceGetAccountingStats);

nvmlReturn wrapped_nvmlDeviceGetAccountingStats_v2(nvmlDevice device, void *out) {
    if (!NVML_HAS(nvmlDeviceGetAccountingStats_v2)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    if (!out || !figures_enabled()) return functions()->nvmlDeviceGetAccountingStats_v2(device, out);
    return not_accounted(device);
}
EXPORTED(nvmlDeviceGetAccountingStats_v2);

/* ---- use: only the session's, in percent of the whole GPU's time over the last second ---- */

nvmlReturn wrapped_nvmlDeviceGetUtilizationRates(nvmlDevice device, nvmlUtilization *rates) {
    struct gpu_figures figures;
    if (!NVML_HAS(nvmlDeviceGetUtilizationRates)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    nvmlReturn result = functions()->nvmlDeviceGetUtilizationRates(device, rates);
    if (result != NVML_SUCCESS || !shown_figures(device, &figures) || !figures.with_use) return result;
    /* the session's part of the memory use is not measured; assume that it is proportional to the time */
    unsigned whole = rates->gpu > figures.percent ? rates->gpu : figures.percent;
    rates->memory = whole ? rates->memory * figures.percent / whole : 0;
    rates->gpu = figures.percent;
    return result;
}
EXPORTED(nvmlDeviceGetUtilizationRates);

/* List the processes that used the GPU, if the figures are newer than `seen` (microseconds since the epoch). Returns
   their number. */
static unsigned list_active(const struct gpu_figures *figures, unsigned long long seen,
                            const struct process_figures *active[FIGURES_PROCESSES]) {
    unsigned count = 0;
    for (int i = 0; figures->at > seen && i < figures->processes; i++)
        if (figures->process[i].percent) active[count++] = &figures->process[i];
    return count;
}

/* Set the number of entries by NVML's convention: no entry gives NVML_ERROR_NOT_FOUND; a buffer that is NULL or too
   small gives a size that always suffices. */
static nvmlReturn set_count(unsigned entries, unsigned *count, const void *out) {
    unsigned room = out ? *count : 0;
    if (!entries) return NVML_ERROR_NOT_FOUND;
    *count = room < entries ? FIGURES_PROCESSES : entries;
    return room < entries ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

nvmlReturn wrapped_nvmlDeviceGetProcessUtilization(nvmlDevice device, nvmlProcessUse *out, unsigned *count,
                                                   unsigned long long seen) {
    struct gpu_figures figures;
    const struct process_figures *active[FIGURES_PROCESSES];
    if (!NVML_HAS(nvmlDeviceGetProcessUtilization)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    if (!count || !shown_processes(device, &figures))
        return functions()->nvmlDeviceGetProcessUtilization(device, out, count, seen);
    unsigned entries = list_active(&figures, seen, active);
    nvmlReturn result = set_count(entries, count, out);
    for (unsigned i = 0; result == NVML_SUCCESS && i < entries; i++)
        out[i] = (nvmlProcessUse){.pid = active[i]->pid, .at = figures.at, .sm = active[i]->percent};
    return result;
}
EXPORTED(nvmlDeviceGetProcessUtilization);

nvmlReturn wrapped_nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice device, nvmlProcessUses *list) {
    struct gpu_figures figures;
    const struct process_figures *active[FIGURES_PROCESSES];
    if (!NVML_HAS(nvmlDeviceGetProcessesUtilizationInfo)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    if (!list || list->version != NVML_VERSION_OF(nvmlProcessUses, 1) || !shown_processes(device, &figures))
        return functions()->nvmlDeviceGetProcessesUtilizationInfo(device, list);
    unsigned entries = list_active(&figures, list->last_seen, active);
    nvmlReturn result = set_count(entries, &list->count, list->entries);
    for (unsigned i = 0; result == NVML_SUCCESS && i < entries; i++)
        list->entries[i] = (nvmlProcessUseDetail){.at = figures.at, .pid = active[i]->pid, .sm = active[i]->percent};
    return result;
}
EXPORTED(nvmlDeviceGetProcessesUtilizationInfo);

/* ---- from NVML's functions to their wrappers ---- */

void *nvml_find(void *pointer, const char *name) {
    if (!figures_enabled() || !load()) return pointer;
#define COMPARE(function, parameters)                                                                                  \
    if (strcmp(name, #function) == 0)                                                                                  \
        return pointer == (void *)functions()->function ? (void *)wrapped_##function : pointer;
    NVML_CALLS(COMPARE, IGNORED)
    return pointer;
}
