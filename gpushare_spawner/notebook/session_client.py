"""The notebook server's persistent connection to the agent.

`SessionClient` sends the kernels' activity and cells' events, reads the share's status, and passes the user's requests
to the service: a keep, its end, a release, a stop, or another share. The service decides and answers with a sentence
(docs/reference/protocol.md). `kernel_activity` counts the kernels of a running Jupyter server. client.py has the
connection for a single query.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections import deque
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Self

from gpushare_spawner.model.frames import AskKind, CellEvent, Feature, Frame, Kind, QueryTopic
from gpushare_spawner.model.layers import LAYER_VARIABLE
from gpushare_spawner.model.share_status import MAX_RECORD_BYTES, AgentRecord, CellsStatus, ServiceAnswer, ShareStatus
from gpushare_spawner.notebook.client import (
    AgentConnection,
    AgentUnavailable,
    hello,
    named,
    session_socket,
    unpack,
    with_agent,
)
from gpushare_spawner.wording.amounts import AGENT_NOT_YET, agent_silent, agent_unavailable, reason
from gpushare_spawner.wording.layers import (
    NO_AGENT,
    NO_AGENT_FOR_CELLS,
    NO_CELLS,
    NO_SHARE,
    no_answer,
    wrong_kind,
    wrong_value,
)

if TYPE_CHECKING:
    # it imports pydantic, which `gpushare keep` does not need
    from gpushare_spawner.notebook.pod_annotations import PodAnnotations

log = logging.getLogger(__name__)


ANSWER_SECONDS = 15.0
"""Seconds to wait for an answer. The service polls every 2 s on one machine and every 5 s on Kubernetes."""


MOST = 2**53
"""Maximum value: JSON numbers above it are not exact. The service decides which values are allowed."""


KINDS = {kind.name.lower().replace("_", "-"): kind for kind in AskKind}
"""Kinds by their names in POST gpushare/ask."""


WITH_VALUE = frozenset({AskKind.KEEP, AskKind.SHARE})


class NoAnswer(AgentUnavailable):
    """Missing answer of the service to a request that the agent accepted."""


class WrongAsk(ValueError):
    """Invalid request of a client. The message shows a valid form."""


@dataclass(frozen=True)
class ServiceAsk:
    """One request to the service. Its number is random because observers of a session can send concurrently."""

    kind: AskKind
    value: int
    """Seconds of a keep or units of a share; otherwise 0."""
    number: int

    @classmethod
    def of(cls, kind: AskKind, value: float = 0) -> Self:
        """Return a new request. Raises WrongAsk for a value that is invalid for its kind."""
        if kind not in WITH_VALUE:
            value = 0
        elif not 1 <= value <= MOST:
            raise WrongAsk(wrong_value(kind))
        return cls(kind, round(value), 1 + secrets.randbelow(2**32 - 1))

    @classmethod
    def from_json(cls, body: Any) -> Self:
        """Return the request that a browser sent: {"kind": "keep", "value": 14400}. Raises WrongAsk."""
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


def ask_service(ask: ServiceAsk, path: str | None = None, timeout: float = ANSWER_SECONDS) -> ServiceAnswer:
    """Return the service's answer. ``path`` defaults to $GPUSHARE_SOCKET. Raises AgentUnavailable."""
    path = path or session_socket()
    if path is None:
        raise AgentUnavailable(NO_AGENT if os.environ.get(LAYER_VARIABLE) else NO_SHARE)
    sent = False

    def answer(connection: AgentConnection) -> ServiceAnswer:
        nonlocal sent
        connection.send(Kind.ASK, *ask.fields)
        sent = True
        # answers go to all notebook servers of the session
        while (answered := connection.record().answer) is None or answered.number != ask.number:
            pass
        return answered

    try:
        return with_agent(path, timeout, answer)
    except AgentUnavailable as error:
        if sent and isinstance(error.__cause__, TimeoutError):
            raise NoAnswer(no_answer(timeout)) from error
        raise


@dataclass(frozen=True)
class KernelActivity:
    """The kernels' activity, as sent to the agent."""

    busy: int
    alive: int
    last_activity: float = 0.0
    """Seconds since the epoch; 0: unknown."""

    def fields(self) -> tuple[int, int, int]:
        """Return the fields of a KERNELS frame."""
        return (self.busy, self.alive, round(self.last_activity * 1e9))


def kernel_activity(kernel_manager: Any) -> KernelActivity:
    """Return the activity of the kernels. A kernel that runs a cell is busy, even without GPU work.

    Kernels that start or end during the call are ignored.
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


@dataclass(frozen=True)
class Execution:
    """One execution of a cell in a kernel of this server."""

    message_id: str
    """ID of the execute_request."""
    kernel_id: str
    text: int
    """Keyed hash of the cell's text."""
    pid: int = 0
    """The kernel's pid; 0: unknown."""
    cell_id: str = ""
    """JupyterLab's ID of the cell; empty: another frontend."""
    count: int = 0
    """The execution count; 0: not started."""
    subshell: str = ""
    """ID of the kernel's subshell that runs it; empty: the main shell."""

    @property
    def number(self) -> int:
        """The number that stands for this execution in frames and records."""
        return number_of(self.message_id)

    def fields(self, event: CellEvent, at: float = 0.0) -> tuple[int, ...]:
        """Return the fields of a CELL frame. ``at``: seconds since the epoch; 0: unknown."""
        return event, self.number, number_of(self.kernel_id), self.text, self.pid, self.count, round(at * 1e9)


