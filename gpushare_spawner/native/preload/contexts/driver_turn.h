/* The background thread's turns with the driver. A turn holds contexts_lock, and none begins once the program is
   exiting, when the driver may be taking itself down, and while the process is suspended. No driver call within a turn
   may wait for the device. */
#pragma once

#include <stdbool.h>

/* Waits for contexts_lock. False: the program is exiting or the process suspended, and there is no turn. */
bool driver_turn_begin(void);
void driver_turn_end(void); /* leaves no context current */

/* From now on there are no turns; returns when the last one is over, or after half a second. */
void driver_turns_stop(void);
void driver_turns_allow(void);
