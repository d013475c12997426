"""The file `quotas.yaml` beside the templates: read again when it changes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.templates.optional_file import FileInForce, OptionalFile
from gpushare_spawner.templates.parser import QUOTAS
from gpushare_spawner.templates.problems import Problem
from gpushare_spawner.wording.quotas import exceeded_departments

QUOTA_FILE = "quotas.yaml"
"""Its name in the templates' folder. The name is reserved: a template in it is read as quotas."""
KEPT = "the last valid quotas stay in force"


@dataclass(frozen=True)
class QuotasInForce:
    """The quotas of a hub."""

    quotas: Quotas | None = None
    """None: there are none, and nobody is limited by one."""
    problems: tuple[Problem, ...] = ()
    """What is wrong with the file."""
    warnings: tuple[Problem, ...] = ()
    """What is valid but cannot hold, like guarantees of teams that exceed their department's."""


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
