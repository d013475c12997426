"""The SOCK_SEQPACKET socket of each session, and the connections of processes to it.

`SessionSocket` limits which users may connect, the number of connections, and their rate. `SessionEndpoint` and
`SessionEndpoints` are interfaces, so that the registry of sessions distinguishes neither processes nor pods.

A peer cannot harm others: `FairReading` decides when a connection is read, nothing waits for a peer, and a peer that
leaves too many frames unread is disconnected. sessions/conversation.py interprets the frames.

`FairReading` reads the connections of one session in turn, so that no session delays another. The event loop serves all
sessions. In one iteration, it reads `PER_TURN` frames of a session, regardless of the number of connections; over time,
the session's budget applies. Connections with more frames wait in a queue, in order.

`identified` determines the process at the other end of a connection from the kernel's facts, never from the process's
own statements. The kernel records a peer's pid when the peer connects, and reuses the pid after the process has ended.
Therefore a connection that is accepted late can carry the pid of another process, possibly another user's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.processes import ProcessName
from gpushare_spawner.agent.session_records import SessionRecord, short_name
from gpushare_spawner.agent.state_folder import SessionFolder, StateFolder
from gpushare_spawner.clocks import Budget
from gpushare_spawner.descriptors import Acceptor, is_reserved
from gpushare_spawner.log_once import LogOnce
from gpushare_spawner.model.frames import FRAME_BYTES, NO_GPU, VERSION, Feature, Frame, FrameError, Kind

log = logging.getLogger(__name__)

FRAMES_PER_SECOND = 4000
"""Frames per second that a session may send in the long run; bursts begin and end at most a few hundred times a second.
"""
FRAMES_IN_STORE = 2000
"""Number of frames that a session may send at once after a pause."""
LONGEST_DEBT = 1.0
"""Maximum seconds for which a session that sent too many frames is not read."""
PER_TURN = 16
"""Number of a session's frames read in one event loop iteration; a frame with a higher cost counts for more."""
PER_CONNECTION = 4
"""Number of these frames that are read from one connection before the next connection is read."""


CPU_SHARE = 0.25
"""Fraction of a core that a session's frames may use in the long run: some frames' cost grows with the processes."""
KEPT_FOR_READING = FRAMES_IN_STORE / 2
"""Budget that BUSY and IDLE frames must leave.

A program whose bursts begin and end 150 times a second sends 300 frames per second, and with 50 other sessions the
arbiter takes 0.8 ms for each frame. The arbiter then gets fewer frames (conversation.py), but all frames are still
read. A program loses its connection if its frames are not read: its socket's buffer holds 278 frames.
"""
MOST_CPU_COST = 200
"""Maximum cost of a frame's CPU time, in frames: the agent may have collected garbage meanwhile."""


class Reader(Protocol):
    """A connection with unread frames."""

    def read_frame(self) -> float | None:
        """Handle one frame. Return its cost in frames; None if there is nothing left to read."""

    def pause_reading(self) -> None:
        """Do not call `readable` until `resume_reading`."""

    def resume_reading(self) -> None:
        """Call `readable` when there is something to read."""


class FairReading:
    """The budget of one session, and the queue of its connections with more to read than the budget allows."""

    def __init__(self, loop: asyncio.AbstractEventLoop, cpu_seconds: Callable[[], float] = time.thread_time) -> None:
        """Start with a full budget. ``cpu_seconds``: the CPU time of the reading thread."""
        self._loop = loop
        self._cpu_seconds = cpu_seconds
        self._budget = Budget(loop.time, FRAMES_PER_SECOND, FRAMES_IN_STORE, LONGEST_DEBT * FRAMES_PER_SECOND)
        self._left: float = PER_TURN
        self._queue: deque[Reader] = deque()
        self._due: asyncio.Handle | None = None

    def readable(self, reader: Reader) -> None:
        """Read from a connection with unread frames, now or when its turn comes."""
        if self._queue or not self._read(reader):
            reader.pause_reading()
            self._queue.append(reader)
            self._schedule()

    def forget(self, reader: Reader) -> None:
        """Remove a connection that has ended."""
        if reader in self._queue:
            self._queue.remove(reader)

    def spare_in(self) -> float:
        """Return the seconds until the budget exceeds what reading needs; 0 if it does now."""
        return self._budget.wait(KEPT_FOR_READING)

    def charge(self, work: Callable[[], None]) -> None:
        """Do further work for the session's frames, and charge its CPU time."""
        begun = self._cpu_seconds()
        work()
        self._budget.spend(self._cost_since(begun))

    def _cost_since(self, begun: float) -> float:
        """Return the cost, in frames, of the CPU time used. ``begun``: the thread's CPU time at the start."""
        return min((self._cpu_seconds() - begun) * FRAMES_PER_SECOND / CPU_SHARE, MOST_CPU_COST)

    def _read(self, reader: Reader) -> bool:
        """Read a few frames. Return False if there may be more and the turn is over."""
        for _ in range(PER_CONNECTION):
            if self._left <= 0 or self._budget.wait():
                return False
            begun = self._cpu_seconds()
            cost = reader.read_frame()
            if cost is None:
                return True
            cost = max(cost, self._cost_since(begun))
            self._budget.spend(cost)
            self._left -= cost
        # The event loop calls again if there is more.
        return not self._queue

    def _schedule(self) -> None:
        if self._due is None:
            wait = self._budget.wait()
            self._due = self._loop.call_later(wait, self._next_turn) if wait else self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._due = None
        self._left = PER_TURN
        for _ in range(len(self._queue)):
            if self._left <= 0 or self._budget.wait():
                break
            reader = self._queue.popleft()
            self._queue.append(reader)
            if self._read(reader) and reader in self._queue:
                self._queue.remove(reader)
                reader.resume_reading()
        if self._queue:
            self._schedule()


