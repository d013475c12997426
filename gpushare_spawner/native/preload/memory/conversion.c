#include "memory/conversion.h"

#include <stdlib.h>
#include <string.h>

#include "platform/engine.h"

_Atomic bool conversion_on;

static bool switched_off;

void conversion_prepare(void) {
    const char *setting = getenv("GPUSHARE_MANAGED");
    switched_off = engine_wanted() != ENGINE_MANAGED || (setting && strcmp(setting, "0") == 0);
}

void conversion_set(bool wanted) {
    atomic_store(&conversion_on, wanted && !switched_off);
}
