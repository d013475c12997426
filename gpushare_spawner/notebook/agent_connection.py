"""A connection to the agent over the session socket, with a blocking socket: for a question of a command or a cell."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection
from typing import Self, TypeVar

from gpushare_spawner.model.protocol.frames import FRAME_BYTES, Feature, Frame, FrameError, Kind, Role
from gpushare_spawner.wording.errors import AGENT_CLOSED, agent_refused, agent_silent, agent_unavailable, reason

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
