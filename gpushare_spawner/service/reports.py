"""The agents' reports, asked for together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from gpushare_spawner.model.control import AgentUnreachable, AnnounceRequest, ControlRefused, TierRequest
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

    async def announce(self, request: AnnounceRequest, /) -> None: ...


@dataclass(frozen=True)
class NodeView:
    """One agent, and its report or the reason why there is none."""

    agent: Agent
    report: Report | None
    problem: str = ""
    age: float = 0.0
    """Seconds since the agent made the report: what happened after is not in it."""


async def ask(agent: Agent) -> NodeView:
    """Never raises for an agent that fails: what it says instead is in ``problem``."""
    try:
        report = await agent.report()
        return NodeView(agent, report, age=agent.report_age())
    except (AgentUnreachable, ControlRefused) as error:
        return NodeView(agent, None, str(error))


async def ask_all(agents: Iterable[Agent]) -> list[NodeView]:
    """All agents at once; one that fails does not hold up the others."""
    return list(await asyncio.gather(*(ask(agent) for agent in agents)))


class RecentReports:
    """Reports that are at most ``max_age`` seconds old: many open dashboards cost the agents one question a second."""

    def __init__(self, agents: Iterable[Agent], max_age: float = 1.0) -> None:
        self._agents = agents
        self._max_age = max_age
        self._views: list[NodeView] = []
        self._asked_at = float("-inf")
        self._turn = asyncio.Lock()

    async def views(self) -> list[NodeView]:
        """One view for each agent."""
        async with self._turn:
            if time.monotonic() - self._asked_at >= self._max_age:
                self._views = await ask_all(self._agents)
                self._asked_at = time.monotonic()
            return self._views
