#include "cuda/streams/context.h"

#include <stdlib.h>
#include <string.h>

#include "cuda/streams/call_lock.h"
#include "cuda/streams/capture.h"
#include "cuda/streams/context_memory.h"
#include "cuda/memory/memory.h"
#include "cuda/streams/stream.h"

#define DEPTH 64 /* depth of a thread's stack of contexts */

static __thread struct context *stack[DEPTH];
static __thread int depth;

static pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER;
static struct context *primaries[MAX_GPUS];
static struct context *contexts[MAX_CONTEXTS]; /* live ones */
static uint64_t last_id;

struct context *context_current(void) {
    return depth ? stack[depth - 1] : NULL;
}

CUresult context_check(struct context *context) {
    REQUIRE(context, CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(context->magic == CONTEXT_MAGIC, CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(!context->primary || context->retained, CUDA_ERROR_CONTEXT_IS_DESTROYED);
    return __atomic_load_n(&context->error, __ATOMIC_ACQUIRE);
}

CUresult context_require(struct context **context) {
    REQUIRE_INIT();
    *context = context_current();
    return context_check(*context);
}

/* For NVML, a process is on a GPU while it has a context there. Returns false and changes nothing if the device no
 * longer exists. */
static int show(struct context *context, int change) {
    gpu_lock(driver.state, context->gpu);
    int possible = change < 0 || device_remains(context->device);
    if (possible) driver.state->gpus[context->gpu].contexts[driver.slot] += (uint32_t)change;
    gpu_unlock(driver.state, context->gpu);
    return possible;
}

static CUresult begin(struct context *context, int device, unsigned flags, int primary) {
    *context = (struct context){
        .magic = CONTEXT_MAGIC, .device = device, .gpu = driver.gpu[device], .primary = primary, .flags = flags};
    pthread_mutex_init(&context->lock, NULL);
    context->id = context->generation = ++last_id;
    int at = 0;
    while (at < MAX_CONTEXTS && contexts[at]) at++;
    REQUIRE(at < MAX_CONTEXTS, CUDA_ERROR_OUT_OF_MEMORY);
    REQUIRE(show(context, 1), CUDA_ERROR_INVALID_DEVICE);
    CUresult error = context_memory_take(context);
    if (!error) {
        context->legacy = stream_make(context, 0, 0, STREAM_IS_LEGACY);
        if (!context->legacy) {
            context_memory_drop(context);
            error = CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    if (error) {
        show(context, -1);
        return error;
    }
    contexts[at] = context;
    return CUDA_SUCCESS;
}

/* Release the context's resources: streams after their work, then memory. With contexts_lock held, which its workers do
 * not take. */
static void end(struct context *context) {
    context_synchronize(context);
    for (int i = 0; i < MAX_CONTEXTS; i++)
        if (contexts[i] == context) contexts[i] = NULL;
    for (;;) {
        pthread_mutex_lock(&context->lock);
        struct stream *stream = context->streams;
        pthread_mutex_unlock(&context->lock);
        if (!stream) break;
        stream_unlink(stream);
        stream_release(stream);
    }
    context->legacy = NULL;
    memory_free_context(context);
    context_memory_drop(context);
    show(context, -1);
    context->error = CUDA_SUCCESS;
}

struct context *context_primary(int device) {
    struct context *context = primaries[device];
    return context && context->retained ? context : NULL;
}

CUresult context_synchronize(struct context *context) {
    /* the existing contexts, which are protected against destruction during the wait */
    size_t count = 0, held = 0;
    pthread_mutex_lock(&context->lock);
    for (struct stream *stream = context->streams; stream; stream = stream->next) count++;
    struct stream **waiting = malloc((count + 1) * sizeof *waiting);
    for (struct stream *stream = context->streams; stream && waiting; stream = stream->next) {
        stream_retain(stream);
        waiting[held++] = stream;
    }
    pthread_mutex_unlock(&context->lock);
    REQUIRE(waiting, CUDA_ERROR_OUT_OF_MEMORY);
    for (size_t i = 0; i < held; i++) {
        stream_drain(waiting[i]);
        stream_release(waiting[i]);
    }
    free(waiting);
    return __atomic_load_n(&context->error, __ATOMIC_ACQUIRE);
}

int context_idle(struct context *context) {
    int idle = 1;
    pthread_mutex_lock(&context->lock);
    for (struct stream *stream = context->streams; stream && idle; stream = stream->next) idle = stream_idle(stream);
    pthread_mutex_unlock(&context->lock);
    return idle;
}

void contexts_visit(void (*visit)(struct context *, void *), void *data) {
    pthread_mutex_lock(&contexts_lock);
    for (int i = 0; i < MAX_CONTEXTS; i++)
        if (contexts[i]) visit(contexts[i], data);
    pthread_mutex_unlock(&contexts_lock);
}

static void synchronize_one(struct context *context, void *device) {
    if (!device || context->device == *(int *)device) context_synchronize(context);
}

void device_synchronize(int device) {
    contexts_visit(synchronize_one, &device);
}

void synchronize_everything(void) {
    contexts_visit(synchronize_one, NULL);
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    LOCKABLE();
    REQUIRE_INIT();
    REQUIRE(context, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_exists(device), CUDA_ERROR_INVALID_DEVICE);
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&contexts_lock);
    if (!primaries[device]) primaries[device] = calloc(1, sizeof **primaries);
    struct context *primary = primaries[device];
    if (!primary) {
        result = CUDA_ERROR_OUT_OF_MEMORY;
    } else if (primary->retained == 0) {
        unsigned flags = primary->flags;
        result = begin(primary, device, flags, 1);
    }
    if (result == CUDA_SUCCESS) {
        primary->retained++;
        *context = primary;
    }
    pthread_mutex_unlock(&contexts_lock);
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    LOCKABLE();
    REQUIRE_INIT();
    REQUIRE(device_exists(device), CUDA_ERROR_INVALID_DEVICE);
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&contexts_lock);
    struct context *primary = primaries[device];
    if (!primary || primary->retained == 0)
        result = CUDA_ERROR_INVALID_CONTEXT;
    else if (primary->retained == 1)
        end(primary), primary->retained = 0;
    else
        primary->retained--;
    pthread_mutex_unlock(&contexts_lock);
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    LOCKABLE();
    REQUIRE_INIT();
    REQUIRE(device_exists(device), CUDA_ERROR_INVALID_DEVICE);
    pthread_mutex_lock(&contexts_lock);
    struct context *primary = primaries[device];
    if (primary && primary->retained) {
        end(primary);
        primary->retained = 0;
    }
    pthread_mutex_unlock(&contexts_lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) {
    REQUIRE_INIT();
    REQUIRE(device_exists(device), CUDA_ERROR_INVALID_DEVICE);
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&contexts_lock);
    if (!primaries[device]) primaries[device] = calloc(1, sizeof **primaries);
    if (primaries[device])
        primaries[device]->flags = flags;
    else
        result = CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_unlock(&contexts_lock);
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    REQUIRE_INIT();
    REQUIRE(device_exists(device), CUDA_ERROR_INVALID_DEVICE);
    struct context *primary = primaries[device];
    if (flags) *flags = primary ? primary->flags : 0;
    if (active) *active = primary && primary->retained > 0;
    return CUDA_SUCCESS;
}

/* the names in CUDA 7 to 10 */
EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    return cuDevicePrimaryCtxRelease_v2(device);
}

EXPORT CUresult cuDevicePrimaryCtxReset(CUdevice device) {
    return cuDevicePrimaryCtxReset_v2(device);
}

EXPORT CUresult cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned flags) {
    return cuDevicePrimaryCtxSetFlags_v2(device, flags);
}

