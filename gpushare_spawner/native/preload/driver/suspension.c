#include "driver/suspension.h"

_Atomic uint32_t suspension_of_threads;
_Atomic bool suspension_of_background;
