"""One SOCK_SEQPACKET socket for each session: bytes, limits and who may connect. What frames mean: conversation.py.

A peer cannot hurt others: packets are read a few at a time, a session that sends too many is read more slowly, nothing
is ever waited for, and a peer that does not read what it is sent is disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol

from gpushare_spawner.agent.session_folder import SessionFolder
from gpushare_spawner.model.frames import FRAME_BYTES, NO_GPU, VERSION, Frame, FrameError, Kind

log = logging.getLogger(__name__)

MALFORMED, WRONG_VERSION, NOT_ALLOWED, SESSION_CLOSED = 1, 2, 3, 4
"""Codes of ERROR, see docs/protocol.md."""

MAX_CONNECTIONS = 128
"""Of one session at a time: a notebook server has a few CUDA processes and a few observers."""
MAX_UNREAD_FRAMES = 256
"""Frames kept for a peer whose socket buffer is full."""
FRAMES_AT_ONCE = 16
"""Frames read from a connection before the others have their turn."""
FRAMES_PER_SECOND = 4000
"""What a session may send for long; a burst of work begins and ends some hundred times a second at most."""
FRAMES_IN_STORE = 2000
"""What it may send at once after a pause."""
COST_OF_CONNECTION = 40
"""In frames."""
COSTS = {Kind.QUERY: 50}
"""In frames, where it is not one: the answer looks at all sessions on the GPU."""
PAUSE = 0.02
"""Seconds until a session that sent too much is read again."""
COMPLAINTS_PER_SECOND = 0.2
COMPLAINTS_IN_STORE = 20
"""Lines in the log about one session's peers."""
HELLO_WITHIN = 10.0
"""Seconds; a connection that says nothing is closed."""

_numbers = count(1)
_CREDENTIALS = struct.Struct("3i")


class Listener(Protocol):
    """What a session socket tells of its connections."""

    def received(self, connection: Connection, frame: Frame) -> None:
        """A frame came. May raise Refused."""

    def ended(self, connection: Connection) -> None:
        """The connection is gone; told once."""


