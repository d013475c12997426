"""An agent's session socket that says what a test tells it to say, in a thread."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gpushare_spawner.model.frames import FRAME_BYTES, AskKind, Frame, Kind, QueryTopic
from gpushare_spawner.model.share import IdleCause, Tier, chosen
from gpushare_spawner.model.share_status import (
    AdminMessage,
    AgentRecord,
    CellsStatus,
    ControlsStatus,
    DeliveredStatus,
    GpuStatus,
    GpuTimeStatus,
    LimitHit,
    PendingAction,
    ServiceAnswer,
    ShareStatus,
)

GPU = "GPU-12345678-1234-1234-1234-123456789abc"
OTHER_GPU = "GPU-12345678-1234-1234-1234-123456789abd"
GIB = 2**30


@dataclass
class Script:
    """What the agent answers; tests change it while it runs."""

    share: int = 25
    last: int = 0
    tier: Tier = Tier.ACTIVE
    effective: int = 25
    borrowed: int = 0
    guaranteed: int = 25
    memory: int = int(3.1 * GIB)
    resident: int = GIB
    limit: int = 16 * GIB
    lease: str = "none"
    quiet: float | None = None
    """Seconds since the last GPU work; None: there was none."""
    sessions: int = 2
    with_work: int = 1
    step: tuple[Tier, float, int] | None = None
    cause: tuple[IdleCause, float] = (IdleCause.IDLE, 0.0)
    """The notice's cause, and seconds of idleness or age."""
    gpus: list[str] = field(default_factory=lambda: [GPU])
    delivered: tuple[float, float, int, float, float] | None = None
    """Seconds entitled and delivered, number of waits, and two quantiles of them in seconds; None: it does not say."""

    delivered_on: tuple[GpuTimeStatus, ...] = ()
    refused: int = 0
    """Allocations that the session's limit refused; the last one was of 2 GiB."""
    use: float | None = None
    """Part of the GPU's time that the session had; None: an agent that does not say."""
    time_limit: int = 100
    takes_asks: bool = True
    keep_until: float = 0.0
    """Seconds since the epoch; 0: not kept."""
    exempt_until: float | None = 0.0
    """Seconds since the epoch; 0: not exempt; None: without end."""
    largest_share: int = 0
    layer: str = ""
    """The sharing layer that gives the GPU; empty: ours."""
    layer_gpus: int = 1
    layer_trouble: str = ""
    features: int = 0
    """An old agent has none."""
    cells: CellsStatus = field(default_factory=CellsStatus)
    message: tuple[str, float] | None = None
    """An admin's message, and its instant in seconds since the epoch."""
    drain: tuple[str, float] | None = None
    """The message of a drain, and its instant."""
    shares: tuple[bool, str] = (True, "[10, 50, 100]")
    """The answer to an ask for the shares."""
    keeps: tuple[bool, str] = (True, "2 of 3 keeps left within 24 hours.")
    """The answer to an ask for the keeps that are left."""
    advice: tuple[bool, str] = (True, "null")
    """The answer to an ask for advice."""
    answer: tuple[bool, str] | None = (True, "It was done.")
    """Whether an ask was done, and the sentence; None: the service does not answer."""

    def status(self) -> ShareStatus:
        """The status that it answers with."""
        step = PendingAction(*self.step, *self.cause) if self.step is not None else None
        hit = LimitHit("session", 1.0, 2 * GIB, self.memory, 41, self.refused) if self.refused else None
        figures = (self.memory, self.resident, self.limit, self.lease, self.sessions, self.with_work, self.use)
        return ShareStatus(
            share_units=self.share,
            last_units=self.last,
            tier=self.tier,
            effective_units=self.effective,
            borrowed_units=self.borrowed,
            guaranteed_units=self.guaranteed,
            time_limit_units=self.time_limit,
            idle_seconds=self.quiet,
            gpus=tuple(GpuStatus(uuid, *figures) for uuid in self.gpus),
            notice=step,
            limit_hit=hit,
            delivered=DeliveredStatus(*self.delivered, self.delivered_on) if self.delivered is not None else None,
            layer=self.layer,
            layer_gpus=self.layer_gpus if self.layer else 0,
            layer_trouble=self.layer_trouble,
            controls=self.controls() if self.takes_asks else None,
            takes_asks=self.takes_asks,
        )

    def controls(self) -> ControlsStatus:
        """The decisions of users and admins."""
        return ControlsStatus(
            keep_until=self.keep_until or None,
            exempt=self.exempt_until != 0.0,
            exempt_until=self.exempt_until or None,
            largest_share_units=self.largest_share,
            messages=tuple(AdminMessage(text, at) for text, at in filter(None, (self.drain, self.message))),
        )


