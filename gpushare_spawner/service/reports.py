"""The service's interface to the agents, and the reports of all agents.

`Agent` and `Agents` are the interfaces. The agent of this machine is implemented here; the agents of a cluster are in
`service.kubernetes`; `service.kubernetes.cluster` also applies the limit on a report's age.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from gpushare_spawner.clients.agent import AgentClient
from gpushare_spawner.model.control import AgentUnreachable, ControlRefused, ServiceRequest, TierRequest
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.template import Template


class UnconfirmedSession(BaseModel):
    """A session that is only in a node's report. Its identity is not confirmed, and it is not counted."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    id: str
    """The id in the report, which can be any text."""
    since: float
    """The time at which the service first saw it, in seconds since the epoch."""


class KnownReport(Report):
    """A node's report with only those `sessions` that have a confirmed identity.

    On Kubernetes, the protected annotations of a node's pods determine a session's user and share
    (`service.kubernetes.pod_sessions.joined_report`). On one machine, the agent repeats the values that the hub's
    spawner sent when it opened the session, on a protected socket (`MachineAgent`). A report adds figures to these
    sessions, and never adds a session. Nothing else creates a KnownReport, and `Agent.report` returns nothing else.
    """

    unconfirmed: tuple[UnconfirmedSession, ...] = ()
    """Sessions without a confirmed identity, shown to admins."""
    others: tuple[SessionReport, ...] = ()
    """Units of other hubs' pods and of older pods of the same sessions, without users."""

    @property
    def allocated_to(self) -> tuple[SessionReport, ...]:
        """The sessions that hold units of the node's GPUs, including those of other hubs."""
        return self.sessions + self.others

    @classmethod
    def of(
        cls,
        report: Report,
        sessions: tuple[SessionReport, ...],
        unconfirmed: tuple[UnconfirmedSession, ...] = (),
        others: tuple[SessionReport, ...] = (),
    ) -> KnownReport:
        """Return the report with these sessions instead of its own."""
        return cls.model_construct(
            **{**dict(report), "sessions": sessions, "unconfirmed": unconfirmed, "others": others}
        )


class Agent(Protocol):
    """The service's interface to a node's agent.

    The implementations are `MachineAgent` for this machine and `service.kubernetes.cluster.NodeAgent` for a cluster.
    Methods raise `AgentUnreachable` or `ControlRefused`.
    """

    async def report(self) -> KnownReport: ...

    def report_age(self) -> float:
        """Return the age of the last result of `report`, in seconds."""

    async def send(self, request: ServiceRequest, /) -> None: ...

    async def carried_out(self, request: TierRequest, /) -> bool:
        """Wait until the session has the tier that an earlier call of `send` requested, and return True.

        Return False if the agent has not confirmed it in time; it may still carry it out. Raises ControlRefused with
        code ``busy`` if the session has since changed to another tier.
        """


class Agents(Protocol):
    """The agents of all nodes. A cluster's nodes can change."""

    def __iter__(self) -> Iterator[Agent]: ...

    async def asking(self) -> Sequence[Agent]:
        """Wait until notebook servers have asks for the service, and return the agents of their nodes.

        The same agents can be returned repeatedly until an answer has reached them.
        """


@dataclass(frozen=True)
class NodeSnapshot:
    """One agent's report, or the reason why there is no report."""

    agent: Agent
    report: KnownReport | None
    problem: str = ""
    age: float = 0.0
    """Age of the report in seconds. The report has no later events."""


async def ask(agent: Agent) -> NodeSnapshot:
    """Return the agent's report. Raises nothing; ``problem`` has the reason for a failure."""
    try:
        report = await agent.report()
        return NodeSnapshot(agent, report, age=agent.report_age())
    except (AgentUnreachable, ControlRefused) as error:
        return NodeSnapshot(agent, None, str(error))


async def ask_all(agents: Iterable[Agent]) -> list[NodeSnapshot]:
    """Read the reports of all agents concurrently. A failure does not delay the others."""
    return list(await asyncio.gather(*(ask(agent) for agent in agents)))


def answered(snapshots: Iterable[NodeSnapshot]) -> list[KnownReport]:
    """Return the reports of the agents that answered."""
    return [snapshot.report for snapshot in snapshots if snapshot.report is not None]


class RecentReports:
    """Cache of reports at most ``max_age`` seconds old. Many open dashboards cost each agent one request a second."""

    def __init__(self, agents: Iterable[Agent], max_age: float = 1.0) -> None:
        self._agents = agents
        self._max_age = max_age
        self._snapshots: list[NodeSnapshot] = []
        self._requested_at = float("-inf")
        self._requesting = asyncio.Lock()

    async def snapshots(self) -> list[NodeSnapshot]:
        """Return one snapshot for each agent."""
        async with self._requesting:
            if time.monotonic() - self._requested_at >= self._max_age:
                self._snapshots = await ask_all(self._agents)
                self._requested_at = time.monotonic()
            return self._snapshots

    def outdated(self) -> None:
        """Mark the reports as outdated, so that the next caller requests new ones."""
        self._requested_at = float("-inf")


LONG_POLL = 30.0
"""Seconds for which the agent delays its answer while there are no asks."""
AGENT_BACK = 1.0
"""Seconds between attempts while the agent does not answer."""


class NoAgents(RuntimeError):
    """Error: the agents cannot be used with these options. The text states the reason."""


ClusterAgents = Callable[
    [str, bool, Callable[[], None], str, Callable[[], Mapping[str, Template]]], AbstractAsyncContextManager[Agents]
]
"""Type of `service.kubernetes.agents.agents_of_cluster`, which cli.py passes, because only a cluster needs its
packages."""


class MachineAgent(AgentClient):
    """The agent of this machine, an `Agent`.

    Its report is as reliable as the hub's own list of sessions: only a request from the hub's spawner on the control
    socket opens a session, with its user, server, template and share. Only root and the agent's user can use that
    socket and write the agent's state, and no message on a session's socket changes these fields.
    """

    async def report(self) -> KnownReport:
        """Return the agent's report. The hub has opened all its sessions."""
        report = await super().report()
        return KnownReport.of(report, report.sessions)


class MachineAgents:
    """The agent of this machine, as `Agents`."""

    def __init__(self, agent: MachineAgent) -> None:
        self._agent = agent

    def __iter__(self) -> Iterator[Agent]:
        return iter([self._agent])

    async def asking(self) -> Sequence[Agent]:
        """Wait until notebook servers have asks. Query the agent once every `LONG_POLL` seconds."""
        while True:
            try:
                if await self._agent.wait_for_ask(LONG_POLL):
                    return [self._agent]
            except ControlRefused:
                # an older agent without this request, which may be updated later
                await asyncio.sleep(LONG_POLL)
            except AgentUnreachable:
                await asyncio.sleep(AGENT_BACK)
