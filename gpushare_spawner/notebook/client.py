"""A connection to the agent over the session socket, with a blocking socket: for a question of a command or a cell.

The kernels of a running Jupyter server: how many run, how many are busy, and their last activity.

The notebook server's connection to the agent.

Sends the kernels' activity, asks for the share's status, and passes what the user asks of the service.

What this notebook server asks of the service through the agent: a keep, its end, a release, a stop, another share.

The service decides, and answers with a sentence. Beside the frames: docs/reference/protocol.md.

Names of a session's processes for its user: of a kernel its notebook, of another program its file.

Asks the agent for the share's status once.

A share's status that prints like ``gpushare status``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Self, TypeVar

from gpushare_spawner.model.frames import (
    FRAME_BYTES,
    AskKind,
    Feature,
    Frame,
    FrameError,
    Kind,
    ReceivedText,
    Role,
    TextReader,
    TextTopic,
)
from gpushare_spawner.model.layers import LAYER_VARIABLE
from gpushare_spawner.model.share_status import ANNOTATIONS_VARIABLE, ANSWER, ShareStatus
from gpushare_spawner.notebook.pod_annotations import PodAnnotations
from gpushare_spawner.wording.actions import NO_SHARE, OLD_AGENT, no_answer, wrong_kind, wrong_value
from gpushare_spawner.wording.amounts import (
    AGENT_CLOSED,
    AGENT_NOT_YET,
    agent_refused,
    agent_silent,
    agent_unavailable,
    reason,
)
from gpushare_spawner.wording.spawn_form import NO_AGENT

SOCKET_VARIABLE = "GPUSHARE_SOCKET"
"""The path of the session's socket; the spawner sets it. Without it the server has no share."""
LIBRARY_VERSION = 100
"""The version of this side in HELLO: 0.1.0 as major*10000 + minor*100 + patch."""

Answer = TypeVar("Answer")


class AgentUnavailable(Exception):
    """The agent gives no answer; the message says why, in a sentence."""


def hello() -> Frame:
    """Return the HELLO of an observer."""
    features = Feature.DELIVERED | Feature.RESERVE | Feature.CAUSE | Feature.CONTROLS | Feature.USE
    return Frame(Kind.HELLO, (Role.OBSERVER, os.getpid(), LIBRARY_VERSION, features), serial=1)


def session_socket() -> str | None:
    """Return the path of the session's socket; None without a share."""
    return os.environ.get(SOCKET_VARIABLE) or None


class AgentConnection:
    """Connected and welcomed. Its methods raise TimeoutError, OSError, ValueError or AgentUnavailable."""

    def __init__(self, path: str, deadline: float) -> None:
        """`deadline`: of everything, by `time.monotonic`."""
        self._deadline = deadline
        self._serial = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._socket.settimeout(self._left())
            self._socket.connect(path)
            self._send(hello())
            self.welcome = self.next({Kind.WELCOME})
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def send(self, kind: Kind, *fields: int) -> None:
        """Send a frame."""
        self._send(Frame(kind, fields, serial=self._serial + 1))

    def next(self, wanted: Collection[Kind]) -> Frame:
        """Return the next frame of one of these kinds; others are ignored."""
        while True:
            self._socket.settimeout(self._left())
            data = self._socket.recv(FRAME_BYTES + 1)
            if not data:
                raise AgentUnavailable(AGENT_CLOSED)
            try:
                frame = Frame.unpack(data)
            except FrameError as error:
                raise AgentUnavailable(agent_unavailable(f"its answer cannot be read: {error}")) from error
            if frame.kind is Kind.ERROR:
                raise AgentUnavailable(agent_refused(frame.fields[0]))
            if frame.kind in wanted:
                return frame

    def _send(self, frame: Frame) -> None:
        self._serial = frame.serial
        self._socket.send(frame.pack())

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def with_agent(path: str, timeout: float, use: Callable[[AgentConnection], Answer]) -> Answer:
    """Return what `use` gets of the agent within ``timeout`` seconds. Raises AgentUnavailable and nothing else."""
    try:
        with AgentConnection(path, time.monotonic() + timeout) as connection:
            return use(connection)
    except TimeoutError as error:
        raise AgentUnavailable(agent_silent(timeout)) from error
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or reason(error)
        raise AgentUnavailable(agent_unavailable(f"{why}: {path}")) from error


