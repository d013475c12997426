"""Where a session's socket lies: a folder that only the session's user may enter."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

SOCKET_NAME = "gpu"
MAX_PATH_BYTES = 107
"""sun_path has 108 bytes, the last one for the zero."""


class PathTooLong(ValueError):
    """A Unix socket cannot have this path."""


def check_length(path: Path) -> None:
    """Raises PathTooLong, saying what would be right."""
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise PathTooLong(
            f"the path of a Unix socket may have {MAX_PATH_BYTES} bytes, {path} has {length}; use a shorter --state-dir"
        )


class SessionFolder:
    """The folder of one session.

    Everything is made in a fresh folder that is the agent's own, and handed to the user last: the agent, which may be
    root, never works inside a folder where the user could have laid a trap.
    """

    def __init__(self, parent: Path, name: str) -> None:
        """Raises PathTooLong."""
        self.path = parent / name
        self._fresh = parent / f"{name}+"
        check_length(self._fresh / SOCKET_NAME)

    @property
    def socket_path(self) -> Path:
        return self.path / SOCKET_NAME

    def listen(self, uid: int | None) -> socket.socket:
        """A listening, non-blocking SOCK_SEQPACKET socket in place of whatever was there. Raises OSError.

        `uid`: whose folder it is; None where the folder is seen by its user alone anyhow, under whatever uid.
        """
        self._empty(self._fresh)
        self._fresh.mkdir(mode=0o700)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            listener.bind(os.fspath(self._fresh / SOCKET_NAME))
            # the folder is what keeps others out
            os.chmod(self._fresh / SOCKET_NAME, 0o666)
            listener.listen(128)
            if uid is None:
                os.chmod(self._fresh, 0o755)
            elif uid != os.geteuid():
                os.chown(self._fresh, uid, -1)
            self._empty(self.path)
            os.rename(self._fresh, self.path)
        except BaseException:
            listener.close()
            self._empty(self._fresh)
            raise
        return listener

    def remove(self) -> None:
        """Take the folder away; what cannot be removed is left."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _empty(self, path: Path) -> None:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
