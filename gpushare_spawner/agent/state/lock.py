"""One agent for each state folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class AlreadyRunning(RuntimeError):
    """Another agent works on this state folder."""


class FolderLock:
    """Holds ``agent.lock`` in a folder until closed; the kernel lets it go when the process dies, however it dies."""

    def __init__(self, folder: Path) -> None:
        """Raises AlreadyRunning, naming the other agent's process."""
        self._file = os.open(folder / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._file, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._file)
            raise AlreadyRunning(
                f"another agent (process {holder}) already works on {folder}; "
                "stop it, or give this one another --state-dir"
            ) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Let another agent have the folder."""
        os.close(self._file)