@dataclass(frozen=True)
class KernelActivity:
    """What the agent gets."""

    busy: int
    alive: int
    last_activity: float = 0.0
    """Seconds since the epoch; 0: unknown."""

    def fields(self) -> tuple[int, int, int]:
        """The fields of a KERNELS frame."""
        return (self.busy, self.alive, round(self.last_activity * 1e9))


def kernel_activity(kernel_manager: Any) -> KernelActivity:
    """Read jupyter_server's kernel manager. A kernel that runs a cell is busy, with or without GPU work.

    Kernels that start or end meanwhile are ignored.
    """
    busy = alive = 0
    latest = 0.0
    for kernel_id in list(kernel_manager.list_kernel_ids()):
        try:
            kernel = kernel_manager.get_kernel(kernel_id)
        except KeyError:
            continue
        alive += 1
        busy += getattr(kernel, "execution_state", None) == "busy"
        at = getattr(kernel, "last_activity", None)
        if isinstance(at, datetime):
            latest = max(latest, at.timestamp())
    return KernelActivity(busy, alive, latest)


ANSWER_SECONDS = 15.0
"""How long an answer is waited for. The service looks within 2 s on one machine, within 5 s on Kubernetes."""
MOST = 2**53
"""The greatest value: beyond it JSON numbers are not exact. What is allowed is for the service to say."""

KINDS = {kind.name.lower().replace("_", "-"): kind for kind in AskKind}
"""By the name in POST gpushare/ask."""
WITH_VALUE = frozenset({AskKind.KEEP, AskKind.SHARE})


class NoAnswer(AgentUnavailable):
    """The agent took the ask, and the service has not answered in time."""


class WrongAsk(ValueError):
    """What a client sent is no ask; the message says what would be right."""


@dataclass(frozen=True)
class ServiceAsk:
    """One ask. Several observers of a session may ask at once, so the number is chosen at random."""

    kind: AskKind
    value: int
    """Seconds of a keep, units of a share; else 0."""
    number: int

    @classmethod
    def of(cls, kind: AskKind, value: float = 0) -> Self:
        """Return a new ask. Raises WrongAsk for a value that no ask of that kind has."""
        if kind not in WITH_VALUE:
            value = 0
        elif not 1 <= value <= MOST:
            raise WrongAsk(wrong_value(kind))
        return cls(kind, round(value), 1 + secrets.randbelow(2**32 - 1))

    @classmethod
    def from_json(cls, body: Any) -> Self:
        """Return the ask that a browser sent: {"kind": "keep", "value": 14400}. Raises WrongAsk."""
        kind, value = (body.get("kind"), body.get("value", 0)) if isinstance(body, dict) else (None, 0)
        if not isinstance(kind, str) or kind not in KINDS:
            raise WrongAsk(wrong_kind(KINDS))
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise WrongAsk(wrong_value(KINDS[kind]))
        return cls.of(KINDS[kind], value)

    @property
    def fields(self) -> tuple[int, int, int]:
        """The fields of its ASK frame."""
        return self.number, self.kind, self.value


