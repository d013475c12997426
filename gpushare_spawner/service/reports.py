"""Reads the reports of all agents at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpushare_spawner.model.protocol.control import (
    AgentUnreachable,
    AnnounceRequest,
    AnswerRequest,
    ControlRefused,
    ControlsRequest,
    CordonRequest,
    MessageRequest,
    ResizeRequest,
    TierRequest,
)
from gpushare_spawner.model.report import Report


class Agent(Protocol):
    """What the service asks of a node's agent.

    `clients.agent.AgentClient` asks the one of this machine, `service.kubernetes.node.NodeAgent` one in a
    cluster. Methods raise `AgentUnreachable` or `ControlRefused`.
    """

    async def report(self) -> Report: ...

    def report_age(self) -> float:
        """Seconds since the agent made what `report` returned last."""

    async def tier(self, request: TierRequest, /) -> None: ...

    async def resize(self, request: ResizeRequest, /) -> None: ...

    async def announce(self, request: AnnounceRequest, /) -> None: ...

    async def controls(self, request: ControlsRequest, /) -> None: ...

    async def message(self, request: MessageRequest, /) -> None: ...

    async def answer(self, request: AnswerRequest, /) -> None: ...

    async def cordon(self, request: CordonRequest, /) -> None: ...


class Agents(Protocol):
    """The agents of all nodes; nodes of a cluster come and go."""

    def __iter__(self) -> Iterator[Agent]: ...

    async def asking(self) -> Sequence[Agent]:
        """Wait until notebook servers ask something of the service, and return the agents of their nodes.

        They can be the same ones again until an answer has reached them.
        """


@dataclass(frozen=True)
class NodeSnapshot:
    """One agent's report, or the reason why there is none."""

    agent: Agent
    report: Report | None
    problem: str = ""
    age: float = 0.0
    """Age of the report in seconds; later events are not in it."""


async def ask(agent: Agent) -> NodeSnapshot:
    """Return the agent's report. Raises nothing: the reason of a failure is in ``problem``."""
    try:
        report = await agent.report()
        return NodeSnapshot(agent, report, age=agent.report_age())
    except (AgentUnreachable, ControlRefused) as error:
        return NodeSnapshot(agent, None, str(error))


async def ask_all(agents: Iterable[Agent]) -> list[NodeSnapshot]:
    """Ask all agents at once; one that fails does not delay the others."""
    return list(await asyncio.gather(*(ask(agent) for agent in agents)))


class RecentReports:
    """Reports that are at most ``max_age`` seconds old: many open dashboards cost each agent one request a second."""

    def __init__(self, agents: Iterable[Agent], max_age: float = 1.0) -> None:
        self._agents = agents
        self._max_age = max_age
        self._snapshots: list[NodeSnapshot] = []
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()

    async def snapshots(self) -> list[NodeSnapshot]:
        """Return one snapshot for each agent."""
        async with self._asking:
            if time.monotonic() - self._asked_at >= self._max_age:
                self._snapshots = await ask_all(self._agents)
                self._asked_at = time.monotonic()
            return self._snapshots

    def outdated(self) -> None:
        """Mark the reports as old: the next caller asks the agents again."""
        self._asked_at = float("-inf")
