#include "platform/common.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Whether GPUSHARE_LOG has been read, at cuInit or before an earlier line; the program may change its environment
   later. */
static _Atomic bool prepared;
static pthread_mutex_t preparing = PTHREAD_MUTEX_INITIALIZER;
static enum log_level chosen = LOG_ERROR;
static char *log_path;

static void prepare(void) {
    const char *setting = getenv("GPUSHARE_LOG");
    static const struct {
        const char *word;
        enum log_level level;
    } words[] = {{"off", LOG_OFF}, {"error", LOG_ERROR}, {"info", LOG_INFO}, {"debug", LOG_DEBUG}};
    size_t length = setting ? strcspn(setting, ",") : 0;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (length == strlen(words[i].word) && strncmp(setting, words[i].word, length) == 0) chosen = words[i].level;
    const char *path = setting ? strchr(setting, ',') : NULL;
    if (path && path[1]) log_path = strdup(path + 1);
}

void log_prepare(void) {
    /* pthread_once is in libpthread before glibc 2.34: see libc.h */
    if (atomic_load_explicit(&prepared, memory_order_acquire)) return;
    pthread_mutex_lock(&preparing);
    if (!prepared) {
        prepare();
        atomic_store_explicit(&prepared, true, memory_order_release);
    }
    pthread_mutex_unlock(&preparing);
}

void log_line(enum log_level level, const char *format, ...) {
    log_prepare();
    if (level > chosen) return;

    int kept = errno;
    char line[512];
    int used = snprintf(line, sizeof line, "gpushare[%d]: ", (int)getpid());
    va_list arguments;
    va_start(arguments, format);
    int more = vsnprintf(line + used, sizeof line - (size_t)used - 1, format, arguments);
    va_end(arguments);
    size_t length = (size_t)used + (size_t)(more < 0 ? 0 : more);
    if (length > sizeof line - 2) length = sizeof line - 2;
    line[length++] = '\n';

    /* opened for each line, so that a program that closes or counts its files finds no file of this library */
    int file = log_path ? open(log_path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
    ssize_t written = write(file >= 0 ? file : STDERR_FILENO, line, length);
    (void)written; /* an error cannot be reported anywhere */
    if (file >= 0) close(file);
    errno = kept;
}

RESET_IN_CHILD(log_reset);
void log_reset(void) {
    pthread_mutex_init(&preparing, NULL);
}