def ask_service(one: ServiceAsk, path: str | None = None, timeout: float = ANSWER_SECONDS) -> ReceivedText:
    """Return the service's answer. ``path`` defaults to $GPUSHARE_SOCKET. Raises AgentUnavailable with a sentence."""
    path = path or session_socket()
    if path is None:
        raise AgentUnavailable(NO_AGENT if os.environ.get(LAYER_VARIABLE) else NO_SHARE)
    sent = False

    def answer(connection: AgentConnection) -> ReceivedText:
        nonlocal sent
        if not connection.welcome.fields[6] & Feature.CONTROLS:
            raise AgentUnavailable(OLD_AGENT)
        connection.send(Kind.ASK, *one.fields)
        sent = True
        reader = TextReader()
        while True:
            text = reader.take(connection.next({Kind.TEXT}))
            # answers go to all observers of the session
            if text is not None and (text.topic, text.number) == (TextTopic.ANSWER, one.number):
                return text

    try:
        return with_agent(path, timeout, answer)
    except AgentUnavailable as error:
        if sent and isinstance(error.__cause__, TimeoutError):
            raise NoAnswer(no_answer(timeout)) from error
        raise


Status = TypeVar("Status", bound=ShareStatus)

_KERNEL = re.compile(r"kernel-([0-9a-f]{8})[0-9a-f-]*\.json")
_LETTERS = 40


def named(status: Status, proc: Path = Path("/proc")) -> Status:
    """Return the status with the names of its processes, as far as they can be found."""
    return replace(status, processes=tuple(replace(one, name=process_name(one.pid, proc)) for one in status.processes))


def process_name(pid: int, proc: Path = Path("/proc")) -> str:
    """Return "the kernel of train.ipynb", "the kernel 1a2b3c4d", "train.py" or "process 123". Raises nothing.

    Jupyter Server passes the path of the notebook to a kernel in JPY_SESSION_NAME.
    """
    arguments = _words(proc / str(pid) / "cmdline")
    kernel = next((found for word in arguments if (found := _KERNEL.search(word))), None)
    if kernel is not None:
        notebook = next(
            (
                word.partition("=")[2]
                for word in _words(proc / str(pid) / "environ")
                if word[:17] == "JPY_SESSION_NAME="
            ),
            "",
        )
        return f"the kernel of {_short(notebook)}" if notebook else f"the kernel {kernel[1]}"
    if not arguments:
        return f"process {pid}"
    program = Path(arguments[0]).name
    if program.startswith("python"):
        options = [word for word in arguments[1:] if word.startswith("-")]
        script = next((word for word in arguments[1:] if not word.startswith("-")), "")
        if script and not {"-c", "-m"} & set(options):
            return f"{_short(script)} (process {pid})"
    return f"{_short(program)} (process {pid})"


def _short(path: str) -> str:
    name = "".join(letter for letter in Path(path).name if letter.isprintable())
    return name if len(name) <= _LETTERS else name[: _LETTERS - 1] + "…"


def _words(path: Path) -> list[str]:
    try:
        return [word for word in path.read_bytes().decode(errors="replace").split("\0") if word]
    except OSError:
        return []


FIRST_DELAY = 0.1
LAST_DELAY = 5.0
"""Seconds between attempts to connect: doubling from the first to the last, as docs/reference/protocol.md says."""
FRESH_SECONDS = 0.5
"""Requests of several browser tabs within this time get one answer."""


