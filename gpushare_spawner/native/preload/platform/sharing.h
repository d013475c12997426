/* Whether this process is to be shared at all. */
#pragma once

#include <stdbool.h>

/* GPUSHARE_SOCKET is set, GPUSHARE_DISABLE is not, and the program has no more rights than its caller. Reads the
 * environment once; any thread, no lock. */
bool sharing_wanted(void);
