#include "memory/tree.h"

/* A hash of the key in which each bit counts for all bits. Addresses and handles have a fixed distance, and a
   multiplication alone makes rising priorities of that for some distances: the tree would be a list. The constants and
   shifts are those of Stafford's variant 13 of MurmurHash3's last step. */
static uint64_t priority(const struct tree_node *node) {
    uint64_t mixed = node->key;
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9ull;
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBull;
    return mixed ^ mixed >> 31;
}

void tree_insert(struct tree_node **root, struct tree_node *node) {
    struct tree_node **link = root;
    while (*link && priority(*link) >= priority(node))
        link = (*link)->key < node->key ? &(*link)->right : &(*link)->left;
    struct tree_node *tree = *link, **below = &node->left, **above = &node->right;
    *link = node;
    while (tree) { /* what was here is split into what lies below the node and above it */
        if (tree->key < node->key) {
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

struct tree_node **tree_link(struct tree_node **root, uint64_t key) {
    struct tree_node **link = root;
    while (*link && (*link)->key != key) link = (*link)->key < key ? &(*link)->right : &(*link)->left;
    return link;
}

void tree_remove(struct tree_node **link) {
    struct tree_node *below = (*link)->left, *above = (*link)->right;
    while (below && above) {
        if (priority(below) > priority(above)) {
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