class SessionClient:
    """Keeps a connection to the agent until it is cancelled. A failure of the agent does not affect a notebook.

    Without a socket `run` returns at once, and `query` returns what the pod's annotations say of a session of another
    sharing layer, else the status without a share.
    """

    def __init__(
        self, path: str | None = None, log: logging.Logger | None = None, pod: PodAnnotations | None = None
    ) -> None:
        """``pod``: the annotations of this server's pod, where another sharing layer gives the GPU."""
        self._path = path or session_socket()
        self._pod = pod
        self._log = log or logging.getLogger(__name__)
        self._connection: socket.socket | None = None
        self._serial = 0
        self._gpus = 0
        self._features = Feature(0)
        self._texts = TextReader()
        self._asks: dict[int, asyncio.Future[ReceivedText]] = {}
        """Asks that wait for the service's answer, by number."""
        self._asking = asyncio.Lock()
        self._answer: list[Frame] = []
        self._answered: asyncio.Future[list[Frame]] | None = None
        self._last: tuple[float, ShareStatus] | None = None
        self._kernels: KernelActivity | None = None
        self._problem = AGENT_NOT_YET

    @property
    def shared(self) -> bool:
        """Whether this server has a session socket."""
        return self._path is not None

    @property
    def connected(self) -> bool:
        """Whether the agent has welcomed this connection."""
        return self._connection is not None and self._gpus > 0

    async def run(self) -> None:
        """Keep connected until cancelled."""
        delay = FIRST_DELAY
        while self._path is not None:
            welcomed = await self._connect(self._path)
            delay = FIRST_DELAY if welcomed else min(delay * 2, LAST_DELAY)
            await asyncio.sleep(delay)

    async def query(self, timeout: float = 2.0) -> ShareStatus:
        """Ask the agent for the share's status; at most ``timeout`` seconds. Raises nothing."""
        if self._path is None:
            return self._pod.status() if self._pod is not None else ShareStatus.without_share()
        loop = asyncio.get_running_loop()
        async with self._asking:
            if self._last is not None and loop.time() - self._last[0] < FRESH_SECONDS:
                return self._last[1]
            if not self.connected:
                return self._unknown(self._problem)
            self._answer, self._answered = [], loop.create_future()
            try:
                await self._send(Kind.QUERY)
                answer = await asyncio.wait_for(self._answered, timeout)
                status = replace(named(ShareStatus.of(answer)), at=time.time())
            except TimeoutError:
                return self._unknown(agent_silent(timeout))
            except (OSError, ValueError) as error:
                return self._unknown(agent_unavailable(str(error)))
            finally:
                self._answered = None
            self._last = (loop.time(), status)
            return status

    async def ask(self, one: ServiceAsk, timeout: float = ANSWER_SECONDS) -> ReceivedText:
        """Ask something of the service. Raises AgentUnavailable with a sentence; NoAnswer after ``timeout`` seconds."""
        if self._path is None:
            raise AgentUnavailable(NO_SHARE if self._pod is None else NO_AGENT)
        if not self.connected:
            raise AgentUnavailable(self._problem)
        if Feature.CONTROLS not in self._features:
            raise AgentUnavailable(OLD_AGENT)
        answered: asyncio.Future[ReceivedText] = asyncio.get_running_loop().create_future()
        self._asks[one.number] = answered
        try:
            await self._send(Kind.ASK, *one.fields)
            answer = await asyncio.wait_for(answered, timeout)
        except TimeoutError as error:
            raise NoAnswer(no_answer(timeout)) from error
        except OSError as error:
            raise AgentUnavailable(agent_unavailable(str(error))) from error
        finally:
            del self._asks[one.number]
        self._last = None  # what was asked may have been done
        return answer

    async def tell_kernels(self, activity: KernelActivity) -> None:
        """Send the kernels' activity to the agent. It is sent again after a new connection."""
        self._kernels = activity
        if self.connected:
            with contextlib.suppress(OSError):  # `run` detects the end of the connection, and connects again
                await self._send(Kind.KERNELS, *activity.fields())

    def _unknown(self, problem: str) -> ShareStatus:
        """What is known while the agent is unavailable."""
        return self._pod.status() if self._pod is not None else ShareStatus.unknown(problem)

    async def _connect(self, path: str) -> bool:
        """Run one connection, from HELLO to its end. Returns whether the agent sent WELCOME."""
        self._gpus = self._serial = 0
        self._texts = TextReader()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        loop = asyncio.get_running_loop()
        welcomed = False
        try:
            await loop.sock_connect(connection, path)
            self._connection = connection
            await self._send(Kind.HELLO, *hello().fields)
            while data := await loop.sock_recv(connection, FRAME_BYTES + 1):
                frame = Frame.unpack(data)
                await self._take(frame)
                welcomed = welcomed or frame.kind is Kind.WELCOME
            self._problem = AGENT_CLOSED
        except (OSError, FrameError) as error:
            why = getattr(error, "strerror", None) or reason(error)
            self._problem = agent_unavailable(why)
            self._log.debug("gpushare: the agent is unavailable: %s", why)
        except _Refused as error:
            self._problem = str(error)
            self._log.debug("gpushare: %s", error)
        finally:
            self._connection, self._gpus, self._last = None, 0, None
            for one in (self._answered, *self._asks.values()):
                if one is not None and not one.done():
                    one.set_exception(ConnectionResetError("the connection ended"))
            connection.close()
        return welcomed

    async def _take(self, frame: Frame) -> None:
        match frame.kind:
            case Kind.WELCOME:
                self._gpus, self._features = frame.fields[5], Feature(frame.fields[6])
                if self._kernels is not None:
                    await self._send(Kind.KERNELS, *self._kernels.fields())
            case Kind.TIER:
                self._last = None
            case Kind.ERROR:
                raise _Refused(agent_refused(frame.fields[0]))
            case _:
                pass  # DEVICE, and frames of a newer agent
        if frame.kind in ANSWER:
            self._take_answer(frame)

    def _take_answer(self, frame: Frame) -> None:
        """Take a frame of an answer to QUERY. Some of them also come by themselves, with news."""
        if frame.kind in (Kind.ANNOUNCE, Kind.CONTROLS, Kind.TEXT):
            self._last = None  # the next question gets a new answer
        if frame.kind is Kind.TEXT and (text := self._texts.take(frame)) is not None:
            self._take_text(text)
        if self._answered is not None and not self._answered.done():
            self._answer.append(frame)
            if sum(one.kind is Kind.STATUS for one in self._answer) >= self._gpus:
                self._answered.set_result(self._answer)

    def _take_text(self, text: ReceivedText) -> None:
        """Take the answer to an ask; those to asks of other observers come here too."""
        asked = self._asks.get(text.number) if text.topic == TextTopic.ANSWER else None
        if asked is not None and not asked.done():
            asked.set_result(text)

    async def _send(self, kind: Kind, *fields: int) -> None:
        if self._connection is None:
            raise ConnectionResetError("there is no connection")
        self._serial += 1
        frame = Frame(kind, fields, serial=self._serial)
        await asyncio.get_running_loop().sock_sendall(self._connection, frame.pack())


