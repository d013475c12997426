"""The other side of the session socket, played by a script: for checks of the library without the real agent."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

from gpushare_spawner.model.protocol.frames import FRAME_BYTES, NO_GPU, Frame, Kind, Role

GIB = 1 << 30
HELLO_WITHIN = 10.0
"""Seconds that a process has for its HELLO."""


class Peer:
    """One connection of a process."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.hello: Frame | None = None

    def send(self, kind: Kind, *fields: int, gpu: bytes = NO_GPU) -> None:
        """Send a frame."""
        self.connection.send(Frame(kind, fields, gpu).pack())

    def hear(self, timeout: float = HELLO_WITHIN) -> Frame | None:
        """The next frame; None when the process has closed the connection. Raises TimeoutError."""
        ready, _, _ = select.select([self.connection], [], [], timeout)
        if not ready:
            raise TimeoutError(f"no frame in {timeout} s")
        try:
            data = self.connection.recv(2 * FRAME_BYTES)
        except ConnectionResetError:
            return None
        return Frame.unpack(data) if data else None

    def grant(self, gpu: bytes, lease: int, prefetch: int = 0, pace: float = 0) -> None:
        """`prefetch` in bytes, `pace` in seconds of queued work."""
        self.send(Kind.GRANT, lease, 0, prefetch, round(pace * 1e9), gpu=gpu)

    def revoke(self, gpu: bytes, lease: int, page_out: int = 0, reason: int = 1) -> None:
        """`page_out` in bytes."""
        self.send(Kind.REVOKE, lease, page_out, reason, gpu=gpu)

    def close(self) -> None:
        """End the connection."""
        self.connection.close()


class ScriptedAgent:
    """Listens on a session socket, says WELCOME to each process, and leaves the rest to the script."""

    peer_class: type[Peer] = Peer

    def __init__(
        self,
        path: Path,
        gpus: Sequence[bytes],
        total: int = 8 * GIB,
        oversubscribed: bool = True,
        greet: bool = True,
        features: int = 0,
    ) -> None:
        """`total`: bytes of memory of each GPU. `greet`: answer HELLO. `features`: the bits of WELCOME."""
        self.welcome_features = features
        self.path, self.gpus, self.total, self.oversubscribed, self.greet = path, gpus, total, oversubscribed, greet
        self._peers: queue.Queue[Peer] = queue.Queue()
        self._all: list[Peer] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            peer = self.peer_class(connection)
            self._all.append(peer)
            if self.greet:
                self.welcome(peer)
            if peer.hello is None or peer.hello.fields[0] == Role.CUDA:
                self._peers.put(peer)

    def welcome(self, peer: Peer) -> None:
        """Hear HELLO, answer WELCOME and the DEVICE frames."""
        hello = peer.hear()
        if hello is None:
            return
        assert hello.kind is Kind.HELLO
        peer.hello = hello
        if hello.fields[0] != Role.CUDA:
            self.observed(peer)
            return
        peer.send(Kind.WELCOME, 25, 0, 25, 0, int(self.oversubscribed), len(self.gpus), self.welcome_features)
        for gpu in self.gpus:
            peer.send(Kind.DEVICE, self.total, self.total // 4, gpu=gpu)

    def observed(self, peer: Peer) -> None:
        """An observer has said HELLO: end its connection, so that NVML under the library shows what the driver says."""
        peer.close()

    def peer(self, timeout: float = 10.0) -> Peer:
        """The next process that connects. Raises queue.Empty."""
        return self._peers.get(timeout=timeout)

    def stop(self) -> None:
        """As if the agent were killed: the listener and all connections are gone."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in self._all:
            peer.close()
        self.path.unlink(missing_ok=True)
