"""The file `quotas.yaml` beside the templates: read again when it changes."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.templates.parser import QUOTAS
from gpushare_spawner.templates.problems import Problem, log_problems
from gpushare_spawner.templates.watched_file import WatchedFile, signature_of
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
    """The quotas beside the templates of a folder.

    A file with an error changes nothing: the last valid version stays in force, and the problem says so. A file that is
    removed ends all quotas. Problems and warnings are logged once, when they appear.
    """

    def __init__(self, folder: str | Path, log: logging.Logger | None = None) -> None:
        self.path = Path(folder) / QUOTA_FILE
        self._log = log or logging.getLogger(__name__)
        self._file: WatchedFile[Quotas] | None = None
        self._unreadable: Problem | None = None
        self._now = QuotasInForce()
        self._read_at: float | None = None

    def load(self, max_age: float = 0.0) -> QuotasInForce:
        """Return the quotas in force, and the problems. Cheap while the file does not change. Raises nothing.

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
            self._unreadable = Problem(QUOTA_FILE, None, "", what, "check that the hub may read it")
            return
        if self._file is None or self._file.outdated(signature):
            self._file = WatchedFile.read(QUOTAS, self.path, signature, self._file)

    def _in_force(self) -> QuotasInForce:
        unreadable = (self._unreadable,) if self._unreadable is not None else ()
        if self._file is None:
            return QuotasInForce(problems=unreadable)
        problems = (*unreadable, *self._file.problems(KEPT))
        good = self._file.good
        if good is None or good.content is None:
            return QuotasInForce(problems=problems)
        warnings = [
            Problem(QUOTA_FILE, good.lines.get(("groups", department, "guarantee")), f"groups.{department}", what)
            for department, what in exceeded_departments(good.content).items()
        ]
        return QuotasInForce(good.content, problems, tuple(warnings))

    def _log_changes(self, before: QuotasInForce) -> None:
        now = self._now
        log_problems(self._log, "Quotas", self.path, before.problems, now.problems)
        for warning in now.warnings:
            if warning not in before.warnings:
                self._log.warning("Quotas %s", warning)
        if before.quotas != now.quotas:
            self._log.info("Quotas in force: %s", "none" if now.quotas is None else self.path)
