"""Where a session's socket lies: a folder of the agent's own that the session's user can pass and not write to."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

from gpushare_spawner.agent.state.removal import Discarded

SOCKET_NAME = "gpu"
_FRESH = f"{SOCKET_NAME}+"
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

    The folder belongs to the agent and the socket in it to the session's user, who can connect and make nothing: so
    the agent, which may be root, meets nothing in it that somebody else has put there.
    """

    def __init__(self, parent: Path, name: str, discarded: Discarded) -> None:
        """`discarded`: the folder that anything in the socket's place is moved to. Raises PathTooLong."""
        self.path = parent / name
        self._discarded = discarded
        check_length(self.path / _FRESH)

    @property
    def socket_path(self) -> Path:
        return self.path / SOCKET_NAME

    def listen(self, uid: int | None) -> socket.socket:
        """A listening, non-blocking SOCK_SEQPACKET socket in place of whatever was there. Raises OSError or
        OverflowError (a uid that no user can have).

        `uid`: whose socket it is; None where the folder is seen by its user alone anyhow, under whatever uid.
        """
        self._make()
        fresh = self.path / _FRESH
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            fresh.unlink(missing_ok=True)
            listener.bind(os.fspath(fresh))
            os.chmod(fresh, 0o666 if uid is None else 0o600)
            if uid is not None and uid != os.geteuid():
                os.chown(fresh, uid, -1)
            os.chmod(self.path, 0o755 if uid is None else 0o700 if uid == os.geteuid() else 0o711)
            listener.listen(128)
            if self.socket_path.is_dir() and not self.socket_path.is_symlink():
                self._discarded.take(self.socket_path)
            os.rename(fresh, self.socket_path)
        except BaseException:
            listener.close()
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise
        return listener

    def remove(self) -> None:
        """Remove the folder. Raises OSError."""
        if self.path.is_symlink():
            self._discarded.take(self.path)
            return
        try:
            for name in (SOCKET_NAME, _FRESH):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.path / name)
            os.rmdir(self.path)
        except FileNotFoundError:
            pass
        except OSError:
            self._discarded.take(self.path)

    def _make(self) -> None:
        """Make the folder, in place of one that the user could write to (of an earlier version)."""
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(self.path)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                self._discarded.take(self.path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path, mode=0o700)
