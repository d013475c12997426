"""Files of admins: each is read again when it changes, and its last valid version is kept.

`WatchedFile` is one reading of a file, `OptionalFile` a file that can be absent. The folder of templates, with the
files beside them, is in `templates.folder`, the parser in `templates.parser`.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic

from gpushare_spawner.templates.parser import MAX_BYTES, Content, FileKind, Parsed, parse, too_long
from gpushare_spawner.templates.problems import Problem, log_problems

_log = logging.getLogger(__name__)

SETTLING_SECONDS = 2.0
"""A file that changed less than this long ago is read again: two changes within one clock tick have one signature."""

Signature = tuple[int, int, int, int, int]
"""Modification and change time (ns), size (bytes), inode, device."""


@dataclass(frozen=True)
class WatchedFile(Generic[Content]):
    """The last reading of one file."""

    signature: Signature | None
    """None if the file's status could not be read."""
    read_at: float
    """Seconds since the epoch."""
    parsed: Parsed[Content]
    good: Parsed[Content] | None
    """The last valid version."""

    @classmethod
    def read(
        cls, kind: FileKind[Content], path: Path, signature: Signature | None, previous: WatchedFile[Content] | None
    ) -> WatchedFile[Content]:
        """Read the file now. ``previous``: the reading before, whose objects are kept if nothing changed."""
        read_at = time.time()
        parsed = read_file(kind, path)
        if previous is not None and parsed == previous.parsed:
            parsed = previous.parsed  # also its lines are equal, so the same fields are written
        good = parsed if parsed.content is not None else previous.good if previous is not None else None
        return cls(signature, read_at, parsed, good)

    def outdated(self, signature: Signature | None) -> bool:
        """Return whether the file must be read again. ``signature``: its present one."""
        return signature is None or signature != self.signature or self._may_hide_a_change()

    def problems(self, kept: str) -> list[Problem]:
        """Return the problems of the last reading. ``kept``: added if the last valid version is in force."""
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
    """Return the parts of a file's status that change with its content."""
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev)


def read_file(kind: FileKind[Any], path: Path) -> Parsed[Any]:
    """Read a file, unless it is too large by its status. Raises nothing."""
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


@dataclass(frozen=True)
class FileInForce(Generic[Content]):
    """The last valid version of a file."""

    content: Content | None = None
    """None if there is no file, or it was never valid."""
    problems: tuple[Problem, ...] = ()
    """Problems of the file now."""


class OptionalFile(Generic[Content]):
    """One file. After an error the last valid version stays in force, and the problem says so.

    After the file is removed, nothing is in force. Problems are logged once, when they appear.
    """

    def __init__(self, kind: FileKind[Content], path: Path) -> None:
        self._path = path
        self._kind = kind
        self._file: WatchedFile[Content] | None = None
        self._now: FileInForce[Content] = FileInForce()
        self._read_at: float | None = None

    def load(self, max_age: float = 0.0) -> FileInForce[Content]:
        """Return the content in force, and the problems. Cheap while the file does not change. Raises nothing.

        A result that is at most ``max_age`` seconds old is returned again: the folder can be on a slow disk.
        """
        now = time.monotonic()
        if self._read_at is None or now - self._read_at >= max_age:
            self._read_at = now
            before, self._now = self._now, self._read()
            title = self._kind.title
            described = [[f"{title} {problem}" for problem in file.problems] for file in (before, self._now)]
            log_problems(_log, self._path, *described)
            if before.content != self._now.content:
                _log.info("%s in force: %s", title, "none" if self._now.content is None else self._path)
        return self._now

    def _read(self) -> FileInForce[Content]:
        unreadable: list[Problem] = []
        try:
            signature = signature_of(self._path.stat())  # follows links: Kubernetes swaps the target of its link
            if self._file is None or self._file.outdated(signature):
                self._file = WatchedFile.read(self._kind, self._path, signature, self._file)
        except (FileNotFoundError, NotADirectoryError):
            # only a readable folder without the file means that an admin has removed the file
            if self._path.parent.is_dir() and not self._path.is_symlink():
                self._file = None
        except OSError as error:
            what = f"cannot be read: {error.strerror or error}"
            unreadable.append(Problem(self._path.name, None, "", what, "check that the hub may read it"))
        if self._file is None:
            return FileInForce(problems=tuple(unreadable))
        problems = (*unreadable, *self._file.problems(self._kind.kept))
        return FileInForce(self._file.good.content if self._file.good is not None else None, problems)
