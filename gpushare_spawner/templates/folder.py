"""The admin's folder: one YAML file for each compute template, and the optional files beside them.

`quotas.yaml`, `idle.yaml` (idle actions for all templates) and `layers.yaml` (the sharing layers of nodes) are not
templates. All files are read again when they change; see `templates.files`.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from gpushare_spawner.model.idle_policy import IdlePolicy
from gpushare_spawner.model.layer_rules import LayersFile
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.template import Template
from gpushare_spawner.templates.files import Signature, WatchedFile, signature_of
from gpushare_spawner.templates.parser import IDLE_POLICY, LAYERS, QUOTAS, TEMPLATE, FileKind, Parsed
from gpushare_spawner.templates.problems import FieldPath, Problem, log_problems
from gpushare_spawner.wording.service import exceeded_departments

SUFFIXES = (".yaml", ".yml")
QUOTA_FILE = "quotas.yaml"
IDLE_FILE = "idle.yaml"
LAYERS_FILE = "layers.yaml"
RESERVED: Mapping[str, FileKind[Any]] = {QUOTA_FILE: QUOTAS, IDLE_FILE: IDLE_POLICY, LAYERS_FILE: LAYERS}
"""Files in the folder that are not templates. Their names are reserved: a template in such a file is not read as one.
"""
DEFAULT_FOLDER = "/etc/gpushare/templates"


@dataclass(frozen=True)
class Policy:
    """The files of a folder in force."""

    templates: tuple[Template, ...] = ()
    """In the order of their files' names."""
    quotas: Quotas | None = None
    """None if there are no quotas; likewise `idle` and `layers`."""
    idle: IdlePolicy | None = None
    layers: LayersFile | None = None
    problems: tuple[Problem, ...] = ()
    """Problems of all files now."""
    warnings: tuple[Problem, ...] = ()
    """Valid amounts that cannot be met, like guarantees of teams that exceed their department's."""
    files: Mapping[str, str] = field(default_factory=dict)
    """File names by template names."""
    lines: Mapping[str, Mapping[FieldPath, int]] = field(default_factory=dict)
    """The line of each field, counted from 1, by template names."""

    @property
    def beside(self) -> dict[str, BaseModel | None]:
        """The contents of the files beside the templates, by the files' names."""
        return {QUOTA_FILE: self.quotas, IDLE_FILE: self.idle, LAYERS_FILE: self.layers}

    def get(self, name: str) -> Template | None:
        """Return the template with this name, if there is one."""
        return next((template for template in self.templates if template.name == name), None)


def described(problems: Iterable[Problem]) -> list[str]:
    """Return problems for logs and dashboards: "Template a.yaml:2: ...", "quotas.yaml:3: ..."."""
    return [str(problem) if problem.file in RESERVED else f"Template {problem}" for problem in problems]


def default_folder() -> Path:
    """Return the default folder of hub and service: ``$GPUSHARE_TEMPLATES``, else /etc/gpushare/templates."""
    return Path(os.environ.get("GPUSHARE_TEMPLATES") or DEFAULT_FOLDER)


class PolicyFolder:
    """The ``*.yaml`` and ``*.yml`` files of one folder, without its subfolders and without hidden files.

    A file with an error does not affect the others. If the file was valid before, its last valid version stays in
    force, and the problem says so. If two files have the same template name, the first by file name counts. Problems
    and warnings are logged once, when they appear.
    """

    def __init__(self, path: str | Path, log: logging.Logger | None = None) -> None:
        self.path = Path(path)
        self._log = log or logging.getLogger(__name__)
        self._files: dict[str, WatchedFile[Any]] = {}
        self._folder_problem: Problem | None = None
        self._now = Policy()
        self._read_at: float | None = None

    def load(self, max_age: float = 0.0) -> Policy:
        """Return the files in force, and the problems. Cheap while no file changes. Raises nothing.

        A result that is at most ``max_age`` seconds old is returned again: the folder can be on a slow disk.
        """
        now = time.monotonic()
        if self._read_at is not None and now - self._read_at < max_age:
            return self._now
        self._read_at = now
        # also for equal policies: a field that is written with its default value outranks one that is not written
        if self._read_changes():
            before, self._now = self._now, self._gather()
            self._log_changes(before)
        return self._now

    def _read_changes(self) -> bool:
        """Read the changed files. Returns whether there were any."""
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
        quotas, idle, layers = (self._beside(name, problems) for name in RESERVED)
        return Policy(
            templates=tuple(templates.values()),
            quotas=quotas.content,
            idle=idle.content,
            layers=layers.content,
            problems=tuple(problems),
            warnings=tuple(_warnings(quotas)),
            files=files,
            lines=all_lines,
        )

    def _beside(self, name: str, problems: list[Problem]) -> Parsed[Any]:
        """Return a file beside the templates in force, and add its problems to the others."""
        file = self._files.get(name)
        if file is None:
            return Parsed(None)
        problems += file.problems(RESERVED[name].kept)
        return file.good or Parsed(None)

    def _log_changes(self, before: Policy) -> None:
        now = self._now
        log_problems(self._log, self.path, described(before.problems), described(now.problems))
        for warning in now.warnings:
            if warning not in before.warnings:
                self._log.warning("Quotas %s", warning)
        if before.templates != now.templates:
            names = ", ".join(template.name for template in now.templates) or "none"
            self._log.info("Templates in force from %s: %s", self.path, names)
        for name, content in now.beside.items():
            if content != before.beside[name]:
                where = "none" if content is None else self.path / name
                self._log.info("%s in force: %s", RESERVED[name].title, where)


def _warnings(read: Parsed[Quotas]) -> list[Problem]:
    exceeded = exceeded_departments(read.content) if read.content is not None else {}
    return [
        Problem(QUOTA_FILE, read.lines.get(("groups", department, "guarantee")), f"groups.{department}", what)
        for department, what in exceeded.items()
    ]


def _entries(folder: Path) -> dict[str, Signature | None]:
    """Return the signatures of the folder's files by name; None for a file that cannot be read. Raises OSError."""
    signatures: dict[str, Signature | None] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or not entry.name.lower().endswith(SUFFIXES):
                continue
            try:
                status = entry.stat()  # follows links: Kubernetes swaps the target of a ConfigMap's link
                # a mount without its source is a directory: the file of that name stays in force, and is a problem
                if entry.name in RESERVED or not stat.S_ISDIR(status.st_mode):
                    signatures[entry.name] = signature_of(status)
            except OSError:
                signatures[entry.name] = None
    return signatures