def answer_packet(number: int, text: str, done: bool = False) -> bytes:
    """The answer to an ask."""
    return AgentRecord(answer=ServiceAnswer(number, done, text)).packet()


class ScriptedAgent:
    """Listens on a SOCK_SEQPACKET socket; keeps every frame that it gets in ``heard``."""

    def __init__(self, path: Path, script: Script | None = None) -> None:
        self.path = path
        self.script = script or Script()
        self.heard: list[Frame] = []
        self.silent = False
        """Takes questions and does not answer them."""
        self.after_hello: bytes | None = None
        """These bytes instead of a WELCOME."""
        self.connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None

    def __enter__(self) -> ScriptedAgent:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._spawn(self._accept, self._listener)

    def stop(self) -> None:
        """Gone, as after kill -9: all connections end, nobody listens."""
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        self._threads.clear()
        self.connections.clear()

    def send(self, packet: Frame | AgentRecord) -> None:
        """To everybody who is connected."""
        for connection in self.connections:
            connection.send(packet.pack() if isinstance(packet, Frame) else packet.packet())

    def of_kind(self, kind: Kind) -> list[Frame]:
        return [frame for frame in self.heard if frame.kind is kind]

    def wait_for(self, kind: Kind, count: int = 1, timeout: float = 20.0) -> list[Frame]:
        """Block until so many frames of a kind have come."""
        deadline = time.monotonic() + timeout
        while len(self.of_kind(kind)) < count:
            assert time.monotonic() < deadline, f"{len(self.of_kind(kind))} of {count} {kind.name} in {timeout:g} s"
            time.sleep(0.02)
        return self.of_kind(kind)

    def _spawn(self, target: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                self.connections.append(connection)
                self._spawn(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(FRAME_BYTES + 1):
                frame = Frame.unpack(data)
                self.heard.append(frame)
                for answer in self._answers(frame):
                    connection.send(answer)

    def _answers(self, frame: Frame) -> list[bytes]:
        script = self.script
        if frame.kind is Kind.HELLO:
            if self.after_hello is not None:
                return [self.after_hello]
            tier = (script.tier.depth, script.effective, script.borrowed)
            return [Frame(Kind.WELCOME, (script.share, *tier, 1, 0, script.features)).pack()]
        if frame.kind is Kind.QUERY and frame.fields[0] == QueryTopic.CELLS:
            return [AgentRecord(cells=script.cells).packet()]
        if frame.kind is Kind.QUERY and not self.silent:
            return [AgentRecord(status=script.status()).packet()]
        if frame.kind is Kind.ASK and script.answer is not None:
            number, kind, value = frame.fields[:3]
            self._obey(AskKind(kind), value)
            said = {AskKind.SHARES: script.shares, AskKind.KEEPS: script.keeps, AskKind.ADVICE: script.advice}
            done, text = said.get(AskKind(kind), script.answer)
            # the answers to others' asks come to this server too
            return [answer_packet(number ^ 1, "For another server."), answer_packet(number, text, done)]
        return []

    def _obey(self, kind: AskKind, value: int) -> None:
        """Change the script as the service would change the session."""
        script = self.script
        if script.answer is None or not script.answer[0]:
            return
        if kind is AskKind.KEEP:
            script.keep_until, script.step = time.time() + value, None
        elif kind is AskKind.END_KEEP:
            script.keep_until = 0.0
        elif kind is AskKind.RELEASE:
            script.tier, script.effective, script.step = Tier.RELEASED, 0, None
        elif kind is AskKind.SHARE:
            share = chosen(value, len(script.gpus))
            script.share = script.effective = script.guaranteed = share.units
            script.last = share.last_units
