/* What keeps the driver from checkpointing this process: memory, events and semaphores that it shares with other
   processes or APIs, and managed memory that no account has. Recorded with engine `suspend` only. Every function takes
   a lock of this file, and ties_count the accounts' lock within it; none calls the driver. */
#pragma once

#include "driver/gpus.h"

enum tie_kind {
    TIE_OPENED,   /* of another process or API */
    TIE_EXPORTED, /* of this process, shown to others */
    TIE_MANAGED,  /* managed memory: variables of modules, pools */
};

enum tie_object {
    TIE_ADDRESS,    /* opened by its address */
    TIE_ALLOCATION, /* of allocations.h: over when that allocation is */
    TIE_PHYSICAL,   /* memory of VMM */
    TIE_POOL,
    TIE_EVENT,
    TIE_EXTERNAL, /* memory and semaphores of other APIs */
    TIE_VARIABLE, /* of a module or library */
};

struct tie {
    enum tie_kind kind;
    enum tie_object object;
    uint64_t id;
    uint64_t owner; /* of an allocation its number, of a variable its module */
    uint64_t bytes;
    CUcontext context; /* with which it goes; NULL: with none */
};

/* Remember one more. The same object can be opened several times. */
void ties_add(struct tie tie);
/* The same, unless it is known already. */
void ties_add_once(struct tie tie);

/* There is one that could not be remembered, for lack of memory. */
void ties_lost(void);

/* Forget one of these; all of them. */
void ties_remove(enum tie_object object, uint64_t id);
void ties_remove_all(enum tie_object object, uint64_t id);
void ties_remove_variables(uint64_t owner);
void ties_of_context_gone(CUcontext context);

/* How many of a kind there are, and their bytes. */
struct tie_count {
    uint64_t number, bytes;
};
struct tie_count ties_count(enum tie_kind kind);

void ties_forget(void); /* in a forked child */
