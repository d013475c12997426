#define _GNU_SOURCE
#include "platform/wake.h"

#include <stdatomic.h>
#include <sys/eventfd.h>

#include "platform/common.h"

static int file = -1;
static _Atomic bool listens;
static _Atomic bool woken;

bool wake_listens(void) {
    return atomic_load_explicit(&listens, memory_order_relaxed);
}

void wake_up(void) {
    if (!wake_listens() || atomic_exchange(&woken, true)) return;
    uint64_t count = 1;
    ssize_t written = write(file, &count, sizeof count);
    (void)written; /* the file is full only while the thread is awake */
}

bool wake_open(void) {
    file = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (file < 0) return false;
    atomic_store(&listens, true);
    return true;
}

void wake_close(void) {
    atomic_store(&listens, false);
    if (file >= 0) close(file);
    file = -1;
}

int wake_file(void) {
    return file;
}

void wake_begin(void) {
    atomic_store(&woken, false);
}

void wake_clear(void) {
    uint64_t count;
    ssize_t length = read(file, &count, sizeof count);
    (void)length; /* another round follows in any case */
}

RESET_IN_CHILD(wake_reset);
void wake_reset(void) {
    if (file >= 0) close(file);
    file = -1;
    atomic_store(&listens, false);
    atomic_store(&woken, false);
}
