"""Which objects of a watched mapping have changed."""

from __future__ import annotations

from typing import Any

import pytest

from gpushare_spawner.spawner.kubernetes.cluster import node_resources
from gpushare_spawner.spawner.kubernetes.cluster.node_resources import ChangedObject, ChangedObjects


def changes(seen: ChangedObjects, objects: dict[str, Any]) -> list[ChangedObject]:
    return [change for piece in seen.pieces(lambda: objects) for change in piece]


def test_new_replaced_and_removed_objects_are_found_once() -> None:
    seen, first, second = ChangedObjects(), {"v": 1}, {"v": 2}
    objects = {"a": first, "b": first}
    assert changes(seen, objects) == [("a", None, first), ("b", None, first)]
    assert changes(seen, objects) == []
    objects["a"] = second
    del objects["b"]
    assert changes(seen, objects) == [("a", first, second), ("b", first, None)]
    assert changes(seen, objects) == []


def test_another_mapping_with_the_same_objects_is_no_change_and_an_empty_one_removes_all() -> None:
    seen, item = ChangedObjects(), {"v": 1}
    changes(seen, {"a": item})
    assert changes(seen, {"a": item}) == []
    assert changes(seen, {}) == [("a", item, None)]


def test_what_changes_between_two_pieces_is_found_now_or_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_resources, "AT_ONCE", 1)
    seen = ChangedObjects()
    objects: dict[str, Any] = {"a": 1, "b": 2}
    pieces = seen.pieces(lambda: objects)
    assert next(pieces) == [("a", None, 1)]
    objects.update({"a": 10, "b": 20, "c": 30})
    assert [change for piece in pieces for change in piece] == [("b", None, 20)]
    assert changes(seen, objects) == [("a", 1, 10), ("c", None, 30)]


def test_one_that_goes_while_another_comes_is_found_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_resources, "AT_ONCE", 1)
    seen = ChangedObjects()
    objects: dict[str, Any] = {"a": 1, "b": 2}
    pieces = seen.pieces(lambda: objects)
    next(pieces)
    del objects["a"]
    objects["c"] = 3
    list(pieces)
    assert changes(seen, objects) == [("c", None, 3), ("a", 1, None)]
