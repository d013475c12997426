"""Unwanted folders with unknown contents: moved aside at once, removed a little at a time.

An agent of an earlier version gave each session's folder to the session's user, who could fill it with many files, or
with folders inside folders. Removing these at once would take the event loop's time or a deep recursion. Nothing here
is recursive, follows a link, or leaves a folder to its former owner.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
from itertools import islice
from pathlib import Path

log = logging.getLogger(__name__)

FOLDER = "discarded"
"""On the same file system as the folders that are moved here: a rename cannot cross file systems."""
AT_ONCE = 1000
"""Entries that one `drain` removes."""
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Discarded:
    """A folder of the agent's own that unwanted folders are moved into."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def empty(self) -> bool:
        """Nothing is left to remove."""
        try:
            with os.scandir(self.path) as entries:
                return next(entries, None) is None
        except OSError:
            return True

    def take(self, path: Path) -> None:
        """Move a folder or file here. One that is not there is no error. Raises OSError."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, self.path / secrets.token_hex(8))

    def drain(self, at_most: int = AT_ONCE) -> None:
        """Remove some of it, at most so many entries; blocks on the disk. What cannot be removed stays."""
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
        """Remove an entry of this folder, or a part of it: folders in it become entries here. How many were dealt
        with, at least 1."""
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
                found = list(islice(entries, at_most))
            for entry in found:
                if entry.is_dir(follow_symlinks=False):
                    os.rename(entry.name, secrets.token_hex(8), src_dir_fd=folder, dst_dir_fd=here)
                else:
                    os.unlink(entry.name, dir_fd=folder)
                done += 1
            if len(found) < at_most:
                os.rmdir(name, dir_fd=here)
        except OSError as error:
            log.debug("%s in %s is not removed: %s", name, self.path, error)
        finally:
            os.close(folder)
        return done
