"""Admins' files: each file is read again when it changes, and its last valid version stays in force.

`PolicyFolder` is the folder with one YAML file for each compute template, and with optional files: `quotas.yaml`,
`idle.yaml` (idle actions for all templates), `layers.yaml` (the sharing layers of nodes) and `placement.yaml` (the GPUs
of users and groups). `WatchedFile` is one
reading of a file, and `OptionalFile` is a file outside the folder that can be absent. The files are parsed by
`templates.parser`.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Generic

from pydantic import BaseModel

from gpushare_spawner.model.idle_policy import IdlePolicy
from gpushare_spawner.model.layers_file import LayersFile
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.template import PlacementPins, Template
from gpushare_spawner.templates.parser import (
    IDLE_POLICY,
    LAYERS,
    MAX_BYTES,
    PLACEMENT,
    QUOTAS,
    TEMPLATE,
    Content,
    FileKind,
    Parsed,
    parse,
    too_long,
)
from gpushare_spawner.templates.problems import FieldPath, Problem, log_problems

_log = logging.getLogger(__name__)

SETTLING_SECONDS = 2.0
"""Age in seconds of a change below which the file is read again: two changes within one clock tick have one signature.
"""

Signature = tuple[int, int, int, int, int]
"""Modification time and change time (ns), size (bytes), inode, device."""


@dataclass(frozen=True)
class WatchedFile(Generic[Content]):
    """The result of the last reading of one file."""

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
        """Read the file now. ``previous``: the previous reading; its objects are reused if nothing has changed."""
        read_at = time.time()
        parsed = read_file(kind, path)
        if previous is not None and parsed == previous.parsed:
            parsed = previous.parsed  # the lines are equal too, so the same fields are written
        good = parsed if parsed.content is not None else previous.good if previous is not None else None
        return cls(signature, read_at, parsed, good)

    def outdated(self, signature: Signature | None) -> bool:
        """Return whether the file must be read again. ``signature``: its current signature."""
        return signature is None or signature != self.signature or self._may_hide_a_change()

    def problems(self, fallback: str) -> list[Problem]:
        """Return the problems of the last reading. ``fallback``: text added if an earlier valid version is in force."""
        if self.good is None or self.parsed.content is not None:
            return list(self.parsed.problems)
        return [
            replace(problem, advice=f"{problem.advice}; {fallback}" if problem.advice else fallback)
            for problem in self.parsed.problems
        ]

    def _may_hide_a_change(self) -> bool:
        changed_at = max(self.signature[:2]) / 1e9 if self.signature is not None else 0.0
        return abs(self.read_at - changed_at) < SETTLING_SECONDS


def signature_of(status: os.stat_result) -> Signature:
    """Return the fields of a file's status that change with its content."""
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev)


def read_file(kind: FileKind[Any], path: Path) -> Parsed[Any]:
    """Read a file, unless its status shows that it is too large. Raises nothing."""
    name = path.name
    try:
        # without O_NONBLOCK a named pipe would block the hub until a program writes to it
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
    """The content; None if there is no file, or if it was never valid."""
    problems: tuple[Problem, ...] = ()
    """The current problems of the file."""


