"""The demo's folder: all files that the demo writes, and the lock that prevents a second demo in it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import stat
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

LONGEST_SOCKET_FOLDER = 50
"""A Unix socket's path has at most 107 bytes; the agent needs the rest for the session's id."""


class DemoFolder:
    """``.demo``: the hub's database, the users' homes, logs, sockets. Delete it to start with an empty demo."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.hub_log = self.root / "hub.log"
        self.agent_log = self.root / "agent.log"
        self.agent_state = short_folder(self.root / "agent")
        self.control_socket = self.agent_state / "control.sock"
        self.templates = self.root / "templates"
        self.users = self.root / "users"
        self.programs = self.root / "bin"
        self._lock: IO[str] | None = None

    def make(self) -> None:
        """Make the folders. Raises OSError."""
        for folder in (self.root, self.agent_state, self.users):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = self.agent_state.lstat()
        if state.st_uid != os.getuid() or not stat.S_ISDIR(state.st_mode):
            # in /tmp any user could have made the folder before
            raise PermissionError(0, "it belongs to another user", str(self.agent_state))

    def write_nvidia_smi(self) -> None:
        """Write a program nvidia-smi, which is `gpushare smi`: simulated GPUs come without a driver. Raises OSError."""
        self.programs.mkdir(mode=0o700, exist_ok=True)
        program = self.programs / "nvidia-smi"
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m gpushare_spawner.cli smi "$@"\n')
        program.chmod(0o700)

    def lock(self) -> dict[str, Any] | None:
        """Lock the folder. Returns None, or the pid and url that the demo which holds the lock wrote."""
        # "a+": opening the file must not delete the text of the running demo
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

    def write_address(self, url: str) -> None:
        """Write pid and url into the lock, for a second demo."""
        assert self._lock is not None
        self._lock.truncate(0)
        json.dump({"pid": os.getpid(), "url": url}, self._lock)
        self._lock.flush()


def short_folder(path: Path) -> Path:
    """Return the path itself, or one in /tmp if sockets below the path would have too long a name."""
    if len(str(path)) <= LONGEST_SOCKET_FOLDER:
        return path
    name = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"gpushare-demo-{os.getuid()}-{name}"
