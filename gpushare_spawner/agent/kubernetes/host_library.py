"""The libraries on the node, from where containers mount them.

A file that a process has mapped is never written to: each version is a new file that is renamed into place. A process
that has the old file open or mounted keeps it; later processes get the new one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from gpushare_spawner.agent.sessions.environment import Libraries

log = logging.getLogger(__name__)

_FRESH = ".new"


_SIMULATED = ("libcuda.so.1", "libnvidia-ml.so.1")


class CannotBeLoaded(RuntimeError):
    """Libraries in this folder cannot be loaded; the message has the reason and a remedy."""


@dataclass(frozen=True)
class HostLibraries(Libraries):
    """Paths on the node, which are the same in the containers."""

    preload_list: Path = field(kw_only=True)
    """A file to mount as /etc/ld.so.preload: it names the library."""


def install(libraries: Libraries, folder: Path) -> HostLibraries:
    """Copy the agent's libraries into a folder of the node. Raises OSError or CannotBeLoaded."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chmod(folder, 0o755)
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        # Its mount in a container would be noexec too, and programs would start without the library.
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
    return HostLibraries(preload, simulated, preload_list=preload_list)


def replace_file(content: bytes, target: Path, mode: int) -> bool:
    """Put a file with this content into place atomically; False: it is already there. Raises OSError."""
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
            # a container runtime makes a folder in place of a missing file of a mount
            target.rmdir()
        os.replace(fresh, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise
    log.info("installed %s", target)
    return True


def remove_leftovers(folder: Path) -> None:
    """Remove the files of an installation that was killed."""
    for path in folder.glob(f".*{_FRESH}"):
        with contextlib.suppress(OSError):
            path.unlink()