static CUresult push(struct context *context) {
    REQUIRE(depth < DEPTH, CUDA_ERROR_OUT_OF_MEMORY);
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device) {
    LOCKABLE();
    REQUIRE_INIT();
    REQUIRE(context, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_exists(device), CUDA_ERROR_INVALID_DEVICE);
    struct context *made = calloc(1, sizeof *made);
    REQUIRE(made, CUDA_ERROR_OUT_OF_MEMORY);
    pthread_mutex_lock(&contexts_lock);
    CUresult result = begin(made, device, flags, 0);
    pthread_mutex_unlock(&contexts_lock);
    if (result)
        free(made);
    else
        result = push(made);
    if (result == CUDA_SUCCESS) *context = made;
    return result;
}

EXPORT CUresult cuCtxCreate_v3(CUcontext *context, void *affinities, int count, unsigned flags, CUdevice device) {
    REQUIRE(count == 0, CUDA_ERROR_NOT_SUPPORTED);
    return cuCtxCreate_v2(context, flags, device);
}

EXPORT CUresult cuCtxCreate_v4(CUcontext *context, void *parameters, unsigned flags, CUdevice device) {
    REQUIRE(!parameters, CUDA_ERROR_NOT_SUPPORTED);
    return cuCtxCreate_v2(context, flags, device);
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext context) {
    LOCKABLE();
    REQUIRE_INIT();
    REQUIRE(context && context->magic == CONTEXT_MAGIC && !context->primary, CUDA_ERROR_INVALID_CONTEXT);
    pthread_mutex_lock(&contexts_lock);
    end(context);
    context->magic = 0; /* stays allocated, because other threads may have it on their stacks */
    pthread_mutex_unlock(&contexts_lock);
    if (context_current() == context) depth--;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
    REQUIRE_INIT();
    REQUIRE(context && context->magic == CONTEXT_MAGIC, CUDA_ERROR_INVALID_CONTEXT);
    return push(context);
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    REQUIRE_INIT();
    REQUIRE(depth, CUDA_ERROR_INVALID_CONTEXT);
    struct context *popped = stack[--depth];
    if (context) *context = popped;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
    REQUIRE_INIT();
    if (!context) {
        depth -= depth > 0;
        return CUDA_SUCCESS;
    }
    REQUIRE(context->magic == CONTEXT_MAGIC, CUDA_ERROR_INVALID_CONTEXT);
    if (depth == 0) return push(context);
    stack[depth - 1] = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
    REQUIRE_INIT();
    REQUIRE(context, CUDA_ERROR_INVALID_VALUE);
    *context = context_current();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
    REQUIRE_INIT();
    struct context *context = context_current();
    REQUIRE(context, CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(device, CUDA_ERROR_INVALID_VALUE);
    *device = context->device;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext context) {
    REQUIRE_INIT();
    context = context ? context : context_current();
    REQUIRE(context && context->magic == CONTEXT_MAGIC, CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(device, CUDA_ERROR_INVALID_VALUE);
    *device = context->device;
    return CUDA_SUCCESS;
}

static CUresult synchronize(struct context *context) {
    LOCKABLE();
    CUresult error = context_check(context);
    if (error) return error;
    if ((error = capture_forbids_waiting(context))) return error;
    return context_synchronize(context);
}

EXPORT CUresult cuCtxSynchronize(void) {
    REQUIRE_INIT();
    return synchronize(context_current());
}

EXPORT CUresult cuCtxSynchronize_v2(CUcontext context) {
    REQUIRE_INIT();
    return synchronize(context ? context : context_current());
}

EXPORT CUresult cuCtxGetId(CUcontext context, unsigned long long *id) {
    REQUIRE_INIT();
    context = context ? context : context_current();
    REQUIRE(context && context->magic == CONTEXT_MAGIC, CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(id, CUDA_ERROR_INVALID_VALUE);
    *id = context->id;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetApiVersion(CUcontext context, unsigned *version) {
    REQUIRE_INIT();
    context = context ? context : context_current();
    REQUIRE(context && context->magic == CONTEXT_MAGIC, CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(version, CUDA_ERROR_INVALID_VALUE);
    *version = 3020;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetFlags(unsigned *flags) {
    struct context *context;
    CUresult error = context_require(&context);
    if (error) return error;
    REQUIRE(flags, CUDA_ERROR_INVALID_VALUE);
    *flags = context->flags;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetFlags(unsigned flags) {
    struct context *context;
    CUresult error = context_require(&context);
    if (!error) context->flags = flags;
    return error;
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    struct context *context;
    CUresult error = context_require(&context);
    if (error) return error;
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return CUDA_SUCCESS;
}
