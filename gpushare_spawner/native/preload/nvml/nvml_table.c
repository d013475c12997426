#include "nvml/nvml_table.h"

#include <string.h>

#include "nvml/wrapped_nvml.h"

void *nvml_table_find(void *pointer, const char *name) {
    if (!figures_wanted() || !real_nvml_load()) return pointer;
#define CALLED(name, parameters)
#define WRAPPED(function, parameters)                                                                                  \
    if (strcmp(name, #function) == 0)                                                                                  \
        return pointer == (void *)real_nvml()->function ? (void *)wrapped_##function : pointer;
#include "nvml/nvml_calls.h"
    return pointer;
}
