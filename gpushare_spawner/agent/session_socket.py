"""One SOCK_SEQPACKET socket for each session: who may connect, how many, and how often."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import struct
from pathlib import Path

from gpushare_spawner.agent.budget import Budget
from gpushare_spawner.agent.connection import FRAMES_AT_ONCE, NOT_ALLOWED, PAUSE, Connection, Listener, Peer
from gpushare_spawner.agent.session_folder import SessionFolder
from gpushare_spawner.model.frames import Frame, Kind

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 128
"""Of one session at a time: a notebook server has a few CUDA processes and a few observers."""
FRAMES_PER_SECOND = 4000
"""What a session may send for long; a burst of work begins and ends some hundred times a second at most."""
FRAMES_IN_STORE = 2000
"""What it may send at once after a pause."""
COST_OF_CONNECTION = 40
"""In frames."""
COMPLAINTS_PER_SECOND = 0.2
COMPLAINTS_IN_STORE = 20
"""Lines in the log about one session's peers."""

_CREDENTIALS = struct.Struct("3i")


class SessionSocket:
    """Listens for one session and lets its user in, the agent's own user, and root."""

    def __init__(self, folder: SessionFolder, uid: int | None, listener: Listener) -> None:
        """`uid`: who is let in beside the agent's own user and root; None: whoever reaches the folder.

        Raises OSError where the socket cannot be made.
        """
        self._folder = folder
        self.listener = listener
        self.loop = asyncio.get_running_loop()
        self.budget = Budget(self.loop.time, FRAMES_PER_SECOND, FRAMES_IN_STORE)
        self._complaints = Budget(self.loop.time, COMPLAINTS_PER_SECOND, COMPLAINTS_IN_STORE)
        self._uids = None if uid is None else {uid, os.geteuid(), 0}
        self._connections: set[Connection] = set()
        self._socket = folder.listen(uid)
        self.loop.add_reader(self._socket, self._acceptable)

    def close(self, code: int | None = None) -> None:
        """Stop listening and end all connections; the folder stays."""
        self.loop.remove_reader(self._socket)
        self._socket.close()
        for connection in list(self._connections):
            connection.end(code)

    @property
    def path(self) -> Path:
        """Where it listens."""
        return self._folder.socket_path

    def remove(self) -> None:
        """Take its folder away."""
        self._folder.remove()

    def complain(self, message: str, *arguments: object, trace: bool = False) -> None:
        """Say in the log what a peer did, but not as often as it does it."""
        if self._complaints.spend():
            log.log(logging.ERROR if trace else logging.INFO, message, *arguments, exc_info=trace)

    def forget(self, connection: Connection) -> None:
        """The connection ended."""
        self._connections.discard(connection)
        self.listener.ended(connection)

    def _acceptable(self) -> None:
        for _ in range(FRAMES_AT_ONCE):
            try:
                accepted, _address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    raise
                self.complain("no connection can be accepted for a while: %s", error.strerror)
                self._pause(1.0)
                return
            self._welcome(accepted)
            if not self.budget.spend(COST_OF_CONNECTION):
                self._pause(PAUSE)
                return

    def _welcome(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _gid = _CREDENTIALS.unpack(credentials)
        if self._uids is not None and uid not in self._uids:
            self.complain("process %d of uid %d may not use the socket %s", pid, uid, self.path)
            _turn_away(accepted)
        elif len(self._connections) >= MAX_CONNECTIONS:
            self.complain("%s has %d connections: process %d is turned away", self.path, MAX_CONNECTIONS, pid)
            _turn_away(accepted)
        else:
            self._connections.add(Connection(self, accepted, Peer(pid, uid)))

    def _pause(self, seconds: float) -> None:
        self.loop.remove_reader(self._socket)
        self.loop.call_later(seconds, self._listen_again)

    def _listen_again(self) -> None:
        if self._socket.fileno() >= 0:
            self.loop.add_reader(self._socket, self._acceptable)


def _turn_away(accepted: socket.socket) -> None:
    with contextlib.suppress(OSError):
        accepted.send(Frame(Kind.ERROR, (NOT_ALLOWED,), serial=1).pack())
    accepted.close()