def number_of(text: str, key: bytes = b"") -> int:
    """Return a number from 1 to 2^64-1 that stands for a text. ``key``: without it, nobody can recompute the number."""
    return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=8, key=key).digest()) or 1


MOST_EXECUTIONS = 256
"""Number of executions without an end that are sent again after a reconnect, as many as the agent keeps."""
FIRST_DELAY = 0.1


LAST_DELAY = 5.0
"""Maximum delay in seconds between attempts to connect. The delay doubles after each attempt, as in
docs/reference/protocol.md."""


FRESH_SECONDS = 0.5
"""Requests from several browser tabs within this time share one answer."""


class SessionClient:
    """Connection to the agent that stays open until it is cancelled. A failure of the agent does not affect a notebook.

    Without a socket, `run` returns immediately, and `query` returns another sharing layer's share from the pod's
    annotations, or else the status without a share.
    """

    def __init__(
        self, path: str | None = None, log: logging.Logger | None = None, pod: PodAnnotations | None = None
    ) -> None:
        """Create a client. ``pod``: the annotations of this server's pod, if another layer provides the GPU."""
        self._path = path or session_socket()
        self._pod = pod
        self._log = log or logging.getLogger(__name__)
        self._connection: socket.socket | None = None
        self._serial = 0
        self.connected = False
        """Whether the agent has welcomed this connection."""
        self._asks: dict[int, asyncio.Future[ServiceAnswer]] = {}
        """Futures of requests that wait for the service's answer, by request number."""
        self._asking = asyncio.Lock()
        self._answered: asyncio.Future[ShareStatus] | None = None
        self._cells_answered: asyncio.Future[CellsStatus] | None = None
        self._last: tuple[float, ShareStatus] | None = None
        self._kernels: KernelActivity | None = None
        self._problem = AGENT_NOT_YET
        self._sending = asyncio.Lock()
        """Held while a frame is sent: two writers cannot wait for one socket."""
        self._features = Feature(0)
        """The agent's features."""
        self._executions: dict[int, tuple[CellEvent, Execution]] = {}
        """The last event of each execution that has not ended, by number."""
        self._cell_frames: deque[tuple[int, ...]] = deque()
        """CELL frames that have not been sent."""
        self._cell_task: asyncio.Task[None] | None = None

    @property
    def shared(self) -> bool:
        """Whether this server has a session socket."""
        return self._path is not None

    async def run(self) -> None:
        """Maintain the connection until cancelled."""
        delay = FIRST_DELAY
        while self._path is not None:
            welcomed = await self._connect(self._path)
            delay = FIRST_DELAY if welcomed else min(delay * 2, LAST_DELAY)
            await asyncio.sleep(delay)

    async def query(self, timeout: float = 2.0) -> ShareStatus:
        """Query the share's status from the agent within ``timeout`` seconds. Raises nothing."""
        if self._path is None:
            return self._pod.status() if self._pod is not None else ShareStatus(shared=False)
        loop = asyncio.get_running_loop()
        async with self._asking:
            if self._last is not None and loop.time() - self._last[0] < FRESH_SECONDS:
                return self._last[1]
            if not self.connected:
                return self._unknown(self._problem)
            self._answered = loop.create_future()
            try:
                await self._send(Kind.QUERY)
                answer = await asyncio.wait_for(self._answered, timeout)
                status = replace(named(answer), at=time.time())
            except TimeoutError:
                return self._unknown(agent_silent(timeout))
            except (OSError, ValueError) as error:
                return self._unknown(agent_unavailable(str(error)))
            finally:
                self._answered = None
            self._last = (loop.time(), status)
            return status

    async def cells(self, timeout: float = 2.0) -> CellsStatus:
        """Query the executions of cells from the agent. Raises AgentUnavailable within ``timeout`` seconds."""
        if self._path is None:
            raise AgentUnavailable(NO_SHARE if self._pod is None else NO_AGENT_FOR_CELLS)
        async with self._asking:
            if not self.connected:
                raise AgentUnavailable(self._problem)
            if Feature.CELLS not in self._features:
                raise AgentUnavailable(NO_CELLS)
            self._cells_answered = asyncio.get_running_loop().create_future()
            try:
                await self._send(Kind.QUERY, QueryTopic.CELLS)
                return await asyncio.wait_for(self._cells_answered, timeout)
            except TimeoutError as error:
                raise AgentUnavailable(agent_silent(timeout)) from error
            except OSError as error:
                raise AgentUnavailable(agent_unavailable(str(error))) from error
            finally:
                self._cells_answered = None

    async def ask(self, ask: ServiceAsk, timeout: float = ANSWER_SECONDS) -> ServiceAnswer:
        """Send a request to the service. Raises AgentUnavailable with a readable reason.

        Raises NoAnswer after ``timeout`` seconds.
        """
        if self._path is None:
            raise AgentUnavailable(NO_SHARE if self._pod is None else NO_AGENT)
        if not self.connected:
            raise AgentUnavailable(self._problem)
        answered: asyncio.Future[ServiceAnswer] = asyncio.get_running_loop().create_future()
        self._asks[ask.number] = answered
        try:
            await self._send(Kind.ASK, *ask.fields)
            answer = await asyncio.wait_for(answered, timeout)
        except TimeoutError as error:
            raise NoAnswer(no_answer(timeout)) from error
        except OSError as error:
            raise AgentUnavailable(agent_unavailable(str(error))) from error
        finally:
            del self._asks[ask.number]
        self._last = None  # the request may have changed the status
        return answer

    async def tell_kernels(self, activity: KernelActivity) -> None:
        """Send the kernels' activity to the agent. A new connection sends it again."""
        self._kernels = activity
        if self.connected:
            with contextlib.suppress(OSError):  # `run` detects the end of the connection and reconnects
                await self._send(Kind.KERNELS, *activity.fields())

    def tell_cell(self, event: CellEvent, execution: Execution, at: float = 0.0) -> None:
        """Send an execution's event to the agent soon, without waiting. A new connection sends unfinished ones again.

        ``at``: the event's instant, in seconds since the epoch; 0: now. An agent without the feature gets nothing. Must
        be called on the event loop.
        """
        self._executions.pop(execution.number, None)
        if event is not CellEvent.ENDED:
            self._executions[execution.number] = event, execution
            if len(self._executions) > MOST_EXECUTIONS:
                del self._executions[next(iter(self._executions))]
        self._queue_cell(execution.fields(event, at))

    def _queue_cell(self, fields: tuple[int, ...]) -> None:
        if not self.connected or Feature.CELLS not in self._features:
            return
        self._cell_frames.append(fields)
        if self._cell_task is None or self._cell_task.done():
            self._cell_task = asyncio.create_task(self._send_cells())

    async def _send_cells(self) -> None:
        with contextlib.suppress(OSError):  # `run` detects the end of the connection and reconnects
            while self._cell_frames:
                await self._send(Kind.CELL, *self._cell_frames.popleft())

    def _unknown(self, problem: str) -> ShareStatus:
        """Return the status while the agent is unavailable."""
        return self._pod.status() if self._pod is not None else ShareStatus(problem=problem)

    async def _connect(self, path: str) -> bool:
        """Run one connection, from HELLO to its end. Return whether the agent sent WELCOME."""
        self._serial = 0
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(connection, path)
            self._connection = connection
            await self._send(Kind.HELLO, *hello())
            while True:
                await self._take(unpack(await loop.sock_recv(connection, MAX_RECORD_BYTES)))
        except (OSError, ValueError, AgentUnavailable) as error:
            why = getattr(error, "strerror", None) or reason(error)
            self._problem = str(error) if isinstance(error, AgentUnavailable) else agent_unavailable(why)
            self._log.debug("gpushare: %s", self._problem)
        finally:
            welcomed, self.connected = self.connected, False
            self._connection = self._last = None
            self._cell_frames.clear()
            for future in (self._answered, self._cells_answered, *self._asks.values()):
                if future is not None and not future.done():
                    future.set_exception(ConnectionResetError("the connection ended"))
            connection.close()
        return welcomed

    async def _take(self, packet: Frame | AgentRecord) -> None:
        if isinstance(packet, Frame):
            if packet.kind is Kind.WELCOME:
                self.connected, self._features = True, Feature(packet.fields[6] & Feature.CELLS)
                for event, execution in self._executions.values():
                    self._queue_cell(execution.fields(event))
                if self._kernels is not None:
                    await self._send(Kind.KERNELS, *self._kernels.fields())
            return
        if packet.cells is not None:
            if self._cells_answered is not None and not self._cells_answered.done():
                self._cells_answered.set_result(packet.cells)
        elif packet.status is None:
            self._last = None  # the next query gets a new answer
        elif self._answered is not None and not self._answered.done():
            self._answered.set_result(packet.status)
        # answers to other notebook servers are ignored
        answer = packet.answer
        if answer is not None and isinstance(answer.number, int):
            future = self._asks.get(answer.number)
            if future is not None and not future.done():
                future.set_result(answer)

    async def _send(self, kind: Kind, *fields: int) -> None:
        async with self._sending:
            if self._connection is None:
                raise ConnectionResetError("there is no connection")
            self._serial += 1
            frame = Frame(kind, fields, serial=self._serial)
            await asyncio.get_running_loop().sock_sendall(self._connection, frame.pack())
