"""The balanced tree of records: against a model, and as shallow as logarithmic times need."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from bisect import bisect_left, bisect_right
from pathlib import Path

import pytest

from tests.libraries import NATIVE

SOURCES = NATIVE / "preload"
PROGRAM = """
#include <stdlib.h>
#include "memory/tree.h"
static struct tree_node *root;
void insert(uint64_t key, uint64_t order) {
    struct tree_node *node = malloc(sizeof *node);
    node->key = key;
    node->order = order;
    tree_insert(&root, node);
}
int take(uint64_t key, uint64_t order) {
    struct tree_node **link = tree_link(&root, key, order), *node = *link;
    if (node) tree_remove(link);
    free(node);
    return node != NULL;
}
uint64_t up_to(uint64_t key) {
    struct tree_node *node = tree_last_up_to(root, key);
    return node ? node->key : UINT64_MAX;
}
uint64_t first_from(uint64_t key, uint64_t order, uint64_t *order_of) {
    struct tree_node *node = tree_first_from(root, key, order);
    if (node) *order_of = node->order;
    return node ? node->key : UINT64_MAX;
}
int steps(uint64_t key, uint64_t order) {
    int count = 1;
    for (struct tree_node *node = root; node && (node->key != key || node->order != order); count++)
        node = node->key < key || (node->key == key && node->order < order) ? node->right : node->left;
    return count;
}
"""
MIB = 2**20
NOTHING = 2**64 - 1
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
    number = ctypes.c_uint64
    library.insert.argtypes = library.take.argtypes = library.steps.argtypes = [number, number]
    library.up_to.argtypes = [number]
    library.first_from.argtypes = [number, number, ctypes.POINTER(number)]
    library.up_to.restype = library.first_from.restype = number
    return library


def first_from(tree: ctypes.CDLL, key: int, order: int) -> tuple[int, int] | None:
    order_of = ctypes.c_uint64()
    first = tree.first_from(key, order, ctypes.byref(order_of))
    return (first, order_of.value) if first != NOTHING else None


def test_random_keys_are_found_as_in_a_sorted_list(tree: ctypes.CDLL) -> None:
    chance = random.Random(1)
    model: list[tuple[int, int]] = []
    for _ in range(20_000):
        key = chance.randrange(0, 600) * chance.choice([1, 512, 2 * MIB]) + 1
        order = chance.choice([0, 0, 1, 2])
        if chance.random() < 0.5:
            assert tree.take(key, order) == ((key, order) in model)
            if (key, order) in model:
                model.remove((key, order))
        elif (key, order) not in model:
            model.insert(bisect_right(model, (key, order)), (key, order))
            tree.insert(key, order)
        place = bisect_right(model, (key + 100, NOTHING))
        assert tree.up_to(key + 100) == (model[place - 1][0] if place else NOTHING)
        place = bisect_left(model, (key, 1))
        assert first_from(tree, key, 1) == (model[place] if place < len(model) else None)


@pytest.mark.parametrize("distance", DISTANCES)
def test_keys_of_any_distance_are_found_in_few_steps(tree: ctypes.CDLL, distance: int) -> None:
    assert_shallow(tree, [(0x7F00_0000_0000 + number * distance, 0) for number in range(4000)])


@pytest.mark.parametrize("sizes", [1, 2, 63])
def test_records_of_equal_keys_are_found_in_few_steps(tree: ctypes.CDLL, sizes: int) -> None:
    assert_shallow(tree, [(2 * MIB * (number % sizes), number) for number in range(4000)])


def assert_shallow(tree: ctypes.CDLL, keys: list[tuple[int, int]]) -> None:
    for key, order in keys:
        tree.insert(key, order)
    steps = [tree.steps(key, order) for key, order in keys]
    assert sum(steps) / len(steps) < 30, "the mean of random keys is 15.5"
    assert max(steps) < 60
