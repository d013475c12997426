#include "memory/ties.h"

#include <pthread.h>
#include <stdlib.h>

#include "memory/allocations.h"

struct node {
    struct tie tie;
    struct node *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct node *_Atomic ties; /* written with the lock held */
static _Atomic bool lost;         /* a tie could not be recorded */

static bool same(const struct tie *a, const struct tie *b) {
    return a->kind == b->kind && a->object == b->object && a->id == b->id && a->owner == b->owner;
}

void ties_lost(void) {
    atomic_store(&lost, true);
}

static void add(struct tie tie, bool once) {
    struct node *node = malloc(sizeof *node);
    if (!node) {
        ties_lost();
        return;
    }
    pthread_mutex_lock(&lock);
    const struct node *recorded = once ? atomic_load(&ties) : NULL;
    while (recorded && !same(&recorded->tie, &tie)) recorded = recorded->next;
    if (!recorded) {
        *node = (struct node){tie, atomic_load(&ties)};
        atomic_store(&ties, node);
        node = NULL;
    }
    pthread_mutex_unlock(&lock);
    free(node);
}

void ties_add(struct tie tie) {
    add(tie, false);
}

void ties_add_once(struct tie tie) {
    add(tie, true);
}

typedef bool (*tie_matches)(const struct tie *tie, const struct tie *pattern);

/* Remove the ties that match; only the newest if not `all`. */
static void remove_ties(tie_matches matches, struct tie pattern, bool all) {
    if (!atomic_load(&ties)) return;
    pthread_mutex_lock(&lock);
    struct node *kept = NULL, **end = &kept;
    for (struct node *node = atomic_load(&ties), *next; node; node = next) {
        next = node->next;
        if (matches(&node->tie, &pattern)) {
            free(node);
            if (all) continue;
            *end = next;
            goto done;
        }
        *end = node;
        end = &node->next;
    }
    *end = NULL;
done:
    atomic_store(&ties, kept);
    pthread_mutex_unlock(&lock);
}

static bool is_object(const struct tie *tie, const struct tie *pattern) {
    return tie->object == pattern->object && tie->id == pattern->id;
}

static bool is_variable_of(const struct tie *tie, const struct tie *pattern) {
    return tie->object == TIE_VARIABLE && tie->owner == pattern->owner;
}

static bool is_in_context(const struct tie *tie, const struct tie *pattern) {
    return tie->context == pattern->context;
}

static bool is_freed(const struct tie *tie, const struct tie *unused) {
    struct allocation allocation;
    return tie->object == TIE_ALLOCATION &&
           !(allocations_find(tie->id, &allocation) && allocation.number == tie->owner);
}

void ties_remove(enum tie_object object, uint64_t id) {
    remove_ties(is_object, (struct tie){.object = object, .id = id}, false);
}

void ties_remove_all(enum tie_object object, uint64_t id) {
    remove_ties(is_object, (struct tie){.object = object, .id = id}, true);
}

void ties_remove_variables(uint64_t owner) {
    remove_ties(is_variable_of, (struct tie){.owner = owner}, true);
}

void ties_remove_context(CUcontext context) {
    if (context) remove_ties(is_in_context, (struct tie){.context = context}, true);
}

struct tie_count ties_count(enum tie_kind kind) {
    struct tie_count count = {kind == TIE_EXPORTED && atomic_load(&lost), 0};
    remove_ties(is_freed, (struct tie){0}, true);
    pthread_mutex_lock(&lock);
    for (const struct node *node = atomic_load(&ties); node; node = node->next) {
        if (node->tie.kind != kind) continue;
        count.number++;
        count.bytes += node->tie.bytes;
    }
    pthread_mutex_unlock(&lock);
    return count;
}

RESET_IN_CHILD(ties_reset);
void ties_reset(void) {
    atomic_store(&ties, NULL);
    atomic_store(&lost, false);
    pthread_mutex_init(&lock, NULL);
}
