"""The agent's state folder: private records, a folder for each session's socket, and the lock.

`SessionFolder` is the folder of a session's socket: owned by the agent; the session's user can pass it and not write to
it. `FolderLock` permits one agent for each state folder. The records themselves are in records.py.

`Discarded` holds unwanted folders with unknown contents: moved there at once, removed in small steps. An agent of an
earlier version gave each session's folder to the session's user, who could fill it with many files, or with folders
inside folders. An immediate removal would take the event loop's time or a deep recursion. The code neither recurses,
nor follows a link, nor leaves a folder to its former owner.
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
"""On the same file system as the folders that are moved here: a rename cannot cross file systems."""
AT_ONCE = 1000
"""Entries that one `drain` removes."""
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Discarded:
    """A folder of the agent's own for unwanted folders."""

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
        """Move a folder or file here. A missing path is no error. Raises OSError."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, self.path / secrets.token_hex(8))

    def drain(self, at_most: int = AT_ONCE) -> None:
        """Remove at most so many entries; blocks on the disk. An entry that cannot be removed stays."""
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
        """Remove an entry of this folder, or a part of it: folders in it become entries here.

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
"""sun_path has 108 bytes, the last one for the zero."""


class PathTooLong(ValueError):
    """A Unix socket cannot have this path."""


def check_length(path: Path) -> None:
    """Raise PathTooLong, with a suitable length in the message."""
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise PathTooLong(
            f"the path of a Unix socket may have {MAX_PATH_BYTES} bytes, {path} has {length}; use a shorter --state-dir"
        )


class SessionFolder:
    """The folder of one session.

    The folder belongs to the agent and the socket in it to the session's user, who can connect and make nothing. So
    the agent, which may be root, meets no foreign entries in it.
    """

    def __init__(self, parent: Path, name: str, discarded: Discarded) -> None:
        """Prepare the paths. `discarded`: the target for any entry in the socket's place. Raises PathTooLong."""
        self.path = parent / name
        self._discarded = discarded
        check_length(self.path / _FRESH)

    @property
    def socket_path(self) -> Path:
        return self.path / SOCKET_NAME

    def listen(self, uid: int | None) -> socket.socket:
        """Return a listening, non-blocking SOCK_SEQPACKET socket in place of any earlier entry.

        Raises OSError or OverflowError (a uid that no user can have). `uid`: the owner of the socket; None
        if only its user sees the folder, under any uid.
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
        """Make the folder, in place of a folder that the user could write to (of an earlier version)."""
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(self.path)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                self._discarded.take(self.path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path, mode=0o700)


class AlreadyRunning(RuntimeError):
    """Another agent works on this state folder."""


class FolderLock:
    """The lock ``agent.lock`` in a folder, held until closed; the kernel releases it when the process ends."""

    def __init__(self, folder: Path) -> None:
        """Take the lock. Raises AlreadyRunning, with the other agent's process."""
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
        """Release the lock."""
        os.close(self._file)


class StateFolder:
    """Files and folders of the agent: ``agent.lock``, ``gpus.json``, ``cordons.json``, ``records/`` and ``s/``.

    ``s/`` has a short name because a socket's path has to be short. ``records/`` has a record of each session
    (``*.json``), and of processes that were left suspended (``*.left``). On Kubernetes also ``pods/``, with a
    folder for each grant of devices, which is mounted into the pod, and ``claims/``, with a file for each prepared
    claim. Where sessions share GPUs by MPS also ``mps/``, with a folder for each GPU's daemon.
    """

    def __init__(self, path: Path) -> None:
        """Make missing folders and take the lock. Raises AlreadyRunning, PathTooLong or OSError."""
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
            # users pass through to their own folders, and cannot list the others
            os.chmod(path, 0o711)
        self._lock = FolderLock(path)
        self.sockets.mkdir(exist_ok=True)
        os.chmod(self.sockets, 0o711)
        self.records = RecordFolder(path / "records")
        self.discarded = Discarded(path / FOLDER)

    def barrier(self) -> Path | None:
        """Return a folder on the way to the sockets that other users cannot pass; None if there is none."""
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
        """Release the folder to another agent."""
        self._lock.close()
