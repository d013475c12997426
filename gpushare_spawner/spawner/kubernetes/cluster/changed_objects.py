"""Which objects of a watched mapping have changed since the last look."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

AT_ONCE = 5000
"""Objects that are compared in one piece: less than 1 ms."""


class Changed(NamedTuple):
    """One object before and after; None: it was not there, or is gone."""

    key: str
    before: Any
    now: Any


class ChangedObjects:
    """Compares a mapping with what it was, by the identity of its objects: a watch replaces those that change."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def look_again(self) -> None:
        """Find all objects changed the next time."""
        self._known = dict.fromkeys(self._known)

    def pieces(self, objects: Callable[[], Mapping[str, Any]]) -> Iterator[list[Changed]]:
        """Yield what has changed, in pieces; between two of them the mapping may change, or be another one.

        ``objects`` returns the mapping. What changes meanwhile is found now or the next time.
        """
        names = list(objects())
        for start in range(0, len(names), AT_ONCE):
            current = objects()
            changed = []
            for name in names[start : start + AT_ONCE]:
                now = current.get(name)
                if now is not None and now is not self._known.get(name):
                    changed.append(Changed(name, self._known.get(name), now))
                    self._known[name] = now
            yield changed
        current = objects()
        if len(self._known) != len(current):
            yield [Changed(name, self._known.pop(name), None) for name in list(self._known) if name not in current]