SO_PEERPIDFD = 77
"""Socket option from include/uapi/asm-generic/socket.h in Linux 6.5; the same on x86-64 and aarch64.

Not in Python yet.
"""
_UNKNOWN_OPTION = (errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors from older kernels and user-space kernels (gVisor)."""
_HAS_ENDED = (errno.ESRCH, errno.EINVAL, errno.ENODATA)
"""Errors from kernels 6.5 and later for a process that was reaped; since 6.16 they return a pidfd nevertheless."""
_CREDENTIALS = struct.Struct("3i")
_PIDFD = struct.Struct("i")


@dataclass(frozen=True)
class Peer:
    """The process that opened a connection."""

    pid: int
    """Pid of the process; 0 if its pid namespace is not visible to the agent."""
    uid: int
    """Its effective uid when it connected."""
    process: ProcessName | None = None
    """Identity of the process; None if it is not visible to the agent."""
    pidfd: int | None = None
    """Pidfd, readable once the process has ended; None if the kernel has no pidfds, or for the agent itself."""


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Return the peer's pid and uid at the time it connected (SO_PEERCRED)."""
    pid, uid, _gid = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, uid


def identified(connection: socket.socket) -> Peer:
    """Return the process that opened this connection, never a later process with the same pid.

    The caller closes its pidfd. Raises ProcessLookupError if that process has ended, and OSError if no
    descriptor is left.
    """
    pid, uid = credentials(connection)
    pidfd = _pidfd_of_connection(connection)
    certain = pidfd is not None  # from the connection itself, so it cannot belong to another process
    if pidfd is None and pid:
        pidfd = _pidfd_of(pid)
    try:
        name = processes.named(pid) if pid else None
        if (pidfd is not None and _has_ended(pidfd)) or (pid and name is None):
            raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended")
        # a process without that uid in any form belongs to another user, and did not connect
        if pid and not certain and uid not in processes.uids(pid):
            raise ProcessLookupError(errno.ESRCH, f"pid {pid} belongs to another process now")
    except OSError:
        if pidfd is not None:
            os.close(pidfd)
        raise
    if pidfd is not None and pid == os.getpid():
        os.close(pidfd)
        pidfd = None
    return Peer(pid, uid, name, pidfd)


def _pidfd_of_connection(connection: socket.socket) -> int | None:
    """Return a pidfd of the process that connected; None if the kernel has no such option. Raises as `identified`."""
    try:
        answer = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, _PIDFD.size)
    except OSError as error:
        if error.errno in _UNKNOWN_OPTION:
            return None
        if error.errno in _HAS_ENDED:
            raise ProcessLookupError(errno.ESRCH, "the process that connected has ended") from error
        raise
    return int(_PIDFD.unpack(answer)[0])


def _pidfd_of(pid: int) -> int | None:
    """Return a pidfd of the process that has this pid now; None if the kernel has no pidfds. Raises as `identified`."""
    before = processes.named(pid)
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM, errno.EINVAL):  # EPERM: a seccomp profile
            return None
        raise
    if before is None or processes.named(pid) != before:
        os.close(pidfd)
        raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended")
    return pidfd


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


MALFORMED, WRONG_VERSION, NOT_ALLOWED, SESSION_CLOSED = 1, 2, 3, 4
"""Codes of ERROR frames. See docs/reference/protocol.md."""

