"""The libraries on the node, where containers mount them from.

A file that a process has mapped is never overwritten: each version is a new file that is renamed into place. A process
that has the old file open or mounted keeps using it; later processes get the new file.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

from gpushare_spawner.agent.session_records import replace_file
from gpushare_spawner.agent.sessions.environment import Libraries

log = logging.getLogger(__name__)

_SIMULATED = ("libcuda.so.1", "libnvidia-ml.so.1")


class CannotBeLoaded(RuntimeError):
    """Error for a folder from which libraries cannot be loaded. The message contains the reason and a remedy."""


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
        # Its mount in a container would also be noexec, and programs would start without the library.
        raise CannotBeLoaded(
            f"{folder} is on a file system that is mounted with noexec, so programs cannot load libraries from "
            "it; use a folder on another file system"
        )
    preload = folder / "libgpushare.so"
    put_into_place(libraries.preload.read_bytes(), preload, 0o755)
    preload_list = folder / "ld.so.preload"
    put_into_place(f"{preload}\n".encode(), preload_list, 0o644)
    simulated = None
    if libraries.simulated_driver is not None:
        simulated = folder / "simgpu"
        simulated.mkdir(exist_ok=True)
        os.chmod(simulated, 0o755)
        for name in _SIMULATED:
            put_into_place((libraries.simulated_driver / name).read_bytes(), simulated / name, 0o755)
    return HostLibraries(preload, simulated, preload_list=preload_list)


def put_into_place(content: bytes, target: Path, mode: int) -> bool:
    """Create or replace a file atomically. Returns False if it already has this content. Raises OSError."""
    with contextlib.suppress(OSError):
        if target.is_file() and not target.is_symlink() and target.read_bytes() == content:
            if target.stat().st_mode & 0o777 != mode:
                os.chmod(target, mode)
            return False
    if target.is_dir() and not target.is_symlink():
        # a container runtime creates a folder in place of a missing mount source
        target.rmdir()
    replace_file(target, content, mode)
    log.info("installed %s", target)
    return True
