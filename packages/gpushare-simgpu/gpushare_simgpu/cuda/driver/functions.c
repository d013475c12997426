/* The table that cuGetProcAddress searches. */
#include "cuda/driver/functions.h"

/* The parameters of the functions are irrelevant; only their addresses are used here. */
#define ONE(name, version, function) extern void function(void);
#define TWO(name, version, function, per_thread)                                                                       \
    extern void function(void);                                                                                        \
    extern void per_thread(void);
#include "cuda/driver/function_table.h"
#undef ONE
#undef TWO

const struct named_function FUNCTIONS[] = {
#define ONE(name, version, function)             {name, version, function, NULL},
#define TWO(name, version, function, per_thread) {name, version, function, per_thread},
#include "cuda/driver/function_table.h"
};

const size_t FUNCTION_COUNT = sizeof FUNCTIONS / sizeof *FUNCTIONS;