MAX_UNREAD_BYTES = 256 * FRAME_BYTES
"""Bytes buffered for a peer with a full socket buffer; one packet may exceed them."""
SUPPORTED_FEATURES = sum(Feature)
COSTS = dict.fromkeys((Kind.RELEASE, Kind.PAGED_IN, Kind.PAGED_OUT), 2)
"""Cost of frame types in frames, if it is not 1.

The arbiter processes all processes, CELL has listeners, an answer includes all sessions on the GPU, KERNELS reads the
last reports of all notebook servers, and ASK is compared with all earlier asks.
"""
COSTS |= {Kind.REQUEST: 8, Kind.RESERVE: 10, Kind.CELL: 4, Kind.KERNELS: 20, Kind.QUERY: 50, Kind.ASK: 50}
HELLO_WITHIN = 10.0
"""Seconds after which a connection without HELLO is closed."""

_numbers = count(1)


class FrameHandler(Protocol):
    """Handler of the frames of a session's connections."""

    def received(self, connection: Connection, frame: Frame) -> None:
        """Handle a frame. May raise FrameRefused."""

    def ended(self, connection: Connection) -> None:
        """Handle the end of a connection; called once."""


class FrameRefused(Exception):
    """Error for a frame that ends its connection."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Connection:
    """One process connected to a session's socket."""

    def __init__(self, endpoint: SessionSocket, peer_socket: socket.socket, peer: Peer) -> None:
        """Take over the socket and the peer's pidfd; the connection closes both."""
        self.number = next(_numbers)
        self.peer = peer
        self.features = Feature(0)
        """Features that the process supports; none before HELLO."""
        self._endpoint = endpoint
        self._socket = peer_socket
        self._loop = endpoint.loop
        self._serial = 0
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._open = True
        self._ending = False
        self.resume_reading()
        if peer.pidfd is not None:
            # otherwise the end of a killed process would stay undetected while its forked child holds the socket
            self._loop.add_reader(peer.pidfd, self.end)
        self._patience = self._loop.call_later(HELLO_WITHIN, self._too_quiet)

    def __repr__(self) -> str:
        return f"connection {self.number} of process {self.peer.pid}"

    def greeted(self, features: int) -> None:
        """Record HELLO and its feature bits. Unknown bits belong to newer versions and are ignored."""
        self.features = Feature(features & SUPPORTED_FEATURES)
        self._patience.cancel()

    def send(self, kind: Kind, *fields: int, gpu: bytes = NO_GPU, flags: int = 0) -> None:
        """Send a frame, now or as soon as the peer reads. Never blocks or raises.

        A peer that leaves too many frames unread is disconnected.
        """
        if not self._open:
            return
        self._serial += 1
        self.send_packet(Frame(kind, fields, gpu, self._serial, flags).pack())

    def send_packet(self, data: bytes) -> None:
        """Send a packet, like `send`."""
        if not self._open:
            return
        if self._unsent:
            if self._unsent_bytes >= MAX_UNREAD_BYTES:
                self._end_soon(f"it left {len(self._unsent)} frames unread")
            else:
                self._queue(data)
            return
        try:
            self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            self._queue(data)
            self._loop.add_writer(self._socket, self._writable)
        except OSError as error:
            self._end_soon(f"sending failed: {error.strerror}")

    def _queue(self, data: bytes) -> None:
        self._unsent.append(data)
        self._unsent_bytes += len(data)

    def end(self, code: int | None = None) -> None:
        """Close the connection. If there is a code, send an ERROR first."""
        if not self._open:
            return
        if code is not None:
            self._serial += 1
            with contextlib.suppress(OSError):
                self._socket.send(Frame(Kind.ERROR, (code,), serial=self._serial).pack())
        self._open = False
        self._patience.cancel()
        self._endpoint.reading.forget(self)
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        if self.peer.pidfd is not None:
            self._loop.remove_reader(self.peer.pidfd)
            os.close(self.peer.pidfd)
        self._endpoint.forget(self)

    @property
    def reading(self) -> FairReading:
        """The turns and the budget of its session's connections."""
        return self._endpoint.reading

    def pause_reading(self) -> None:
        """Read nothing until `resume_reading`."""
        self._loop.remove_reader(self._socket)

    def resume_reading(self) -> None:
        """Read frames again."""
        if self._open:
            self._loop.add_reader(self._socket, self._endpoint.reading.readable, self)

    def read_frame(self) -> float | None:
        """Handle one packet. Return its cost in frames; None if there is none, or the connection has ended."""
        try:
            # one byte more than a frame, to detect a longer packet
            data = self._socket.recv(FRAME_BYTES + 1)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            data = b""
        if not data:
            self.end()
            return None
        cost = self._handle(data)
        return cost if self._open else None

    def _handle(self, data: bytes) -> float:
        try:
            frame = Frame.unpack(data)
            self._endpoint.handler.received(self, frame)
            return COSTS.get(frame.kind, 1)
        except FrameError as error:
            self._endpoint.log_peer("%s ends: %s", self, error)
            self.end(WRONG_VERSION if _is_other_version(data) else MALFORMED)
        except FrameRefused as refusal:
            self._endpoint.log_peer("%s ends: %s", self, refusal)
            self.end(refusal.code)
        except Exception:
            self._endpoint.log_peer("%s ends: a frame could not be handled: %s", self, data.hex(), trace=True)
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
            self._unsent_bytes -= len(self._unsent.popleft())
        self._loop.remove_writer(self._socket)

    def _end_soon(self, reason: str) -> None:
        # Do not close it immediately, because the sender is still using this connection.
        if self._ending:
            return
        self._ending = True
        self._endpoint.log_peer("%s ends: %s", self, reason)
        self._loop.call_soon(self.end)

    def _too_quiet(self) -> None:
        self._endpoint.log_peer("%s ends: no HELLO within %g s", self, HELLO_WITHIN)
        self.end(MALFORMED)


