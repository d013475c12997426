/* A balanced tree of records, ordered by a key (an address, a handle, a size) and, among equal keys, by a second
   number. It is a treap whose priorities are hashes of both; each operation takes logarithmic time. The node is a
   member of the record; tree_record returns the record. Takes no lock, allocates nothing. */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct tree_node {
    uint64_t key, order; /* no two nodes of a tree are equal in both; `order` is 0 if keys are unique */
    uint64_t priority;   /* set by tree_insert */
    struct tree_node *left, *right;
};

#define tree_record(node, type, member) ((type *)((char *)(node) - offsetof(type, member)))

/* Add a node, whose key and order are set. */
void tree_insert(struct tree_node **root, struct tree_node *node);

/* Return the link that leads to the node with this key and order; a link to NULL: the tree has no such node. */
struct tree_node **tree_link(struct tree_node **root, uint64_t key, uint64_t order);

/* Remove the node that the link leads to. */
void tree_remove(struct tree_node **link);

/* Return the last node whose key is at most this key; NULL: there is none. */
struct tree_node *tree_last_up_to(struct tree_node *root, uint64_t key);

/* Return the first node at or after this key and order; NULL: there is none. */
struct tree_node *tree_first_from(struct tree_node *root, uint64_t key, uint64_t order);
