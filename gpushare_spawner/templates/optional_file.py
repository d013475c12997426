"""A file beside the templates that need not be there, like `quotas.yaml`: read again when it changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic

from gpushare_spawner.templates.parser import Content, Kind
from gpushare_spawner.templates.parser import Path as FieldPath
from gpushare_spawner.templates.problems import Problem, log_problems
from gpushare_spawner.templates.watched_file import WatchedFile, signature_of


@dataclass(frozen=True)
class FileInForce(Generic[Content]):
    """The last valid version of a file."""

    content: Content | None = None
    """None: there is no file, or it never was valid."""
    problems: tuple[Problem, ...] = ()
    """What is wrong with the file now."""
    lines: Mapping[FieldPath, int] = field(default_factory=dict)
    """The line of each field, counted from 1."""


class OptionalFile(Generic[Content]):
    """One file. An error changes nothing: the last valid version stays in force, and the problem says so.

    A file that is removed ends what it says. Problems are logged once, when they appear.
    """

    def __init__(
        self, kind: Kind[Content], path: Path, what: str, kept: str, log: logging.Logger | None = None
    ) -> None:
        """``what``: how lines of the log begin, like "Quotas"; ``kept``: what stays in force beside an error."""
        self.path = path
        self.log = log or logging.getLogger(__name__)
        self._kind = kind
        self._what = what
        self._kept = kept
        self._file: WatchedFile[Content] | None = None
        self._unreadable: Problem | None = None
        self._now: FileInForce[Content] = FileInForce()
        self._read_at: float | None = None

    def load(self, max_age: float = 0.0) -> FileInForce[Content]:
        """Return what is in force, and the problems. Cheap while the file does not change. Raises nothing.

        A result that is at most ``max_age`` seconds old is returned again: the folder can be on a slow disk.
        """
        now = time.monotonic()
        if self._read_at is None or now - self._read_at >= max_age:
            self._read_at = now
            before = self._now
            self._read()
            self._now = self._in_force()
            self._log_changes(before)
        return self._now

    def _read(self) -> None:
        self._unreadable = None
        try:
            signature = signature_of(self.path.stat())  # follows links: Kubernetes swaps the target of its link
        except (FileNotFoundError, NotADirectoryError):
            # a folder that cannot be read is no sign that an admin has removed the file
            if self.path.parent.is_dir() and not self.path.is_symlink():
                self._file = None
            return
        except OSError as error:
            what = f"cannot be read: {error.strerror or error}"
            self._unreadable = Problem(self.path.name, None, "", what, "check that the hub may read it")
            return
        if self._file is None or self._file.outdated(signature):
            self._file = WatchedFile.read(self._kind, self.path, signature, self._file)

    def _in_force(self) -> FileInForce[Content]:
        unreadable = (self._unreadable,) if self._unreadable is not None else ()
        if self._file is None:
            return FileInForce(problems=unreadable)
        problems = (*unreadable, *self._file.problems(self._kept))
        good = self._file.good
        if good is None:
            return FileInForce(problems=problems)
        return FileInForce(good.content, problems, good.lines)

    def _log_changes(self, before: FileInForce[Content]) -> None:
        now = self._now
        log_problems(self.log, self._what, self.path, before.problems, now.problems)
        if before.content != now.content:
            self.log.info("%s in force: %s", self._what, "none" if now.content is None else self.path)
