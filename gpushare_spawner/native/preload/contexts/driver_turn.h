/* The background thread's turns with the driver. A turn holds contexts_lock, and none begins once the program is
   exiting: the driver may be taking itself down then. */
#pragma once

#include <stdbool.h>

bool driver_turn_begin(void);
void driver_turn_end(void); /* leaves no context current */

/* From now on there are no turns; returns when the last one is over. */
void driver_turns_stop(void);
void driver_turns_allow(void);