class _Refused(Exception):
    """The agent answered with ERROR."""


class ReadableStatus(ShareStatus):
    """What ``gpushare_spawner.notebook.status()`` returns to a cell or a script."""

    def __str__(self) -> str:
        # a cell that does not print it imports no pydantic
        from gpushare_spawner.wording.share_status import page

        return page(self, time.time())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show a cell's value like ``gpushare status``."""
        printer.text(str(self))


def ask(path: str | None = None, timeout: float = 2.0) -> ReadableStatus:
    """Return the share's status within ``timeout`` seconds. ``path`` defaults to $GPUSHARE_SOCKET. Raises nothing."""
    path = path or session_socket()
    if path is None:
        return _by_annotations() or ReadableStatus.without_share()
    try:
        return with_agent(path, timeout, _status)
    except AgentUnavailable as error:
        return _by_annotations() or ReadableStatus.unknown(str(error))


def _by_annotations() -> ReadableStatus | None:
    """What the pod's annotations say where another sharing layer gives the GPU; None: they say nothing."""
    if ANNOTATIONS_VARIABLE not in os.environ:
        return None
    # not at the top: it imports pydantic, which a cell of another server does not need
    from gpushare_spawner.notebook.pod_annotations import PodAnnotations

    pod = PodAnnotations.of(os.environ)
    return ReadableStatus(**vars(pod.status())) if pod is not None else None


def _status(connection: AgentConnection) -> ReadableStatus:
    gpus = connection.welcome.fields[5]
    connection.send(Kind.QUERY)
    answer: list[Frame] = []
    while sum(frame.kind is Kind.STATUS for frame in answer) < gpus:
        answer.append(connection.next(ANSWER))
    return replace(named(ReadableStatus.of(answer)), at=time.time())
