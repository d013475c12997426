"""The libraries on the node, where containers get them mounted from.

A file that a process has mapped is never written to: each version is a new file, renamed into its place. Who has the
old one open or mounted keeps it; who starts later gets the new one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gpushare_spawner.agent.sessions.environment import Libraries

log = logging.getLogger(__name__)

_FRESH = ".new"


_SIMULATED = ("libcuda.so.1", "libnvidia-ml.so.1")


class CannotBeLoaded(RuntimeError):
    """What lies in this folder is not to be executed; the message says why, and what would be right."""


@dataclass(frozen=True)
class HostLibraries:
    """Paths on the node, which are the same in the containers."""

    preload: Path
    """libgpushare.so"""
    preload_list: Path
    """A file to mount as /etc/ld.so.preload: it names the library."""
    simulated_driver: Path | None = None
    """Folder of the simulated driver; None on a node with real GPUs."""

    @property
    def as_seen(self) -> Libraries:
        """For the environment of a session."""
        return Libraries(preload=self.preload, simulated_driver=self.simulated_driver)


def install(libraries: Libraries, folder: Path) -> HostLibraries:
    """Put the libraries that came with the agent into a folder of the node. Raises OSError or CannotBeLoaded."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chmod(folder, 0o755)
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        # a mount of it into a container would be so too: programs would start without the library
        raise CannotBeLoaded(
            f"{folder} is on a file system that is mounted with noexec, so that no program can load a library from "
            "it; use a folder on another one"
        )
    remove_leftovers(folder)
    preload = folder / "libgpushare.so"
    replace_file(libraries.preload.read_bytes(), preload, 0o755)
    preload_list = folder / "ld.so.preload"
    replace_file(f"{preload}\n".encode(), preload_list, 0o644)
    simulated = None
    if libraries.simulated_driver is not None:
        simulated = folder / "simgpu"
        simulated.mkdir(exist_ok=True)
        os.chmod(simulated, 0o755)
        remove_leftovers(simulated)
        for name in _SIMULATED:
            replace_file((libraries.simulated_driver / name).read_bytes(), simulated / name, 0o755)
    return HostLibraries(preload, preload_list, simulated)


def replace_file(content: bytes, target: Path, mode: int) -> bool:
    """Put a file with this content into its place at one stroke; False where it is there already. Raises OSError."""
    with contextlib.suppress(OSError):
        if target.is_file() and not target.is_symlink() and target.read_bytes() == content:
            if target.stat().st_mode & 0o777 != mode:
                os.chmod(target, mode)
            return False
    descriptor, fresh = tempfile.mkstemp(prefix=f".{target.name}.", suffix=_FRESH, dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
            file.flush()
            os.fsync(file.fileno())
        if target.is_dir() and not target.is_symlink():
            # a container runtime makes a folder where a file to be mounted was missing
            target.rmdir()
        os.replace(fresh, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise
    log.info("installed %s", target)
    return True


def remove_leftovers(folder: Path) -> None:
    """Take away what an installation left that was killed."""
    for path in folder.glob(f".*{_FRESH}"):
        with contextlib.suppress(OSError):
            path.unlink()
