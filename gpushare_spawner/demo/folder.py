"""The demo's folder: everything it writes, and the lock that keeps a second one out."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import IO, Any

LONGEST_SOCKET_FOLDER = 50
"""A Unix socket's path has at most 107 bytes; the agent needs the rest for the session's id."""


class DemoFolder:
    """``.demo``: the hub's database, the users' homes, logs, sockets. Deleting it starts the demo afresh."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.hub_log = self.root / "hub.log"
        self.agent_log = self.root / "agent.log"
        self.agent_state = short_folder(self.root / "agent")
        self.control_socket = self.agent_state / "control.sock"
        self.templates = self.root / "templates"
        self.users = self.root / "users"
        self._lock: IO[str] | None = None

    def make(self) -> None:
        """Make the folders. Raises OSError."""
        for folder in (self.root, self.agent_state, self.users):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = self.agent_state.lstat()
        if state.st_uid != os.getuid() or not stat.S_ISDIR(state.st_mode):
            # in /tmp anybody could have made it before us
            raise PermissionError(0, "it belongs to somebody else", str(self.agent_state))

    def lock(self) -> dict[str, Any] | None:
        """Take the folder for this process: None. Or what the running demo said of itself: its pid and its url."""
        # "a+": the text of the one that runs must not be emptied by looking at it
        lock = (self.root / "lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            try:
                running: dict[str, Any] = json.loads(lock.read())
            except ValueError:
                running = {}
            lock.close()
            return running
        self._lock = lock
        return None

    def say_where(self, url: str) -> None:
        """For the one that finds the folder locked."""
        assert self._lock is not None
        self._lock.truncate(0)
        json.dump({"pid": os.getpid(), "url": url}, self._lock)
        self._lock.flush()


def short_folder(path: Path) -> Path:
    """The path itself, or one in /tmp that stands for it where sockets in it would have too long a path."""
    if len(str(path)) <= LONGEST_SOCKET_FOLDER:
        return path
    name = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"gpushare-demo-{os.getuid()}-{name}"
