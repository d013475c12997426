#include "cuda/streams/execute.h"

#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/futex.h"
#include "cuda/kernels/compute.h"
#include "cuda/streams/event.h"
#include "cuda/streams/graph.h"
#include "cuda/kernels/kernels.h"
#include "cuda/memory/memory.h"
#include "cuda/memory/pool.h"

static void set_memory(const void *argument) {
    const struct operation *operation = argument;
    for (uint64_t row = 0; row < operation->set.height; row++) {
        char *at = (char *)(uintptr_t)(operation->set.dst + row * operation->set.pitch);
        uint64_t width = operation->set.width;
        if (operation->set.element == 1) {
            memset(at, (int)operation->set.value, width);
        } else if (operation->set.element == 2) {
            for (uint64_t i = 0; i < width; i++) ((uint16_t *)(void *)at)[i] = (uint16_t)operation->set.value;
        } else {
            for (uint64_t i = 0; i < width; i++) ((uint32_t *)(void *)at)[i] = operation->set.value;
        }
    }
}

static uint64_t set(struct stream *stream, const struct operation *operation, uint64_t ready) {
    uint64_t row = operation->set.width * operation->set.element;
    if (row == 0 || operation->set.height == 0) return ready;
    struct work work = {
        .ranges = {{operation->set.dst, (operation->set.height - 1) * operation->set.pitch + row, 1}},
        .range_count = 1,
        .passed = row * operation->set.height,
        .compute = set_memory,
        .argument = operation,
    };
    return compute_run(stream, &work, ready);
}

/* Wait for an action of another stream or of the host. Time passes. */
static uint64_t later(uint64_t ready, uint64_t began) {
    uint64_t now = clock_now();
    /* the condition was already met: only the check took time */
    return now - began < 100000 ? ready : now;
}

static int value_is_there(const struct operation *operation) {
    uint64_t now, want = operation->value.value;
    if (operation->value.wide)
        now = __atomic_load_n((uint64_t *)(uintptr_t)operation->value.address, __ATOMIC_ACQUIRE);
    else
        now = __atomic_load_n((uint32_t *)(uintptr_t)operation->value.address, __ATOMIC_ACQUIRE);
    switch (operation->value.flags & 3) {
    case 0: return operation->value.wide ? (int64_t)(now - want) >= 0 : (int32_t)(uint32_t)(now - want) >= 0;
    case 1: return now == want;
    case 2: return (now & want) != 0;
    default: return (operation->value.wide ? ~(now | want) : (uint64_t)(uint32_t)~(now | want)) != 0;
    }
}

static void write_value(const struct operation *operation) {
    if (operation->value.wide)
        __atomic_store_n((uint64_t *)(uintptr_t)operation->value.address, operation->value.value, __ATOMIC_RELEASE);
    else
        __atomic_store_n((uint32_t *)(uintptr_t)operation->value.address, (uint32_t)operation->value.value,
                         __ATOMIC_RELEASE);
}

/* After an illegal address the context's kernels, copies and calls do nothing; frees and notifications still happen. */
static int dead(struct stream *stream) {
    return __atomic_load_n(&stream->context->error, __ATOMIC_ACQUIRE) != CUDA_SUCCESS;
}

uint64_t execute(struct stream *stream, const struct operation *operation, uint64_t ready) {
    uint64_t began = clock_now();
    switch (operation->kind) {
    case OPERATION_NOTHING:
    case OPERATION_QUIT: return ready;
    case OPERATION_KERNEL: return kernel_run(stream, &operation->kernel, ready);
    case OPERATION_COPY:
        if (!dead(stream)) ready = execute_copy(stream, &operation->copy, ready);
        if (operation->copy.staged) free((void *)(uintptr_t)operation->copy.src);
        return ready;
    case OPERATION_SET: return set(stream, operation, ready);
    case OPERATION_PREFETCH:
        if (dead(stream)) return ready;
        return execute_prefetch(stream, operation->prefetch.address, operation->prefetch.size,
                                operation->prefetch.device, ready);
    case OPERATION_RECORD:
        event_reach(operation->event.event, operation->event.number, ready);
        event_release(operation->event.event);
        return ready;
    case OPERATION_WAIT_EVENT:
        event_wait(operation->event.event, operation->event.number);
        event_release(operation->event.event);
        return later(ready, began);
    case OPERATION_WAIT_STREAM:
        stream_wait(operation->stream.stream, operation->stream.position);
        stream_release(operation->stream.stream);
        return later(ready, began);
    case OPERATION_HOST: operation->host.fn(operation->host.data); return clock_now();
    case OPERATION_CALLBACK:
        operation->callback.fn(operation->callback.stream, stream->context->error, operation->callback.data);
        return clock_now();
    case OPERATION_FREE: pool_free(operation->free.address); return ready;
    case OPERATION_GRAPH: return graph_run(stream, operation->graph.exec, ready);
    case OPERATION_WRITE_VALUE: write_value(operation); return ready;
    case OPERATION_WAIT_VALUE:
        /* a GPU polls too, because nothing signals the arrival of the value */
        while (!value_is_there(operation) && !dead(stream)) clock_sleep_until(clock_now() + 200000);
        return later(ready, began);
    }
    return ready;
}
