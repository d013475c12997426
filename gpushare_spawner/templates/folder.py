"""The folder of compute templates: one YAML file for each template, read again when files change.

The folder's `quotas.yaml`, `idle.yaml` and `layers.yaml` are not templates: see `templates.files`.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpushare_spawner.model.template import Template
from gpushare_spawner.templates.files import IDLE_FILE, LAYERS_FILE, QUOTA_FILE, Signature, WatchedFile, signature_of
from gpushare_spawner.templates.parser import TEMPLATE
from gpushare_spawner.templates.parser import Path as FieldPath
from gpushare_spawner.templates.problems import Problem, log_problems

SUFFIXES = (".yaml", ".yml")
RESERVED = frozenset({QUOTA_FILE, IDLE_FILE, LAYERS_FILE})
"""Files in the folder that are not templates."""
DEFAULT_FOLDER = "/etc/gpushare/templates"


@dataclass(frozen=True)
class Templates:
    """The templates of a folder. Iterates over them in the order of their files' names."""

    templates: tuple[Template, ...] = ()
    problems: tuple[Problem, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    """File names by template names."""
    lines: Mapping[str, Mapping[FieldPath, int]] = field(default_factory=dict)
    """The line of each field, counted from 1, by template names."""

    def __iter__(self) -> Iterator[Template]:
        return iter(self.templates)

    def __len__(self) -> int:
        return len(self.templates)

    def get(self, name: str) -> Template | None:
        """Return the template with this name, if there is one."""
        return next((template for template in self.templates if template.name == name), None)


def default_folder() -> Path:
    """Return the default folder of hub and service: ``$GPUSHARE_TEMPLATES``, else /etc/gpushare/templates."""
    return Path(os.environ.get("GPUSHARE_TEMPLATES") or DEFAULT_FOLDER)


class TemplateFolder:
    """The ``*.yaml`` and ``*.yml`` files of one folder, without its subfolders and without hidden files.

    A file with an error does not affect the others. If the file was valid before, its last valid version stays in
    force, and the problem says so. If two files have the same template name, the first by file name counts. Problems
    are logged once, when they appear.
    """

    def __init__(self, path: str | Path, log: logging.Logger | None = None) -> None:
        self.path = Path(path)
        self._log = log or logging.getLogger(__name__)
        self._files: dict[str, WatchedFile[Template]] = {}
        self._folder_problem: Problem | None = None
        self._now = Templates()
        self._read_at: float | None = None

    def load(self, max_age: float = 0.0) -> Templates:
        """Return the templates in force, and the problems. Cheap while no file changes. Raises nothing.

        A result that is at most ``max_age`` seconds old is returned again: the folder can be on a slow disk.
        """
        now = time.monotonic()
        if self._read_at is not None and now - self._read_at < max_age:
            return self._now
        self._read_at = now
        changed = self._read_changes()
        if changed:
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
                self._files[name] = WatchedFile.read(TEMPLATE, self.path / name, signature, previous)
                changed = True
        return changed

    def _gather(self) -> Templates:
        problems = [self._folder_problem] if self._folder_problem is not None else []
        templates: dict[str, Template] = {}
        files: dict[str, str] = {}
        all_lines: dict[str, Mapping[FieldPath, int]] = {}
        default: str | None = None
        for name in sorted(self._files):
            file = self._files[name]
            if file.good is None or file.good.content is None:
                problems += file.problems("")
                continue
            template, lines = file.good.content, file.good.lines
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
        return Templates(tuple(templates.values()), tuple(problems), files, all_lines)

    def _log_changes(self, before: Templates) -> None:
        log_problems(self._log, "Template", self.path, before.problems, self._now.problems)
        if before.templates != self._now.templates:
            names = ", ".join(template.name for template in self._now.templates) or "none"
            self._log.info("Templates in force from %s: %s", self.path, names)


def _entries(folder: Path) -> dict[str, Signature | None]:
    """Return the signatures of template files by name; None for a file that cannot be read. Raises OSError."""
    signatures: dict[str, Signature | None] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name in RESERVED or not entry.name.lower().endswith(SUFFIXES):
                continue
            try:
                status = entry.stat()  # follows links: Kubernetes swaps the target of a ConfigMap's link
                if not stat.S_ISDIR(status.st_mode):
                    signatures[entry.name] = signature_of(status)
            except OSError:
                signatures[entry.name] = None
    return signatures
