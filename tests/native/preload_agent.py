"""The other side of the session socket, played from a script: what it says is in the test, what it hears is kept."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from gpushare_spawner.doctor import gpu_programs
from gpushare_spawner.doctor.gpu_programs import GIB
from gpushare_spawner.model.frames import Frame, Kind, Role

__all__ = ["GIB", "AnsweringAgent", "GenerousAgent", "Peer", "ScriptedAgent"]


class Peer(gpu_programs.ScriptedPeer):
    """One connection of a process, with what tests expect of it."""

    def grant(self, gpu: bytes, lease: int, prefetch: int = 0, pace: float = 0) -> None:
        """Grant a lease. `prefetch` in bytes, `pace` in seconds of queued work."""
        self.send(Kind.GRANT, lease, 0, prefetch, round(pace * 1e9), gpu=gpu)

    def revoke(self, gpu: bytes, lease: int, page_out: int = 0, reason: int = 1) -> None:
        """Revoke a lease. `page_out` in bytes."""
        self.send(Kind.REVOKE, lease, page_out, reason, gpu=gpu)

    def send_raw(self, data: bytes) -> None:
        self.connection.send(data)

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


class ScriptedAgent(gpu_programs.ScriptedAgent):
    """Its processes are `Peer`s of this module."""

    peer_class = Peer

    def __init__(
        self,
        path: Path,
        gpus: Sequence[bytes],
        total: int = 8 * GIB,
        oversubscribed: bool = True,
        greets: bool = True,
        welcome_features: int = 0,
    ) -> None:
        """`greets`: answer HELLO. `welcome_features`: the bits of WELCOME."""
        self.oversubscribed, self.greets, self.welcome_features = oversubscribed, greets, welcome_features
        super().__init__(path, gpus, total)

    def welcome(self, peer: gpu_programs.ScriptedPeer) -> None:
        if self.greets:
            self.answer_hello(peer)

    def answer_hello(self, peer: gpu_programs.ScriptedPeer) -> None:
        """Receive HELLO and answer it, also where the agent does not greet by itself."""
        super().welcome(peer)

    def greet(self, peer: gpu_programs.ScriptedPeer) -> None:
        peer.send(Kind.WELCOME, 25, 0, 25, 0, int(self.oversubscribed), len(self.gpus), self.welcome_features)
        for gpu in self.gpus:
            peer.send(Kind.DEVICE, self.total, self.total // 4, gpu=gpu)

    def peer(self, timeout: float = 10.0) -> Peer:
        """The next process that connects."""
        peer = super().peer(timeout)
        assert isinstance(peer, Peer)
        return peer

    def no_peer(self, seconds: float) -> None:
        """Nobody connects for this long."""
        with contextlib.suppress(queue.Empty):
            raise AssertionError(f"{self._peers.get(timeout=seconds)} connected")


class AnsweringAgent(ScriptedAgent):
    """Answers the question of an observer with frames, after WELCOME with feature bits."""

    def __init__(self, path: Path, gpus: list[bytes], features: int, answer: list[Frame]) -> None:
        self.answer, self.features = answer, features
        self.observers = 0
        self.silent = False
        """True: it hears questions, and does not answer."""
        super().__init__(path, gpus)

    def welcome(self, peer: gpu_programs.ScriptedPeer) -> None:
        hello, query = peer.hear(), peer.hear()
        assert hello is not None
        assert query is not None
        assert (hello.fields[0], query.kind) == (Role.OBSERVER, Kind.QUERY)
        self.observers += 1
        peer.hello = hello
        if self.silent:
            return
        peer.send(Kind.WELCOME, 25, 0, 25, 0, 0, len(self.gpus), self.features)
        with contextlib.suppress(ConnectionError):  # it does not wait for the rest of an answer that it cannot use
            for gpu in self.gpus:
                peer.send(Kind.DEVICE, 5, 5, gpu=gpu)
            for frame in self.answer:
                peer.send(frame.kind, *frame.fields, gpu=frame.gpu)


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
