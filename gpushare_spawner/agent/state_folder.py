"""The agent's state folder: private records, a folder for each session's socket, and the lock.

`SessionFolder` is the folder of a session's socket. The agent owns it; the session's user can traverse it but not write
to it. `FolderLock` permits one agent per state folder. records.py handles the records themselves.

`Discarded` holds unwanted folders with unknown contents, which are moved there immediately and removed in small steps.
An earlier version of the agent gave each session's folder to the session's user, so it could contain many files or
deeply nested folders. Immediate removal could block the event loop or recurse too deeply. The code does not recurse,
follow links or leave a folder to its former owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import socket
import stat
from itertools import islice
from pathlib import Path

from gpushare_spawner.agent.session_records import RecordFolder, short_name

log = logging.getLogger(__name__)


FOLDER = "discarded"
"""Name of the folder. It is on the same file system as the moved folders: a rename cannot cross file systems."""
AT_ONCE = 1000
"""Maximum number of entries that one `drain` removes."""
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Discarded:
    """The agent's own folder for unwanted folders."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def empty(self) -> bool:
        """Return whether nothing is left to remove."""
        try:
            with os.scandir(self.path) as entries:
                return next(entries, None) is None
        except OSError:
            return True

    def take(self, path: Path) -> None:
        """Move a folder or file here. A missing path is not an error. Raises OSError."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, self.path / secrets.token_hex(8))

    def drain(self, at_most: int = AT_ONCE) -> None:
        """Remove at most `at_most` entries. Blocks on the disk. An entry that cannot be removed stays."""
        try:
            here = os.open(self.path, _OPEN_FOLDER)
        except FileNotFoundError:
            return
        try:
            with os.scandir(here) as entries:
                names = [entry.name for entry in islice(entries, at_most)]
            left = at_most
            for name in names:
                if left <= 0:
                    return
                left -= self._remove(here, name, left)
        finally:
            os.close(here)

    def _remove(self, here: int, name: str, at_most: int) -> int:
        """Remove an entry of this folder, or a part of the entry: folders in it become entries here.

        Return the number of entries that were removed or moved, at least 1.
        """
        try:
            if not stat.S_ISDIR(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=here)
                return 1
            folder = os.open(name, _OPEN_FOLDER, dir_fd=here)
        except OSError as error:
            log.debug("%s in %s stays: %s", name, self.path, error)
            return 1
        done = 1
        try:
            # from now on its former owner can create nothing in it, not even through an open file descriptor
            os.fchown(folder, os.geteuid(), -1)
            os.fchmod(folder, 0o700)
            with os.scandir(folder) as entries:
                batch = list(islice(entries, at_most))
            for entry in batch:
                if entry.is_dir(follow_symlinks=False):
                    os.rename(entry.name, secrets.token_hex(8), src_dir_fd=folder, dst_dir_fd=here)
                else:
                    os.unlink(entry.name, dir_fd=folder)
                done += 1
            if len(batch) < at_most:
                os.rmdir(name, dir_fd=here)
        except OSError as error:
            log.debug("%s in %s is not removed: %s", name, self.path, error)
        finally:
            os.close(folder)
        return done


SOCKET_NAME = "gpu"
_FRESH = f"{SOCKET_NAME}+"
MAX_PATH_BYTES = 107
"""Maximum length of a socket path: sun_path has 108 bytes, including the terminating zero."""


class PathTooLong(ValueError):
    """Error for a path that is too long for a Unix socket."""


def check_length(path: Path) -> None:
    """Raise PathTooLong if the path is too long, with a suitable length in the message."""
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise PathTooLong(
            f"a Unix socket's path can have {MAX_PATH_BYTES} bytes, and {path} has {length}; use a shorter --state-dir"
        )


class SessionFolder:
    """The folder of one session.

    The agent owns the folder, and the session's user owns the socket in it. The user can connect but cannot create
    entries, so the agent, which may be root, never encounters foreign entries in it.
    """

    def __init__(self, parent: Path, name: str, discarded: Discarded) -> None:
        """Prepare the paths. `discarded`: the destination of any entry in the socket's place. Raises PathTooLong."""
        self.path = parent / name
        self._discarded = discarded
        check_length(self.path / _FRESH)

    @property
    def socket_path(self) -> Path:
        return self.path / SOCKET_NAME

    def listen(self, uid: int | None) -> socket.socket:
        """Return a listening, non-blocking SOCK_SEQPACKET socket that replaces any earlier entry.

        Raises OSError or OverflowError (a uid that no user can have). `uid`: the owner of the socket; None if only the
        session's user, with any uid, can reach the folder.
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
        """Create the folder, replacing a folder from an earlier version to which the user could write."""
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(self.path)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                self._discarded.take(self.path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path, mode=0o700)


class AlreadyRunning(RuntimeError):
    """Error for a state folder that another agent uses."""


class FolderLock:
    """The lock ``agent.lock`` in a folder, held until closed; the kernel releases it when the process ends."""

    def __init__(self, folder: Path) -> None:
        """Take the lock. Raises AlreadyRunning, with the other agent's pid."""
        self._file = os.open(folder / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._file, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._file)
            raise AlreadyRunning(
                f"another agent (process {holder}) already works on {folder}; stop it, or use a different --state-dir"
            ) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._file)


class StateFolder:
    """Files and folders of the agent: ``agent.lock``, ``gpus.json``, ``cordons.json``, ``records/`` and ``s/``.

    ``s/`` has a short name because a socket's path must be short. ``records/`` contains the records of sessions
    (``*.json``) and of processes that were left suspended (``*.left``). On Kubernetes there are also ``pods/``, with a
    folder for each device grant, which is mounted into the pod, and ``claims/``, with a file for each prepared claim.
    If sessions share GPUs through MPS, there is also ``mps/``, with a folder for each GPU's daemon.
    """

    def __init__(self, path: Path) -> None:
        """Create missing folders and take the lock. Raises AlreadyRunning, PathTooLong or OSError."""
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
            # users can reach their own folders, and cannot list the others
            os.chmod(path, 0o711)
        self._lock = FolderLock(path)
        self.sockets.mkdir(exist_ok=True)
        os.chmod(self.sockets, 0o711)
        self.records = RecordFolder(path / "records")
        self.discarded = Discarded(path / FOLDER)

    def barrier(self) -> Path | None:
        """Return a folder on the path to the sockets that other users cannot traverse; None if there is none."""
        return next((folder for folder in (self.path, *self.path.parents) if not folder.stat().st_mode & 0o001), None)

    def remove_unknown_sockets(self, names: set[str]) -> None:
        """Remove socket folders of sessions that no longer exist."""
        for entry in self.sockets.iterdir():
            if entry.name not in names:
                try:
                    SessionFolder(self.sockets, entry.name, self.discarded).remove()
                except (OSError, PathTooLong) as error:
                    log.warning("%s, of a session that has ended, cannot be removed: %s", entry, error)

    def close(self) -> None:
        """Release the folder for another agent."""
        self._lock.close()
