"""One process connected to a session's socket: packets in and out. What frames mean: conversation.py.

A peer cannot hurt others: connection_reader.py says when a connection is read, nothing waits for a peer, and a peer
that does not read what it is sent is disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from itertools import count
from typing import Protocol

from gpushare_spawner.agent.sockets.connection_reader import FairReading
from gpushare_spawner.agent.sockets.peer import Peer
from gpushare_spawner.model.protocol.frames import FRAME_BYTES, NO_GPU, VERSION, Feature, Frame, FrameError, Kind

MALFORMED, WRONG_VERSION, NOT_ALLOWED, SESSION_CLOSED = 1, 2, 3, 4
"""Codes of ERROR, see docs/reference/protocol.md."""

MAX_UNREAD_FRAMES = 256
"""Frames kept for a peer whose socket buffer is full."""
KNOWN_FEATURES = sum(Feature)
COSTS = dict.fromkeys((Kind.RELEASE, Kind.PAGED_IN, Kind.PAGED_OUT), 2)
"""Cost in frames, where it is not 1: the arbiter considers all processes, the answer all sessions on the GPU, KERNELS
all observers, ASK what was asked before."""
COSTS |= {Kind.REQUEST: 8, Kind.RESERVE: 10, Kind.KERNELS: 20, Kind.QUERY: 50, Kind.ASK: 50}
HELLO_WITHIN = 10.0
"""Seconds; a connection that says nothing is closed."""

_numbers = count(1)


class Listener(Protocol):
    """Who knows what frames mean."""

    def received(self, connection: Connection, frame: Frame) -> None:
        """A frame came. May raise Refused."""

    def ended(self, connection: Connection) -> None:
        """The connection is gone; told once."""


class Home(Protocol):
    """The session socket that a connection belongs to."""

    loop: asyncio.AbstractEventLoop
    listener: Listener
    reading: FairReading
    """When the session's connections are read."""

    def log_peer(self, message: str, *arguments: object, trace: bool = False) -> None:
        """Say in the log what a peer did."""

    def forget(self, connection: Connection) -> None:
        """The connection ended."""


class Refused(Exception):
    """This frame ends its connection."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Connection:
    """One process connected to a session's socket."""

    def __init__(self, home: Home, peer_socket: socket.socket, peer: Peer) -> None:
        """The connection closes the socket and the peer's pidfd."""
        self.number = next(_numbers)
        self.peer = peer
        self.features = Feature(0)
        """What the process says that it can do; none before HELLO."""
        self._home = home
        self._socket = peer_socket
        self._loop = home.loop
        self._serial = 0
        self._unsent: deque[bytes] = deque()
        self._open = True
        self._ending = False
        self._pidfd = peer.pidfd
        self.go_on()
        if self._pidfd is not None:
            # a killed process whose forked child still holds the socket would never be seen as gone otherwise
            self._loop.add_reader(self._pidfd, self._process_gone)
        self._patience = self._loop.call_later(HELLO_WITHIN, self._too_quiet)

    def __repr__(self) -> str:
        return f"connection {self.number} of process {self.peer.pid}"

    def greeted(self, features: int) -> None:
        """HELLO came in time, with these feature bits. Unknown bits belong to newer versions and are ignored."""
        self.features = Feature(features & KNOWN_FEATURES)
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
        self._home.reading.forget(self)
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._home.forget(self)

    @property
    def reading(self) -> FairReading:
        """What reads all connections of its session, and what they may cost."""
        return self._home.reading

    def hold(self) -> None:
        """Read nothing until `go_on`."""
        self._loop.remove_reader(self._socket)

    def go_on(self) -> None:
        """Read what comes."""
        if self._open:
            self._loop.add_reader(self._socket, self._home.reading.readable, self)

    def read_one(self) -> float | None:
        """Handle one packet. Return its cost in frames; None if there is none, or the connection has ended."""
        try:
            # one byte more than a frame: a longer packet shows
            data = self._socket.recv(FRAME_BYTES + 1)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            data = b""
        if not data:
            self.end()
            return None
        cost = self._deal_with(data)
        return cost if self._open else None

    def _deal_with(self, data: bytes) -> float:
        try:
            frame = Frame.unpack(data)
            self._home.listener.received(self, frame)
            return COSTS.get(frame.kind, 1)
        except FrameError as error:
            self._home.log_peer("%s ends: %s", self, error)
            self.end(WRONG_VERSION if _is_other_version(data) else MALFORMED)
        except Refused as refusal:
            self._home.log_peer("%s ends: %s", self, refusal)
            self.end(refusal.code)
        except Exception:
            self._home.log_peer("%s ends: a frame could not be dealt with: %s", self, data.hex(), trace=True)
            self.end(MALFORMED)
        return 1

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
        if self._ending:
            return
        self._ending = True
        self._home.log_peer("%s ends: %s", self, reason)
        self._loop.call_soon(self.end)

    def _process_gone(self) -> None:
        self.end()

    def _too_quiet(self) -> None:
        self._home.log_peer("%s ends: no HELLO within %g s", self, HELLO_WITHIN)
        self.end(MALFORMED)


def _is_other_version(data: bytes) -> bool:
    return len(data) == FRAME_BYTES and data[:4] == b"GPSH" and int.from_bytes(data[4:6], "little") != VERSION
