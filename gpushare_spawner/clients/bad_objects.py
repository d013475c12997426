"""Objects of the API server that cannot be read: each is told once, and the others are read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

MOST_TOLD = 1000
"""Objects that cannot be read of which the log says so. Ours: a hub runs for months, and names of pods are many."""


class BadObjects:
    """Objects that cannot be read. One of them must not keep the others from being counted."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._told: set[str] = set()

    @contextmanager
    def apart(self, name: str) -> Iterator[None]:
        """Log an exception of the work for one object, the first time; the object is left as it was before."""
        try:
            yield
        except Exception:
            if name not in self._told and len(self._told) < MOST_TOLD:
                self._told.add(name)
                self._log.exception("%s cannot be read, so it counts as it was before", name)
