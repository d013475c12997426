#include "memory/tree.h"

#include <stdbool.h>

/* A hash of key and order in which each bit depends on all bits. Addresses, handles and numbers often have a fixed
   distance, which a multiplication alone turns into rising priorities for some distances, so that the tree would
   degenerate into a list. The constants and shifts are from Stafford's variant 13 of MurmurHash3's final step. */
static uint64_t priority_of(const struct tree_node *node) {
    uint64_t mixed = node->key ^ (node->order << 32 | node->order >> 32);
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9ull;
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBull;
    return mixed ^ mixed >> 31;
}

static bool is_before(const struct tree_node *node, uint64_t key, uint64_t order) {
    /* compared as a single number, without a branch */
    return ((unsigned __int128)node->key << 64 | node->order) < ((unsigned __int128)key << 64 | order);
}

void tree_insert(struct tree_node **root, struct tree_node *node) {
    struct tree_node **link = root;
    node->priority = priority_of(node);
    while (*link && (*link)->priority >= node->priority)
        link = is_before(*link, node->key, node->order) ? &(*link)->right : &(*link)->left;
    struct tree_node *tree = *link, **below = &node->left, **above = &node->right;
    *link = node;
    while (tree) { /* split the existing tree into the nodes before and after the new node */
        if (is_before(tree, node->key, node->order)) {
            *below = tree;
            below = &tree->right;
            tree = tree->right;
        } else {
            *above = tree;
            above = &tree->left;
            tree = tree->left;
        }
    }
    *below = *above = NULL;
}

struct tree_node **tree_link(struct tree_node **root, uint64_t key, uint64_t order) {
    struct tree_node **link = root;
    while (*link && ((*link)->key != key || (*link)->order != order))
        link = is_before(*link, key, order) ? &(*link)->right : &(*link)->left;
    return link;
}

void tree_remove(struct tree_node **link) {
    struct tree_node *below = (*link)->left, *above = (*link)->right;
    while (below && above) {
        if (below->priority > above->priority) {
            *link = below;
            link = &below->right;
            below = below->right;
        } else {
            *link = above;
            link = &above->left;
            above = above->left;
        }
    }
    *link = below ? below : above;
}

struct tree_node *tree_last_up_to(struct tree_node *root, uint64_t key) {
    struct tree_node *best = NULL;
    for (struct tree_node *node = root; node;) {
        if (node->key <= key) {
            best = node;
            node = node->right;
        } else {
            node = node->left;
        }
    }
    return best;
}

struct tree_node *tree_first_from(struct tree_node *root, uint64_t key, uint64_t order) {
    struct tree_node *best = NULL;
    for (struct tree_node *node = root; node;) {
        if (is_before(node, key, order)) {
            node = node->right;
        } else {
            best = node;
            node = node->left;
        }
    }
    return best;
}
