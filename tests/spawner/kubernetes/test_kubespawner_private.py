"""KubeSpawner's private names: each that is used exists, and stands in one file with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubespawner import KubeSpawner
from traitlets.config import LoggingConfigurable

from gpushare_spawner.spawner.base import GPUShareBase
from gpushare_spawner.spawner.kubernetes import kubespawner_private
from gpushare_spawner.spawner.kubernetes.kubespawner_private import OVERRIDDEN
from gpushare_spawner.spawner.kubernetes.spawner import GPUShareSpawner

FILE = Path(kubespawner_private.__file__)
SET_IN_INIT = {"_start_future"}
"""Private attributes of KubeSpawner's objects that its class does not show."""


def private(cls: type) -> set[str]:
    """The private names that a class itself defines, without those that traitlets gives to every class."""
    names = set(vars(cls)) - set(vars(LoggingConfigurable))
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


THEIRS = private(KubeSpawner) | SET_IN_INIT


def used(path: Path) -> Iterator[str]:
    """Private names of KubeSpawner that a file reads, sets or calls."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in THEIRS:
            yield node.attr


@pytest.mark.parametrize("name", sorted(OVERRIDDEN))
def test_a_private_name_that_is_overridden_exists_and_is_overridden(name: str) -> None:
    assert name in private(KubeSpawner)
    assert name in vars(GPUShareSpawner)


def test_no_other_private_name_is_overridden() -> None:
    assert (private(GPUShareSpawner) | private(GPUShareBase)) & THEIRS == set(OVERRIDDEN)


def test_private_names_are_used_in_one_file() -> None:
    package = FILE.parents[1]
    others = {
        path.name: names - set(OVERRIDDEN)
        for path in package.rglob("*.py")
        if path != FILE and (names := {*used(path)})
    }
    assert not {path: names for path, names in others.items() if names}
    assert len(set(used(FILE))) >= 10


def test_ours_are_two_classes_and_no_name_is_overridden_in_both() -> None:
    ours = [cls for cls in GPUShareSpawner.__mro__ if cls.__module__.startswith("gpushare_spawner")]
    assert ours == [GPUShareSpawner, GPUShareBase]
    abstract = GPUShareBase.__dict__
    both = {
        name
        for name in set(vars(GPUShareSpawner)) & set(vars(GPUShareBase))
        if callable(vars(GPUShareSpawner)[name]) and not getattr(abstract[name], "__isabstractmethod__", False)
    }
    assert both <= {"__init__"}
