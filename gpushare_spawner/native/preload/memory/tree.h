/* Records ordered by a number (an address, a handle), each found in logarithmic time: a treap whose priorities are
   hashes of the keys, so that it needs no state and no balance is kept by hand. The node is a member of the record;
   tree_record leads back. Takes no lock, allocates nothing. */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct tree_node {
    uint64_t key;
    struct tree_node *left, *right;
};

#define tree_record(node, type, member) ((type *)((char *)(node) - offsetof(type, member)))

/* The key must not be in the tree. */
void tree_insert(struct tree_node **root, struct tree_node *node);

/* Where the tree holds this key; a link to NULL: nowhere. */
struct tree_node **tree_link(struct tree_node **root, uint64_t key);

/* Take out what the link leads to. */
void tree_remove(struct tree_node **link);

/* The one with the largest key up to this one; NULL: there is none. */
struct tree_node *tree_last_up_to(struct tree_node *root, uint64_t key);
