"""The notebook server's connection to the agent.

Sends the kernels' activity, asks for the share's status, and passes what the user asks of the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from dataclasses import replace

from gpushare_spawner.model.protocol.frames import FRAME_BYTES, Feature, Frame, FrameError, Kind, TextTopic
from gpushare_spawner.model.protocol.texts import ReceivedText, TextReader
from gpushare_spawner.model.share_status import ANSWER, ShareStatus
from gpushare_spawner.notebook.agent_connection import AgentUnavailable, hello, session_socket
from gpushare_spawner.notebook.kernels import KernelActivity
from gpushare_spawner.notebook.pod_annotations import PodAnnotations
from gpushare_spawner.notebook.process_names import named
from gpushare_spawner.notebook.service_ask import ANSWER_SECONDS, NoAnswer, ServiceAsk
from gpushare_spawner.wording.controls.asks import NO_SHARE, OLD_AGENT, no_answer
from gpushare_spawner.wording.errors import (
    AGENT_CLOSED,
    AGENT_NOT_YET,
    agent_refused,
    agent_silent,
    agent_unavailable,
    reason,
)
from gpushare_spawner.wording.layers import NO_AGENT

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
