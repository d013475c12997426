"""An agent's session socket that says what a test tells it to say, in a thread."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gpushare_spawner.model.frames import (
    FRAME_BYTES,
    AskKind,
    Feature,
    Frame,
    Kind,
    LeaseState,
    SessionMemoryTopic,
    TextTopic,
    gpu_bytes,
    text_parts,
)
from gpushare_spawner.model.share import MemoryLimit, Tier

GPU = "GPU-12345678-1234-1234-1234-123456789abc"
OTHER_GPU = "GPU-12345678-1234-1234-1234-123456789abd"
GIB = 2**30


@dataclass
class Script:
    """What the agent answers; tests change it while it runs."""

    share: int = 25
    tier: Tier = Tier.ACTIVE
    effective: int = 25
    borrowed: int = 0
    guaranteed: int = 25
    memory: int = int(3.1 * GIB)
    resident: int = GIB
    limit: int = 16 * GIB
    lease: LeaseState = LeaseState.NONE
    quiet: int = 2**64 - 1
    sessions: int = 2
    with_work: int = 1
    step: tuple[Tier, float, int] | None = None
    cause: tuple[int, float] | None = None
    """The code of the notice's cause, and seconds of idleness or age; None: an agent that does not say."""
    gpus: list[str] = field(default_factory=lambda: [GPU])
    delivered: tuple[float, float, int, float, float] | None = None
    """Seconds entitled and delivered, number of waits, and two quantiles of them in seconds; None: it does not say."""

    refused: int = 0
    """Allocations that the session's limit refused; the last one was of 2 GiB."""
    use: float | None = None
    """Part of the GPU's time that the session had; None: an agent that does not say."""
    features: Feature = Feature.DELIVERED | Feature.CONTROLS
    keep_until: float = 0.0
    """Seconds since the epoch; 0: not kept."""
    exempt_until: float | None = 0.0
    """Seconds since the epoch; 0: not exempt; None: without end."""
    largest_share: int = 0
    layer: str = ""
    """The sharing layer that gives the GPU; empty: ours."""
    layer_gpus: int = 1
    layer_trouble: str = ""
    message: tuple[str, float] | None = None
    """An admin's message, and its instant in seconds since the epoch."""
    drain: tuple[str, float] | None = None
    """The message of a drain, and its instant."""
    shares: tuple[bool, str] = (True, "[10, 50, 100]")
    """The answer to an ask for the shares."""
    keeps: tuple[bool, str] = (True, "2 of 3 keeps left within 24 hours.")
    """The answer to an ask for the keeps that are left."""
    answer: tuple[bool, str] | None = (True, "It was done.")
    """Whether an ask was done, and the sentence; None: the service does not answer."""

    def status(self) -> list[Frame]:
        """DELIVERED and SESSION_MEMORY where there is something to say, and one STATUS for each GPU."""
        tier, at, units = self.step or (Tier.ACTIVE, 0.0, 0)
        values = (
            self.share, self.tier.depth, self.effective, self.borrowed, self.guaranteed, self.memory, self.resident,
            self.limit, self.lease, self.quiet, self.sessions | self.with_work << 32, round(at * 1e9),
        )  # fmt: skip
        flags = tier.depth | units << 8
        before = self.controls()
        if self.delivered is not None:
            entitled, received, waits, half, most = self.delivered
            seconds = [round(one * 1e9) for one in (entitled, received, half, most)]
            before.append(Frame(Kind.DELIVERED, (*seconds[:2], waits, *seconds[2:])))
        if self.use is not None:
            before += [Frame(Kind.USE, (0, round(self.use * 1e9), 10**9), gpu=gpu_bytes(uuid)) for uuid in self.gpus]
        if self.refused:
            hit = (SessionMemoryTopic.LIMIT_HIT, MemoryLimit.SESSION, 10**9, 2 * GIB, 41, self.refused, self.memory)
            before.append(Frame(Kind.SESSION_MEMORY, hit))
        if self.cause is not None and self.step is not None:
            code, after = self.cause
            before.append(Frame(Kind.ANNOUNCE, (tier.depth, round(at * 1e9), units, code, round(after * 1e9))))
        return before + [Frame(Kind.STATUS, values, gpu=gpu_bytes(uuid), flags=flags) for uuid in self.gpus]

    def controls(self) -> list[Frame]:
        """CONTROLS and the message, from an agent with that feature."""
        if Feature.CONTROLS not in self.features:
            return []
        exempt = 2**64 - 1 if self.exempt_until is None else round(self.exempt_until * 1000)
        said = [Frame(Kind.CONTROLS, (round(self.keep_until * 1000), exempt, self.largest_share))]
        if self.layer:
            said += text_frames(TextTopic.LAYER, self.layer_gpus, self.layer)
            said += text_frames(TextTopic.LAYER_TROUBLE, 1, self.layer_trouble) if self.layer_trouble else []
        for text, at in filter(None, (self.drain, self.message)):
            said += text_frames(TextTopic.MESSAGE, round(at * 1000), text)
        return said


def text_frames(topic: TextTopic, number: int, text: str, done: bool = False) -> list[Frame]:
    """The TEXT frames of a text."""
    return [Frame(Kind.TEXT, part.fields()) for part in text_parts(topic, number, text, done)]


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

    def send(self, frame: Frame) -> None:
        """To everybody who is connected."""
        for connection in self.connections:
            connection.send(frame.pack())

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
            fields = (script.share, *tier, 1, len(script.gpus), script.features)
            devices = [Frame(Kind.DEVICE, (script.limit, script.limit // 4), gpu=gpu_bytes(gpu)) for gpu in script.gpus]
            return [sent.pack() for sent in (Frame(Kind.WELCOME, fields), *devices)]
        if frame.kind is Kind.QUERY and not self.silent:
            return [sent.pack() for sent in script.status()]
        if frame.kind is Kind.ASK and script.answer is not None:
            number, kind, value = frame.fields[:3]
            self._obey(AskKind(kind), value)
            said = {AskKind.SHARES: script.shares, AskKind.KEEPS: script.keeps}
            done, text = said.get(AskKind(kind), script.answer)
            # the answers to others' asks come to this observer too
            others = text_frames(TextTopic.ANSWER, number ^ 1, "For another observer.")
            return [sent.pack() for sent in others + text_frames(TextTopic.ANSWER, number, text, done)]
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
            script.share = script.effective = script.guaranteed = value