def _is_other_version(data: bytes) -> bool:
    return len(data) == FRAME_BYTES and data[:4] == b"GPSH" and int.from_bytes(data[4:6], "little") != VERSION


MAX_CONNECTIONS = 128
"""Maximum number of a session's connections: a notebook server has a few CUDA processes and a few observers."""
CONNECTIONS_PER_SECOND = 100
"""Connections per second in the long run.

A session may open `MAX_CONNECTIONS` at once: after a restart, all processes reconnect.
"""
ACCEPTED_AT_ONCE = 16
"""Number of connections that one socket accepts before other sessions get their turn."""
LOG_LINES_PER_SECOND = 0.2
LOG_LINES_AT_ONCE = 20
"""Maximum burst of log lines about one session's peers."""

_NO_DESCRIPTORS = LogOnce(
    log, "connections of sessions are rejected", "connections of sessions are accepted again", lasts=10.0
)
"""The single instance for all sockets."""


class Traffic:
    """State shared by the sockets of one session: connections, frame budget, log lines."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.reading = FairReading(loop)
        self.connects = Budget(loop.time, CONNECTIONS_PER_SECOND, MAX_CONNECTIONS, debt=1)
        self.log_lines = Budget(loop.time, LOG_LINES_PER_SECOND, LOG_LINES_AT_ONCE, debt=1)
        self.connections: set[Connection] = set()


class SessionSocket:
    """Listening socket of one session, for its user, the agent's own user, and root."""

    def __init__(
        self, folder: SessionFolder, uid: int | None, handler: FrameHandler, traffic: Traffic | None = None
    ) -> None:
        """Listen in the session's folder. Raises OSError if the socket cannot be created.

        `uid`: the user that may connect in addition to the agent's own user and root; None: every user that can reach
        the folder. `traffic` is shared by the sockets of one session.
        """
        self._folder = folder
        self.handler = handler
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
        """Log a peer's action, at a limited rate."""
        if self._traffic.log_lines.spend():
            log.log(logging.ERROR if trace else logging.INFO, message, *arguments, exc_info=trace)

    def forget(self, connection: Connection) -> None:
        """Remove a connection that has ended."""
        self._connections.discard(connection)
        self._traffic.connections.discard(connection)
        self.handler.ended(connection)

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
        """Add the connection if the process that connected is still running."""
        try:
            peer = identified(accepted)
        except ProcessLookupError:
            # Another process holds the peer's end of the connection, so its work could not be attributed.
            self.log_peer("process %d ended after connecting to %s", pid, self.path)
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
        """Path of the socket; if there are several, of the first."""

    def close(self, code: int | None = None) -> None:
        """Stop listening and end all connections with this error code of the protocol; the folders stay."""

    def remove(self) -> None:
        """Remove the folders. Raises OSError."""


class SessionEndpoints(Protocol):
    """Factory of sessions' endpoints: `ProcessEndpoints`, or `kubernetes.pods.sessions.PodEndpoints`."""

    def listen(self, record: SessionRecord, handler: FrameHandler) -> SessionEndpoint:
        """Create the endpoint. Raises OSError, OverflowError (a uid that no user can have) or PathTooLong."""


class ProcessEndpoints:
    """Factory of one socket per session, each in its own folder within the state folder."""

    def __init__(self, folder: StateFolder) -> None:
        self._folder = folder

    def listen(self, record: SessionRecord, handler: FrameHandler) -> SessionEndpoint:
        """Create the socket. Raises OSError, OverflowError or PathTooLong."""
        folder = SessionFolder(self._folder.sockets, short_name(record.request.id), self._folder.discarded)
        return SessionSocket(folder, record.request.uid, handler)
