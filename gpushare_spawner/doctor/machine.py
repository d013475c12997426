"""The machine that the doctor checks: its file system and its environment. No check reads either of them elsewhere."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_KUBELET = Path("/var/lib/kubelet")


@dataclass(frozen=True)
class Machine:
    """A root folder and environment variables. By default they are those of this process."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def path(self, path: Path) -> Path:
        """Return where a path of the machine is, as this process sees it. A relative path stays as it is."""
        return self.root / path.relative_to("/") if path.is_absolute() else path

    def program(self, name: str) -> str:
        """Return the path of a program in the folders of $PATH; empty if there is none."""
        folders = self.environment.get("PATH", os.defpath).split(os.pathsep)
        return shutil.which(name, path=os.pathsep.join(str(self.path(Path(folder))) for folder in folders)) or ""

    @property
    def kubelet(self) -> Path:
        """The kubelet's root folder."""
        return self.path(_KUBELET)

    @property
    def in_pod(self) -> bool:
        """Whether this process is in a container of a cluster, like the agent's. It cannot see the node's programs."""
        return bool(self.environment.get("KUBERNETES_SERVICE_HOST"))

    @property
    def on_node(self) -> bool:
        """Whether the machine is a node of a cluster, or this process is in a container of a cluster."""
        return self.in_pod or self.kubelet.is_dir()
