"""A finding, the result of one check, and the machine that the doctor checks. Pure, except for `Machine`.

`Machine` provides the file system and the environment variables; all checks read them there.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    SKIPPED = "skipped"
    """The check was not made, for the reason in `what`."""
    NOTE = "note"
    """The checked part works, but could be better."""
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    level: Level
    where: str
    """The checked part: a path, a device or a program."""
    what: str
    remedy: str = ""
    """The action to take; empty if there is none."""


def ok(where: str, what: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(Level.OK, where, what)


def skipped(where: str, what: str) -> Finding:
    """Return a finding for a check that was not made, with the reason."""
    return Finding(Level.SKIPPED, where, what)


def note(where: str, what: str, remedy: str) -> Finding:
    """Return a finding for a part that could be better."""
    return Finding(Level.NOTE, where, what, remedy)


def problem(where: str, what: str, remedy: str) -> Finding:
    """Return a finding for a part that does not work."""
    return Finding(Level.PROBLEM, where, what, remedy)


def closed_part(path: Path) -> str:
    """Return the first folder on the path, or the file itself, that other users cannot use; empty if there is none."""
    for part in (*reversed(path.parents), path):
        try:
            mode = part.stat().st_mode
        except OSError:
            break
        if not mode & (stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH):
            return str(part)
    return ""


_KUBELET = Path("/var/lib/kubelet")


@dataclass(frozen=True)
class Machine:
    """A root folder and environment variables; by default those of this process."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def path(self, path: Path) -> Path:
        """Return the machine's path as this process sees it. A relative path is returned unchanged."""
        return self.root / path.relative_to("/") if path.is_absolute() else path

    def program(self, name: str) -> str:
        """Return the path of a program in $PATH; empty if there is none."""
        folders = self.environment.get("PATH", os.defpath).split(os.pathsep)
        return shutil.which(name, path=os.pathsep.join(str(self.path(Path(folder))) for folder in folders)) or ""

    @property
    def kubelet(self) -> Path:
        """The kubelet's root folder."""
        return self.path(_KUBELET)

    @property
    def in_pod(self) -> bool:
        """Whether this process is in a container of a cluster and so cannot see the node's programs."""
        return bool(self.environment.get("KUBERNETES_SERVICE_HOST"))

    @property
    def on_node(self) -> bool:
        """Whether the machine is a node of a cluster, or this process is in a container of a cluster."""
        return self.in_pod or self.kubelet.is_dir()

    @property
    def namespace(self) -> str:
        """The namespace of this pod, which is also the namespace of the hub and of sessions' claims."""
        return self.environment.get("POD_NAMESPACE") or "default"