class Refused(Exception):
    """This frame ends its connection."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True)
class Peer:
    """Who is at the other end, as the kernel says (SO_PEERCRED)."""

    pid: int
    """0 where the process is in a pid namespace that the agent cannot see."""
    uid: int


class Budget:
    """How much a session may do: `rate` a second, at most `store` saved up."""

    def __init__(self, clock: Callable[[], float], rate: float, store: float) -> None:
        self._clock, self._rate, self._store = clock, rate, store
        self._left, self._at = store, clock()

    def spend(self, cost: float = 1) -> bool:
        """Take so much, even where there is less; False if nothing is left then."""
        now = self._clock()
        self._left = min(self._store, self._left + (now - self._at) * self._rate) - cost
        self._at = now
        return self._left > 0


class Connection:
    """One process connected to a session's socket."""

    def __init__(self, owner: SessionSocket, peer_socket: socket.socket, peer: Peer) -> None:
        self.number = next(_numbers)
        self.peer = peer
        self._owner = owner
        self._socket = peer_socket
        self._loop = owner.loop
        self._serial = 0
        self._unsent: deque[bytes] = deque()
        self._open = True
        self._pidfd = _watch_process(peer.pid)
        self._loop.add_reader(self._socket, self._readable)
        if self._pidfd is not None:
            # a killed process whose forked child still holds the socket would never be seen as gone otherwise
            self._loop.add_reader(self._pidfd, self._process_gone)
        self._patience = self._loop.call_later(HELLO_WITHIN, self._too_quiet)
        self._resume: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"connection {self.number} of process {self.peer.pid}"

    def greeted(self) -> None:
        """It said HELLO in time."""
        self._patience.cancel()

    def send(self, kind: Kind, *fields: int, gpu: bytes = NO_GPU, flags: int = 0) -> None:
        """Send a frame, now or as soon as the peer reads; never blocks or raises.

        A peer that leaves too many frames unread is disconnected.
        """
        if not self._open:
            return
        self._serial += 1
        data = Frame(kind, fields, gpu, self._serial, flags).pack()
        if self._unsent:
            if len(self._unsent) >= MAX_UNREAD_FRAMES:
                self._end_soon(f"it left {MAX_UNREAD_FRAMES} frames unread")
            else:
                self._unsent.append(data)
            return
        try:
            self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            self._unsent.append(data)
            self._loop.add_writer(self._socket, self._writable)
        except OSError as error:
            self._end_soon(f"it cannot be sent to: {error.strerror}")

    def end(self, code: int | None = None) -> None:
        """Close the connection, with an ERROR first where there is a code."""
        if not self._open:
            return
        if code is not None:
            self._serial += 1
            with contextlib.suppress(OSError):
                self._socket.send(Frame(Kind.ERROR, (code,), serial=self._serial).pack())
        self._open = False
        self._patience.cancel()
        if self._resume is not None:
            self._resume.cancel()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._owner.forget(self)

    def _readable(self) -> None:
        for _ in range(FRAMES_AT_ONCE):
            try:
                # one byte more than a frame: a longer packet shows
                data = self._socket.recv(FRAME_BYTES + 1)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:
                self.end()
                return
            affordable = self._deal_with(data)
            if not self._open:
                return
            if not affordable:
                self._pause()
                return

    def _deal_with(self, data: bytes) -> bool:
        """One packet. False if the session has sent more than it may."""
        try:
            frame = Frame.unpack(data)
            affordable = self._owner.budget.spend(COSTS.get(frame.kind, 1))
            self._owner.listener.received(self, frame)
            return affordable
        except FrameError as error:
            self._owner.complain("%s ends: %s", self, error)
            self.end(WRONG_VERSION if _is_other_version(data) else MALFORMED)
        except Refused as refusal:
            self._owner.complain("%s ends: %s", self, refusal)
            self.end(refusal.code)
        except Exception:
            self._owner.complain("%s ends: a frame could not be dealt with: %s", self, data.hex(), trace=True)
            self.end(MALFORMED)
        return False

    def _pause(self) -> None:
        self._loop.remove_reader(self._socket)
        self._resume = self._loop.call_later(PAUSE, self._go_on)

    def _go_on(self) -> None:
        self._resume = None
        if self._open:
            self._loop.add_reader(self._socket, self._readable)

    def _writable(self) -> None:
        while self._unsent:
            try:
                self._socket.send(self._unsent[0])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.end()
                return
            self._unsent.popleft()
        self._loop.remove_writer(self._socket)

    def _end_soon(self, reason: str) -> None:
        # not at once: whoever sends is in the middle of something that knows this connection
        self._owner.complain("%s ends: %s", self, reason)
        self._loop.call_soon(self.end)

    def _process_gone(self) -> None:
        self.end()

    def _too_quiet(self) -> None:
        self._owner.complain("%s ends: no HELLO within %g s", self, HELLO_WITHIN)
        self.end(MALFORMED)


class SessionSocket:
    """Listens for one session and lets its user in, the agent's own user, and root."""

    def __init__(self, folder: SessionFolder, uid: int, listener: Listener) -> None:
        """Raises OSError where the socket cannot be made."""
        self._folder = folder
        self.listener = listener
        self.loop = asyncio.get_running_loop()
        self.budget = Budget(self.loop.time, FRAMES_PER_SECOND, FRAMES_IN_STORE)
        self._complaints = Budget(self.loop.time, COMPLAINTS_PER_SECOND, COMPLAINTS_IN_STORE)
        self._uids = {uid, os.geteuid(), 0}
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
        if uid not in self._uids:
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


def _watch_process(pid: int) -> int | None:
    if pid <= 0 or pid == os.getpid():
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _is_other_version(data: bytes) -> bool:
    return len(data) == FRAME_BYTES and data[:4] == b"GPSH" and int.from_bytes(data[4:6], "little") != VERSION
