"""The other side of the session socket, played from a script: what it says is in the test, what it hears is kept."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
import time
from pathlib import Path

from gpushare_spawner.model.frames import FRAME_BYTES, NO_GPU, Frame, Kind, Role

GIB = 1 << 30


class Peer:
    """One connection of a process."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.hello: Frame | None = None
        self._early: list[Frame] = []

    def send(self, kind: Kind, *fields: int, gpu: bytes = NO_GPU) -> None:
        self.connection.send(Frame(kind, fields, gpu).pack())

    def send_raw(self, data: bytes) -> None:
        self.connection.send(data)

    def hear(self, timeout: float = 10.0) -> Frame | None:
        """The next frame; None when the process has closed the connection. Raises TimeoutError."""
        if self._early:
            return self._early.pop(0)
        ready, _, _ = select.select([self.connection], [], [], timeout)
        if not ready:
            raise TimeoutError(f"no frame in {timeout} s")
        try:
            data = self.connection.recv(2 * FRAME_BYTES)
        except ConnectionResetError:
            return None
        return Frame.unpack(data) if data else None

    def expect(
        self, kind: Kind, timeout: float = 10.0, skip: tuple[Kind, ...] = (Kind.MEMORY, Kind.IDLE, Kind.BUSY)
    ) -> Frame:
        """The next frame but for those of `skip`, which must be of this kind."""
        deadline = time.monotonic() + timeout
        while True:
            frame = self.hear(max(0.0, deadline - time.monotonic()))
            assert frame is not None, f"the connection ended; {kind.name} was expected"
            if frame.kind is kind:
                return frame
            assert frame.kind in skip, f"{frame.kind.name} came, {kind.name} was expected"

    def nothing(self, seconds: float, skip: tuple[Kind, ...] = (Kind.MEMORY,)) -> None:
        """Nothing but frames of `skip` comes for this long."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                frame = self.hear(left)
                assert frame is not None, "the connection ended"
                assert frame.kind in skip, f"{frame} came"

    def closed(self, timeout: float = 10.0) -> bool:
        """Whether the process ends this connection in time."""
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            try:
                if self.hear(left) is None:
                    return True
            except TimeoutError:
                return False
        return False

    def grant(self, gpu: bytes, lease: int, prefetch: int = 0, pace: float = 0) -> None:
        """`pace` in seconds of queued work."""
        self.send(Kind.GRANT, lease, 0, prefetch, round(pace * 1e9), gpu=gpu)

    def revoke(self, gpu: bytes, lease: int, page_out: int = 0, reason: int = 1) -> None:
        self.send(Kind.REVOKE, lease, page_out, reason, gpu=gpu)

    def close(self) -> None:
        self.connection.close()


class ScriptedAgent:
    """Listens on a session socket, says WELCOME to each process, and leaves the rest to the test."""

    def __init__(
        self, path: Path, gpus: list[bytes], total: int = 8 * GIB, oversubscribed: bool = True, greet: bool = True
    ) -> None:
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
            peer = Peer(connection)
            self._all.append(peer)
            if self.greet:
                self.welcome(peer)
            self._peers.put(peer)

    def welcome(self, peer: Peer) -> None:
        """Hear HELLO, answer WELCOME and the DEVICE frames."""
        hello = peer.hear()
        if hello is None:
            return
        assert hello.kind is Kind.HELLO
        assert hello.fields[0] == Role.CUDA
        peer.hello = hello
        peer.send(Kind.WELCOME, 25, 0, 25, 0, int(self.oversubscribed), len(self.gpus))
        for gpu in self.gpus:
            peer.send(Kind.DEVICE, self.total, self.total // 4, gpu=gpu)

    def peer(self, timeout: float = 10.0) -> Peer:
        """The next process that connects."""
        return self._peers.get(timeout=timeout)

    def no_peer(self, seconds: float) -> None:
        """Nobody connects for this long."""
        with contextlib.suppress(queue.Empty):
            raise AssertionError(f"{self._peers.get(timeout=seconds)} connected")

    def stop(self) -> None:
        """As if the agent were killed: the listener and all connections are gone."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in self._all:
            peer.close()
        self.path.unlink(missing_ok=True)


class GenerousAgent(ScriptedAgent):
    """Grants every request at once, until told otherwise; a thread per process answers."""

    def __init__(self, path: Path, gpus: list[bytes], **options: object) -> None:
        self.frames: list[tuple[Peer, Frame]] = []
        self._lease = 0
        super().__init__(path, gpus, **options)  # type: ignore[arg-type]
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while True:
            peer = self._peers.get()
            threading.Thread(target=self._answer_one, args=(peer,), daemon=True).start()

    def _answer_one(self, peer: Peer) -> None:
        while True:
            try:
                frame = peer.hear(3600)
            except (OSError, ValueError):
                return
            if frame is None:
                return
            self.frames.append((peer, frame))
            if frame.kind is Kind.REQUEST:
                self._lease += 1
                with contextlib.suppress(OSError):
                    peer.grant(frame.gpu, self._lease)
