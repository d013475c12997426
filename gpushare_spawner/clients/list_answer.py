"""Reads the API server's answer to a list object by object.

Of a large cluster's pods only a small part is kept (`object_watch`). All of them at once, as objects of Python, would
take ten times the memory of that part, and what a process has taken once it hardly ever gives back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class ListAnswer:
    """A JSON object with ``metadata`` and ``items``, in any order."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.version = ""
        """The resourceVersion of the list, after the last item."""

    def items(self) -> Iterator[dict[str, Any]]:
        """Yield each item. Raises ValueError for what is no such object, and KeyError where its version is missing."""
        others: dict[str, Any] = {}
        at = self._after(0, "{")
        while self._next(at) != "}":
            name, at = self._value(at)
            at = self._after(at, ":")
            if name != "items" or self._next(at) != "[":
                others[name], at = self._value(at)
            else:
                at = self._after(at, "[")
                while self._next(at) != "]":
                    item, at = self._value(at)
                    yield item
                    at = self._after(at, ",") if self._next(at) == "," else at
                at = self._after(at, "]")
            at = self._after(at, ",") if self._next(at) == "," else at
        self.version = str(others["metadata"]["resourceVersion"])

    def _value(self, at: int) -> tuple[Any, int]:
        return _DECODER.raw_decode(self._text, self._skip(at))

    def _next(self, at: int) -> str:
        at = self._skip(at)
        return self._text[at : at + 1]

    def _after(self, at: int, mark: str) -> int:
        at = self._skip(at)
        if not self._text.startswith(mark, at):
            raise ValueError(f"no list of Kubernetes: {mark} expected at character {at}")
        return at + len(mark)

    def _skip(self, at: int) -> int:
        found = _SPACE.match(self._text, at)
        return found.end() if found is not None else at
