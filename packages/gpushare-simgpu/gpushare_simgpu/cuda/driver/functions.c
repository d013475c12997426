/* The table that cuGetProcAddress searches. */
#include "cuda/driver/functions.h"

/* The functions take what they take; here only their addresses matter. */
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
