/* Ties are objects that prevent the driver from checkpointing this process: memory, events and semaphores that it
   shares with other processes or APIs, and managed memory that is in no account. Recorded with engine `suspend` only.
   Every function takes a lock of this file, and ties_count also takes the accounts' lock within it; no function calls
   the driver. */
#pragma once

#include "driver/gpus.h"

enum tie_kind {
    TIE_OPENED,   /* an object of another process or API */
    TIE_EXPORTED, /* an object of this process that others can open */
    TIE_MANAGED,  /* managed memory: variables of modules, pools */
};

enum tie_object {
    TIE_ADDRESS,    /* opened by its address */
    TIE_ALLOCATION, /* from allocations.h: ends with that allocation */
    TIE_PHYSICAL,   /* physical memory of the VMM API */
    TIE_POOL,
    TIE_EVENT,
    TIE_EXTERNAL, /* memory and semaphores of other APIs */
    TIE_VARIABLE, /* of a module or library */
};

struct tie {
    enum tie_kind kind;
    enum tie_object object;
    uint64_t id;
    uint64_t owner; /* the number of an allocation, or the module of a variable */
    uint64_t bytes;
    CUcontext context; /* the tie ends with it; NULL: with no context */
};

/* Record a tie. The same object can be opened several times. */
void ties_add(struct tie tie);
/* Record a tie, unless it is recorded already. */
void ties_add_once(struct tie tie);

/* Record that a tie could not be recorded for lack of memory: from now on the process counts as tied. */
void ties_lost(void);

/* Remove the newest tie of an object, all its ties, the ties of a module's variables, or the ties of a destroyed
   context. */
void ties_remove(enum tie_object object, uint64_t id);
void ties_remove_all(enum tie_object object, uint64_t id);
void ties_remove_variables(uint64_t owner);
void ties_remove_context(CUcontext context);

/* The number of ties of a kind, and their bytes. */
struct tie_count {
    uint64_t number, bytes;
};
struct tie_count ties_count(enum tie_kind kind);
