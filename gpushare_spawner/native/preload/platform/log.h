/* The log: one line at a time, to where GPUSHARE_LOG says (default: errors, to stderr). */
#pragma once

enum log_level { LOG_OFF, LOG_ERROR, LOG_INFO, LOG_DEBUG };

/* Read GPUSHARE_LOG, once. Takes a lock of its own, and allocates. */
void log_prepare(void);

/* Write one line. Any thread, any lock held; keeps errno. A system call, where the level is wanted. */
void log_line(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
