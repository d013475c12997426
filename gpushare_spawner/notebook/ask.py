"""Asks the agent for the share's status once, over the session socket, with a blocking socket."""

from __future__ import annotations

import os
import socket
import time

from gpushare_spawner.model.frames import FRAME_BYTES, Feature, Frame, FrameError, Kind, Role
from gpushare_spawner.model.share_status import ANSWER
from gpushare_spawner.notebook.process_names import named
from gpushare_spawner.notebook.readable_status import ReadableStatus
from gpushare_spawner.wording.errors import AGENT_CLOSED, agent_refused, agent_silent, agent_unavailable, reason

SOCKET_VARIABLE = "GPUSHARE_SOCKET"
"""The path of the session's socket; the spawner sets it. Without it the server has no share."""
LIBRARY_VERSION = 100
"""The version of this side in HELLO: 0.1.0 as major*10000 + minor*100 + patch."""


class AgentUnavailable(Exception):
    """The agent gives no answer; the message says why, in a sentence."""


def hello() -> Frame:
    """Return the HELLO of an observer."""
    features = Feature.DELIVERED | Feature.RESERVE | Feature.CAUSE | Feature.USE
    return Frame(Kind.HELLO, (Role.OBSERVER, os.getpid(), LIBRARY_VERSION, features), serial=1)


def session_socket() -> str | None:
    """Return the path of the session's socket; None without a share."""
    return os.environ.get(SOCKET_VARIABLE) or None


def ask(path: str | None = None, timeout: float = 2.0) -> ReadableStatus:
    """Return the share's status within ``timeout`` seconds. ``path`` defaults to $GPUSHARE_SOCKET. Raises nothing."""
    path = path or session_socket()
    if path is None:
        return ReadableStatus.without_share()
    try:
        return _ask(path, time.monotonic() + timeout)
    except AgentUnavailable as error:
        return ReadableStatus.unknown(str(error))
    except TimeoutError:
        return ReadableStatus.unknown(agent_silent(timeout))
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or reason(error)
        return ReadableStatus.unknown(agent_unavailable(f"{why}: {path}"))


def _ask(path: str, deadline: float) -> ReadableStatus:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(_left(deadline))
        connection.connect(path)
        connection.send(hello().pack())
        gpus = _next(connection, deadline, Kind.WELCOME).fields[5]
        connection.send(Frame(Kind.QUERY, serial=2).pack())
        answer: list[Frame] = []
        while sum(frame.kind is Kind.STATUS for frame in answer) < gpus:
            answer.append(_next(connection, deadline, *ANSWER))
        return named(ReadableStatus.of(answer))


def _next(connection: socket.socket, deadline: float, *wanted: Kind) -> Frame:
    """Return the next frame of one of these kinds; others are ignored.

    Raises TimeoutError, OSError, ValueError or AgentUnavailable.
    """
    while True:
        connection.settimeout(_left(deadline))
        data = connection.recv(FRAME_BYTES + 1)
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


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
