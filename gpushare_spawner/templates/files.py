"""Files of a templates' folder: each is read again when it changes, and its last valid version is kept.

`WatchedFile` is one file of any kind. The optional files beside the templates are `idle.yaml` (idle actions for all
templates), `layers.yaml` (the sharing layers of nodes) and `quotas.yaml`. The templates are in `templates.folder`, the
parser in `templates.parser`.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic

from gpushare_spawner.model.idle_policy import IdlePolicy
from gpushare_spawner.model.layer_rules import LayersFile
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.templates.parser import (
    IDLE_POLICY,
    LAYERS,
    MAX_BYTES,
    QUOTAS,
    Content,
    FileKind,
    Parsed,
    parse,
    too_long,
)
from gpushare_spawner.templates.parser import Path as FieldPath
from gpushare_spawner.templates.problems import Problem, log_problems
from gpushare_spawner.wording.service import exceeded_departments

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
        """Read the file now. ``previous``: the reading before. Raises nothing."""
        read_at = time.time()
        parsed = _parse(kind, path)
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


def _parse(kind: FileKind[Any], path: Path) -> Parsed[Any]:
    """Read a file, unless it is too large by its status."""
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
    lines: Mapping[FieldPath, int] = field(default_factory=dict)
    """The line of each field, counted from 1."""


class OptionalFile(Generic[Content]):
    """One file beside the templates. After an error the last valid version stays in force, and the problem says so.

    After the file is removed, nothing is in force. Problems are logged once, when they appear.
    """

    def __init__(
        self, kind: FileKind[Content], path: Path, what: str, kept: str, log: logging.Logger | None = None
    ) -> None:
        """Set up the file. ``what``: first word of log lines, like "Quotas"; ``kept``: in force after an error."""
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
        """Return the content in force, and the problems. Cheap while the file does not change. Raises nothing.

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
            # only a readable folder without the file means that an admin has removed the file
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


IDLE_FILE = "idle.yaml"
"""Name in the templates' folder. The name is reserved: a template in this file is read as idle actions for all."""


def idle_file(folder: str | Path, log: logging.Logger | None = None) -> OptionalFile[IdlePolicy]:
    """Return the file of this folder of templates."""
    kept = "the last valid idle policy stays in force"
    return OptionalFile(IDLE_POLICY, Path(folder) / IDLE_FILE, "Idle policy", kept, log)


LAYERS_FILE = "layers.yaml"
"""Name in the templates' folder. The name is reserved: a template in this file is read as layers."""


def layers_file(folder: str | Path, log: logging.Logger | None = None) -> OptionalFile[LayersFile]:
    """Return the file of this folder of templates."""
    kept = "the last valid layers stay in force"
    return OptionalFile(LAYERS, Path(folder) / LAYERS_FILE, "Layers", kept, log)


QUOTA_FILE = "quotas.yaml"
"""Name in the templates' folder. The name is reserved: a template in this file is read as quotas."""
KEPT = "the last valid quotas stay in force"


@dataclass(frozen=True)
class QuotasInForce:
    """The quotas of a hub."""

    quotas: Quotas | None = None
    """None if there are no quotas."""
    problems: tuple[Problem, ...] = ()
    """Problems of the file."""
    warnings: tuple[Problem, ...] = ()
    """Valid amounts that cannot be met, like guarantees of teams that exceed their department's."""


class QuotaFile:
    """The quotas beside the templates of a folder; see `OptionalFile`. Warnings are logged once, when they appear."""

    def __init__(self, folder: str | Path, log: logging.Logger | None = None) -> None:
        self._file = OptionalFile(QUOTAS, Path(folder) / QUOTA_FILE, "Quotas", KEPT, log)
        self._read: FileInForce[Quotas] | None = None
        self._now = QuotasInForce()

    @property
    def path(self) -> Path:
        return self._file.path

    def load(self, max_age: float = 0.0) -> QuotasInForce:
        """Return the quotas in force, and the problems; see `OptionalFile.load`."""
        read = self._file.load(max_age)
        if read is not self._read:
            self._read, before = read, self._now
            self._now = _in_force(read)
            for warning in self._now.warnings:
                if warning not in before.warnings:
                    self._file.log.warning("Quotas %s", warning)
        return self._now


def _in_force(read: FileInForce[Quotas]) -> QuotasInForce:
    if read.content is None:
        return QuotasInForce(problems=read.problems)
    warnings = [
        Problem(QUOTA_FILE, read.lines.get(("groups", department, "guarantee")), f"groups.{department}", what)
        for department, what in exceeded_departments(read.content).items()
    ]
    return QuotasInForce(read.content, read.problems, tuple(warnings))
