"""Records ordered by a number: against a model, and as shallow as logarithmic times need."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from bisect import bisect_right
from pathlib import Path

import pytest

from tests.libraries import NATIVE

SOURCES = NATIVE / "preload"
PROGRAM = """
#include <stdlib.h>
#include "memory/tree.h"
static struct tree_node *root;
void insert(uint64_t key) {
    struct tree_node *node = malloc(sizeof *node);
    node->key = key;
    tree_insert(&root, node);
}
int take(uint64_t key) {
    struct tree_node **link = tree_link(&root, key), *node = *link;
    if (node) tree_remove(link);
    free(node);
    return node != NULL;
}
uint64_t up_to(uint64_t key) {
    struct tree_node *node = tree_last_up_to(root, key);
    return node ? node->key : UINT64_MAX;
}
int steps(uint64_t key) {
    int count = 1;
    for (struct tree_node *node = root; node && node->key != key; count++)
        node = node->key < key ? node->right : node->left;
    return count;
}
"""
MIB = 2**20
DISTANCES = [
    *(2**power for power in range(31)),
    48,
    # of a GPU's memory in pieces of 122 MiB, and in pieces of Fibonacci numbers of 256 bytes
    122 * MIB,
    244 * MIB,
    *(256 * number for number in (1974, 2584, 4181, 6765, 10946)),
]


@pytest.fixture
def tree(tmp_path: Path) -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "program.c").write_text(PROGRAM)
    command = [compiler, "-O2", "-fPIC", "-shared", f"-I{SOURCES}", "program.c", str(SOURCES / "memory/tree.c")]
    subprocess.run([*command, "-o", "tree.so"], cwd=tmp_path, check=True)
    library = ctypes.CDLL(str(tmp_path / "tree.so"))
    library.insert.argtypes = library.take.argtypes = library.up_to.argtypes = library.steps.argtypes = [
        ctypes.c_uint64
    ]
    library.up_to.restype = ctypes.c_uint64
    return library


def test_random_keys_are_found_as_in_a_sorted_list(tree: ctypes.CDLL) -> None:
    chance = random.Random(1)
    known: list[int] = []
    for _ in range(20_000):
        key = chance.randrange(0, 600) * chance.choice([1, 512, 2 * MIB]) + 1
        if chance.random() < 0.5:
            assert tree.take(key) == (key in known)
            if key in known:
                known.remove(key)
        elif key not in known:
            known.insert(bisect_right(known, key), key)
            tree.insert(key)
        place = bisect_right(known, key + 100)
        assert tree.up_to(key + 100) == (known[place - 1] if place else 2**64 - 1)


@pytest.mark.parametrize("distance", DISTANCES)
def test_keys_of_any_distance_are_found_in_few_steps(tree: ctypes.CDLL, distance: int) -> None:
    keys = range(0x7F00_0000_0000, 0x7F00_0000_0000 + 4000 * distance, distance)
    for key in keys:
        tree.insert(key)
    steps = [tree.steps(key) for key in keys]
    assert sum(steps) / len(steps) < 30, "the mean of random keys is 15.5"
    assert max(steps) < 60
