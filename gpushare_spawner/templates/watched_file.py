"""A file of templates, quotas or an idle policy on disk: read when it changes, its last valid version kept."""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic

from gpushare_spawner.templates.parser import MAX_BYTES, Content, Kind, Parsed, parse, too_long
from gpushare_spawner.templates.problems import Problem

SETTLING_SECONDS = 2.0
"""A file changed less than this long ago is read again: two changes within one tick of the clock look like one."""

Signature = tuple[int, int, int, int, int]
"""Modification and change time (ns), size (bytes), inode, device."""


@dataclass(frozen=True)
class WatchedFile(Generic[Content]):
    """One file as it was read last."""

    signature: Signature | None
    """None: the file's status could not be read."""
    read_at: float
    """Seconds since the epoch."""
    parsed: Parsed[Content]
    good: Parsed[Content] | None
    """The last valid version."""

    @classmethod
    def read(
        cls, kind: Kind[Content], path: Path, signature: Signature | None, known: WatchedFile[Content] | None
    ) -> WatchedFile[Content]:
        """Read the file now. ``known`` is what was read before. Raises nothing."""
        read_at = time.time()
        parsed = _parse(kind, path)
        good = parsed if parsed.content is not None else known.good if known is not None else None
        return cls(signature, read_at, parsed, good)

    def outdated(self, signature: Signature | None) -> bool:
        """Return whether the file must be read again, by its present signature."""
        return signature is None or signature != self.signature or self._may_hide_a_change()

    def problems(self, kept: str) -> list[Problem]:
        """Return the problems of the last reading. ``kept``: what to add where the last valid version is in force."""
        if self.good is None or self.parsed.content is not None:
            return list(self.parsed.problems)
        return [
            replace(problem, advice=f"{problem.advice}; {kept}" if problem.advice else kept)
            for problem in self.parsed.problems
        ]

    def _may_hide_a_change(self) -> bool:
        changed_at = max(self.signature[:2]) / 1e9 if self.signature is not None else 0.0
        return abs(self.read_at - changed_at) < SETTLING_SECONDS


def signature_of(status: os.stat_result) -> Signature:
    """Return what changes when a file changes."""
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev)


def _parse(kind: Kind[Any], path: Path) -> Parsed[Any]:
    """Read a file. The size is checked before: a file of 100 MB costs nothing."""
    name = path.name
    try:
        # without O_NONBLOCK a named pipe would block the hub until a program writes into it
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return Parsed(None, (Problem(name, None, "", "is not a plain file", "replace it with a plain file"),))
            if status.st_size > MAX_BYTES:
                return Parsed(None, (too_long(kind, name, status.st_size),))
            return parse(kind, file.read(MAX_BYTES + 1), name)
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        return Parsed(None, (Problem(name, None, "", what, "check that it exists and that the hub may read it"),))
