/* From the real driver's functions to their wrappers.

   A pointer that the real driver gave out is turned into the wrapper of the very function it points to; what is not
   known stays what it is. Nothing is ever derived from a name's suffix. */
#pragma once

/* The wrapper for a pointer of the real driver, or the pointer itself. Loads the driver's functions when it is the
   first that asks, under a lock. */
void *wrapper_table_find(void *pointer);
