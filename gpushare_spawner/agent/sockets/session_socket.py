"""The SOCK_SEQPACKET socket of each session: permitted users, number of connections, and their rate.

`SessionEndpoint` and `SessionEndpoints` are interfaces, so that the registry of sessions distinguishes neither
processes nor pods. Connections are in connection.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from pathlib import Path
from typing import Protocol

from gpushare_spawner.agent.sockets.connection import (
    NOT_ALLOWED,
    Connection,
    FairReading,
    FrameHandler,
    credentials,
    identified,
)
from gpushare_spawner.agent.state.folder import SessionFolder, StateFolder
from gpushare_spawner.agent.state.records import SessionRecord, short_name
from gpushare_spawner.clocks import Budget
from gpushare_spawner.descriptors import Acceptor, is_reserved
from gpushare_spawner.log_once import LogOnce
from gpushare_spawner.model.frames import Frame, Kind

log = logging.getLogger(__name__)


MAX_CONNECTIONS = 128
"""Connections of one session at a time: a notebook server has a few CUDA processes and a few observers."""
CONNECTIONS_PER_SECOND = 100
"""Connections per second in the long run. A session may make `MAX_CONNECTIONS` at once: after a restart all return."""
ACCEPTED_AT_ONCE = 16
"""Connections of one socket that are accepted before other sessions have their turn."""
LOG_LINES_PER_SECOND = 0.2
LOG_LINES_AT_ONCE = 20
"""Lines in the log about one session's peers."""

_NO_DESCRIPTORS = LogOnce(
    log, "connections of sessions are rejected", "connections of sessions are accepted again", lasts=10.0
)
"""A single instance for all sockets."""


class Traffic:
    """Shared by the sockets of one session: connections, budget of frames, lines in the log."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.reading = FairReading(loop)
        self.connects = Budget(loop.time, CONNECTIONS_PER_SECOND, MAX_CONNECTIONS, debt=1)
        self.log_lines = Budget(loop.time, LOG_LINES_PER_SECOND, LOG_LINES_AT_ONCE, debt=1)
        self.connections: set[Connection] = set()


class SessionSocket:
    """Listening socket of one session, for its user, the agent's own user, and root."""

    def __init__(
        self, folder: SessionFolder, uid: int | None, listener: FrameHandler, traffic: Traffic | None = None
    ) -> None:
        """Listen in the session's folder. Raises OSError if the socket cannot be made.

        `uid`: the permitted user beside the agent's own user and root; None: every user that reaches the
        folder. `traffic` is shared by the sockets of one session.
        """
        self._folder = folder
        self.listener = listener
        self.loop = asyncio.get_running_loop()
        self._traffic = traffic if traffic is not None else Traffic()
        self.reading = self._traffic.reading
        self._uids = None if uid is None else {uid, os.geteuid(), 0}
        self._connections: set[Connection] = set()
        self._socket = folder.listen(uid)
        self._acceptor = Acceptor(self._socket, self._welcome, _NO_DESCRIPTORS, ACCEPTED_AT_ONCE)

    def close(self, code: int | None = None) -> None:
        """Stop listening and end all connections; the folder stays."""
        self._acceptor.close()
        for connection in list(self._connections):
            connection.end(code)

    @property
    def path(self) -> Path:
        """Path of the socket."""
        return self._folder.socket_path

    def remove(self) -> None:
        """Remove its folder."""
        self._folder.remove()

    def log_peer(self, message: str, *arguments: object, trace: bool = False) -> None:
        """Log an action of a peer, at a limited rate."""
        if self._traffic.log_lines.spend():
            log.log(logging.ERROR if trace else logging.INFO, message, *arguments, exc_info=trace)

    def forget(self, connection: Connection) -> None:
        """Remove a connection that has ended."""
        self._connections.discard(connection)
        self._traffic.connections.discard(connection)
        self.listener.ended(connection)

    def _welcome(self, accepted: socket.socket) -> None:
        if not self._traffic.connects.spend():
            self._acceptor.pause(self._traffic.connects.wait())
        if is_reserved(accepted.fileno()):
            _NO_DESCRIPTORS.about("too many files are open; raise the agent's limit (ulimit -n, LimitNOFILE)")
            _reject(accepted)
            return
        accepted.setblocking(False)
        pid, uid = credentials(accepted)
        if self._uids is not None and uid not in self._uids:
            self.log_peer("process %d of uid %d may not use the socket %s", pid, uid, self.path)
            _reject(accepted)
        elif len(self._traffic.connections) >= MAX_CONNECTIONS:
            self.log_peer(
                "the session of %s has %d connections: process %d is rejected", self.path, MAX_CONNECTIONS, pid
            )
            _reject(accepted)
        else:
            self._identify(accepted, pid)

    def _identify(self, accepted: socket.socket, pid: int) -> None:
        """Add the connection if the process that connected still runs."""
        try:
            peer = identified(accepted)
        except ProcessLookupError:
            # Another process has its end of the connection, so its work could not be attributed.
            self.log_peer("process %d connected to %s and ended", pid, self.path)
            _reject(accepted)
        except OSError as error:
            _NO_DESCRIPTORS.about(f"process {pid} cannot be identified: {error.strerror}")
            _reject(accepted)
        else:
            connection = Connection(self, accepted, peer)
            self._connections.add(connection)
            self._traffic.connections.add(connection)


def _reject(accepted: socket.socket) -> None:
    with contextlib.suppress(OSError):
        accepted.send(Frame(Kind.ERROR, (NOT_ALLOWED,), serial=1).pack())
    accepted.close()


class SessionEndpoint(Protocol):
    """One or more listening sockets of one session."""

    @property
    def path(self) -> Path:
        """Path of the socket; with several sockets of the first."""

    def close(self, code: int | None = None) -> None:
        """Stop listening and end all connections with this error code of the protocol; the folders stay."""

    def remove(self) -> None:
        """Remove the folders. Raises OSError."""


class SessionEndpoints(Protocol):
    """Makes the endpoint of each session: `ProcessEndpoints`, or `kubernetes.pods.sessions.PodEndpoints`."""

    def listen(self, record: SessionRecord, listener: FrameHandler) -> SessionEndpoint:
        """Make the endpoint. Raises OSError, OverflowError (a uid that no user can have) or PathTooLong."""


class ProcessEndpoints:
    """Makes one socket for each session, in a folder of its own in the state folder."""

    def __init__(self, folder: StateFolder) -> None:
        self._folder = folder

    def listen(self, record: SessionRecord, listener: FrameHandler) -> SessionEndpoint:
        """Make the socket. Raises OSError, OverflowError or PathTooLong."""
        folder = SessionFolder(self._folder.sockets, short_name(record.request.id), self._folder.discarded)
        return SessionSocket(folder, record.request.uid, listener)