class OptionalFile(Generic[Content]):
    """One file. After an error the last valid version stays in force, which the problem's text states.

    If the file is removed, nothing is in force. Problems are logged once, when they appear.
    """

    def __init__(self, kind: FileKind[Content], path: Path) -> None:
        self._path = path
        self._kind = kind
        self._file: WatchedFile[Content] | None = None
        self._now: FileInForce[Content] = FileInForce()
        self._read_at: float | None = None

    def load(self, max_age: float = 0.0) -> FileInForce[Content]:
        """Return the content in force and the problems. Cheap while the file does not change. Raises nothing.

        A result that is at most ``max_age`` seconds old is reused, because the folder can be on a slow disk.
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
            # the admin has removed the file only if the folder is readable and lacks it
            if self._path.parent.is_dir() and not self._path.is_symlink():
                self._file = None
        except OSError as error:
            what = f"cannot be read: {error.strerror or error}"
            unreadable.append(Problem(self._path.name, None, "", what, "check that the hub may read it"))
        if self._file is None:
            return FileInForce(problems=tuple(unreadable))
        problems = (*unreadable, *self._file.problems(self._kind.fallback))
        return FileInForce(self._file.good.content if self._file.good is not None else None, problems)


SUFFIXES = (".yaml", ".yml")
QUOTA_FILE = "quotas.yaml"
IDLE_FILE = "idle.yaml"
LAYERS_FILE = "layers.yaml"
PLACEMENT_FILE = "placement.yaml"
RESERVED: Mapping[str, FileKind[Any]] = {
    QUOTA_FILE: QUOTAS,
    IDLE_FILE: IDLE_POLICY,
    LAYERS_FILE: LAYERS,
    PLACEMENT_FILE: PLACEMENT,
}
"""Files in the folder that are not templates. Their names are reserved: a template in such a file is not read as one.
"""
DEFAULT_FOLDER = "/etc/gpushare/templates"


@dataclass(frozen=True)
class Policy:
    """The files of a folder in force."""

    templates: tuple[Template, ...] = ()
    """The templates, in the order of their file names."""
    quotas: Quotas | None = None
    """None if there are no quotas; the same holds for `idle` and `layers`."""
    idle: IdlePolicy | None = None
    layers: LayersFile | None = None
    placement: PlacementPins | None = None
    problems: tuple[Problem, ...] = ()
    """The current problems of all files."""
    warnings: tuple[Problem, ...] = ()
    """Warnings about valid files: templates that contradict the placement of a user or group."""
    files: Mapping[str, str] = field(default_factory=dict)
    """File names by template name."""
    lines: Mapping[str, Mapping[FieldPath, int]] = field(default_factory=dict)
    """The line of each field, counted from 1, by template name."""

    @property
    def beside(self) -> dict[str, BaseModel | None]:
        """The contents of the reserved files, by file name."""
        return {QUOTA_FILE: self.quotas, IDLE_FILE: self.idle, LAYERS_FILE: self.layers, PLACEMENT_FILE: self.placement}

    def get(self, name: str) -> Template | None:
        """Return the template with this name; None if there is none."""
        return next((template for template in self.templates if template.name == name), None)


def described(problems: Iterable[Problem]) -> list[str]:
    """Return problems as text for logs and dashboards: "Template a.yaml:2: ...", "quotas.yaml:3: ..."."""
    return [str(problem) if problem.file in RESERVED else f"Template {problem}" for problem in problems]


def default_folder() -> Path:
    """Return the default folder of the hub and the service: ``$GPUSHARE_TEMPLATES``, else /etc/gpushare/templates."""
    return Path(os.environ.get("GPUSHARE_TEMPLATES") or DEFAULT_FOLDER)


class PolicyFolder:
    """The ``*.yaml`` and ``*.yml`` files of one folder, without its subfolders and without hidden files.

    A file with an error does not affect the others. If the file was valid before, its last valid version stays in
    force, which the problem's text states. If two files have the same template name, the first file by name
    counts. Problems are logged once, when they appear.
    """

    def __init__(self, path: str | Path, log: logging.Logger | None = None) -> None:
        self.path = Path(path)
        self._log = log or _log
        self._files: dict[str, WatchedFile[Any]] = {}
        self._folder_problem: Problem | None = None
        self._now = Policy()
        self._read_at: float | None = None

    def load(self, max_age: float = 0.0) -> Policy:
        """Return the files in force and the problems. Cheap while no file changes. Raises nothing.

        A result that is at most ``max_age`` seconds old is reused, because the folder can be on a slow disk.
        """
        now = time.monotonic()
        if self._read_at is not None and now - self._read_at < max_age:
            return self._now
        self._read_at = now
        # even if the policies are equal: a field that is written with its default value outranks a field that is not
        # written
        if self._read_changes():
            before, self._now = self._now, self._gather()
            self._log_changes(before)
        return self._now

    def _read_changes(self) -> bool:
        """Read the changed files. Return whether there were any."""
        try:
            signatures = _entries(self.path)
        except OSError as error:
            keeping = "the templates that were read before stay in force" if self._files else ""
            problem = Problem(str(self.path), None, "", f"cannot be listed: {error.strerror or error}", keeping)
            changed, self._folder_problem = problem != self._folder_problem, problem
            return changed
        changed, self._folder_problem = self._folder_problem is not None, None
        for name in self._files.keys() - signatures.keys():
            del self._files[name]
            changed = True
        for name, signature in signatures.items():
            previous = self._files.get(name)
            if previous is None or previous.outdated(signature):
                kind = RESERVED.get(name, TEMPLATE)
                file = self._files[name] = WatchedFile.read(kind, self.path / name, signature, previous)
                changed = changed or previous is None or file.parsed is not previous.parsed
        return changed

    def _gather(self) -> Policy:
        problems = [self._folder_problem] if self._folder_problem is not None else []
        templates: dict[str, Template] = {}
        files: dict[str, str] = {}
        all_lines: dict[str, Mapping[FieldPath, int]] = {}
        default: str | None = None
        for name in sorted(self._files.keys() - RESERVED.keys()):
            file = self._files[name]
            if file.good is None or file.good.content is None:
                problems += file.problems("")
                continue
            template: Template = file.good.content
            lines = file.good.lines
            problems += file.problems(f"the last valid version of {template.name} stays in force")
            if template.name in templates:
                what = f"the template in {files[template.name]} already has the name {template.name}"
                advice = f"this file is ignored; give one of the two another name (both in {self.path})"
                problems.append(Problem(name, lines.get(("name",)), "name", what, advice))
                continue
            if template.default and default is not None:
                what = f"the template in {files[default]} is already the default"
                problems.append(
                    Problem(name, lines.get(("default",)), "default", what, "keep default: true in one file")
                )
                template = template.model_copy(update={"default": False})
            elif template.default:
                default = template.name
            templates[template.name] = template
            files[template.name] = name
            all_lines[template.name] = lines
        quotas, idle, layers, placement = (self._beside(name, problems) for name in RESERVED)
        return Policy(
            templates=tuple(templates.values()),
            quotas=quotas.content,
            idle=idle.content,
            layers=layers.content,
            placement=placement.content,
            problems=tuple(problems),
            warnings=tuple(_contradictions(placement, templates.values())),
            files=files,
            lines=all_lines,
        )

    def _beside(self, name: str, problems: list[Problem]) -> Parsed[Any]:
        """Return the version of a reserved file that is in force, and append its problems to ``problems``."""
        file = self._files.get(name)
        if file is None:
            return Parsed(None)
        problems += file.problems(RESERVED[name].fallback)
        return file.good or Parsed(None)

    def _log_changes(self, before: Policy) -> None:
        now = self._now
        log_problems(self._log, self.path, described(before.problems), described(now.problems))
        for warning in now.warnings:
            if warning not in before.warnings:
                self._log.warning("%s %s", RESERVED[warning.file].title, warning)
        if before.templates != now.templates:
            names = ", ".join(template.name for template in now.templates) or "none"
            self._log.info("Templates in force from %s: %s", self.path, names)
        for name, content in now.beside.items():
            if content != before.beside[name]:
                where = "none" if content is None else self.path / name
                self._log.info("%s in force: %s", RESERVED[name].title, where)


def _contradictions(read: Parsed[PlacementPins], templates: Iterable[Template]) -> Iterator[Problem]:
    """Yield a warning for each template that cannot be used under a pin."""
    pins = read.content if read.content is not None else PlacementPins()
    for part, entries in (("users", pins.users), ("groups", pins.groups)):
        for (name, pin), template in product(entries.items(), templates):
            try:
                template.pinned(pin)
            except ValueError as error:
                what = f"cannot use the template {template.name}: {error}"
                yield Problem(PLACEMENT_FILE, read.lines.get((part, name)), f"{part}.{name}", what)


def _entries(folder: Path) -> dict[str, Signature | None]:
    """Return the signatures of the folder's files by name; None for a file that cannot be read. Raises OSError."""
    signatures: dict[str, Signature | None] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or not entry.name.lower().endswith(SUFFIXES):
                continue
            try:
                status = entry.stat()  # follows links: Kubernetes swaps the target of a ConfigMap's link
                # a mount without its source is a directory: the file of that name stays in force and has a problem
                if entry.name in RESERVED or not stat.S_ISDIR(status.st_mode):
                    signatures[entry.name] = signature_of(status)
            except OSError:
                signatures[entry.name] = None
    return signatures
