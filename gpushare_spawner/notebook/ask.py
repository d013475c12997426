"""Asks the agent for the share's status once."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from gpushare_spawner.model.protocol.frames import Frame, Kind
from gpushare_spawner.model.share_status import ANNOTATIONS_VARIABLE, ANSWER
from gpushare_spawner.notebook.agent_connection import AgentConnection, AgentUnavailable, session_socket, with_agent
from gpushare_spawner.notebook.process_names import named
from gpushare_spawner.notebook.readable_status import ReadableStatus


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
