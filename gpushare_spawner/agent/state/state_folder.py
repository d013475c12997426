"""The agent's state folder: records that only the agent may read, and a folder for each session's socket."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from gpushare_spawner.agent.state import removal
from gpushare_spawner.agent.state.lock import FolderLock
from gpushare_spawner.agent.state.removal import Discarded
from gpushare_spawner.agent.state.session_folder import SOCKET_NAME, PathTooLong, SessionFolder, check_length
from gpushare_spawner.agent.state.session_records import RecordFolder, short_name

log = logging.getLogger(__name__)


class StateFolder:
    """``agent.lock``, ``gpus.json``, ``cordons.json``, ``records/`` and ``s/``.

    The latter has a short name because a socket's path has to be short.

    ``records/`` has a record of each session (``*.json``), and of processes that were left suspended (``*.left``).

    On Kubernetes also ``pods/``, with a folder for each grant of devices, which the pod gets mounted, and ``claims/``,
    with a file for each claim that is prepared. Where sessions share GPUs by MPS also ``mps/``, with a folder for each
    GPU's daemon.
    """

    def __init__(self, path: Path) -> None:
        """Makes what is not there and locks it. Raises AlreadyRunning, PathTooLong or OSError."""
        self.path = path
        self.sockets = path / "s"
        self.pods = path / "pods"
        self.claims = path / "claims"
        self.mps = path / "mps"
        self.gpus = path / "gpus.json"
        self.cordons = path / "cordons.json"
        check_length(self.sockets / short_name("") / f"{SOCKET_NAME}+")
        if not path.is_dir():
            path.mkdir(parents=True)
            # users pass through to their own folders, and cannot list what else is there
            os.chmod(path, 0o711)
        self._lock = FolderLock(path)
        self.sockets.mkdir(exist_ok=True)
        os.chmod(self.sockets, 0o711)
        self.records = RecordFolder(path / "records")
        self.discarded = Discarded(path / removal.FOLDER)

    def barrier(self) -> Path | None:
        """A folder on the way to the sockets that other users cannot pass; None: there is none."""
        return next((one for one in (self.path, *self.path.parents) if not one.stat().st_mode & 0o001), None)

    def remove_unknown_sockets(self, names: set[str]) -> None:
        """Take away socket folders of sessions that are no more."""
        for entry in self.sockets.iterdir():
            if entry.name not in names:
                try:
                    SessionFolder(self.sockets, entry.name, self.discarded).remove()
                except (OSError, PathTooLong) as error:
                    log.warning("%s, of a session that has ended, cannot be removed: %s", entry, error)

    def close(self) -> None:
        """Let another agent have the folder."""
        self._lock.close()
