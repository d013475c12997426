"""The folder of each grant: the devices of one GPU that one container was given. It is mounted into the container.

pod_sockets.py says what listens in it. The folders belong to root and are mounted read-only: a container connects to
its socket and writes nothing, whatever user it runs as. The agent relies on that as little as it can: it removes the
files that it made, by their names, and never looks for others.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from gpushare_spawner.agent.state import removal
from gpushare_spawner.agent.state.removal import Discarded
from gpushare_spawner.agent.state.session_folder import SOCKET_NAME, PathTooLong, SessionFolder
from gpushare_spawner.agent.state.session_record import PodOwner

BELOW = "s"
"""The session's folder in a grant's."""


def grant_name(devices: Iterable[str]) -> str:
    """The name of a grant's folder.

    It follows from the ids, which are one pod's alone: whoever sees the ids in the kubelet's list knows the folder,
    also after everything here was lost.
    """
    return hashlib.sha256("\n".join(sorted(devices)).encode()).hexdigest()[:16]


def folder_names(pod: PodOwner) -> tuple[str, ...]:
    """The names of the folders that a session's pod has mounted: its claim's, else one for each grant."""
    return pod.folders or tuple(grant_name(ids) for ids in pod.grants)


def socket_in(folder: Path) -> Path:
    """Where the socket of the session will be that gets this grant's folder."""
    return folder / BELOW / SOCKET_NAME


def make_fresh(folder: Path) -> None:
    """Make an empty folder in place of what an earlier holder of the same devices had. Raises OSError."""
    remove(folder)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir()
    os.chmod(folder, 0o755)


def make(folder: Path) -> None:
    """The folder, if it is not there already. Raises OSError."""
    # containers see their own folder through a mount; on the machine itself nobody is to pass
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    os.chmod(folder, 0o755)


def remove(folder: Path) -> None:
    """Take a grant's folder away; what cannot be removed is left."""
    with contextlib.suppress(OSError, PathTooLong):
        aside = discarded(folder)
        try:
            SessionFolder(folder, BELOW, aside).remove()
            os.rmdir(folder)
        except FileNotFoundError:
            pass
        except OSError:
            aside.take(folder)


def discarded(folder: Path) -> Discarded:
    """What a grant's folder is moved to where something else is in it."""
    return Discarded(folder.parent.parent / removal.FOLDER)
