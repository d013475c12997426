"""Reads the reports of all agents at once.

Which agents the service asks: the one of this machine, or those of a cluster.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from gpushare_spawner.clients.agent import AgentClient
from gpushare_spawner.model.control import (
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
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.template import Template


class UnconfirmedSession(BaseModel):
    """A session that only a node's report knows: nobody vouches for its identity, and it counts for nothing."""

    model_config = ConfigDict(frozen=True)

    id: str
    """What the report calls it: any text."""
    since: float
    """When the service saw it first, in seconds since the epoch."""


class KnownReport(Report):
    """A node's report, whose `sessions` are only those whose identity is vouched for.

    On Kubernetes the protected annotations of a node's pods say whose a session is and what share was promised
    (`service.kubernetes.pod_sessions.joined_report`); on one machine the agent repeats what the hub's spawner said when
    it opened the session, on a socket that nobody else can use (`service.agents.MachineAgent`). A report adds figures
    to these sessions, and never makes one. No other place makes a KnownReport, and `Agent.report` returns nothing else.
    """

    unconfirmed: tuple[UnconfirmedSession, ...] = ()
    """For admins to read."""
    others: tuple[SessionReport, ...] = ()
    """Units that pods of other hubs have, and older pods of the same sessions: nothing but units, without users."""

    @property
    def allocated_to(self) -> tuple[SessionReport, ...]:
        """The sessions that have units of the node's GPUs, those of other hubs included."""
        return self.sessions + self.others

    @classmethod
    def of(
        cls,
        report: Report,
        sessions: tuple[SessionReport, ...],
        unconfirmed: tuple[UnconfirmedSession, ...] = (),
        others: tuple[SessionReport, ...] = (),
    ) -> KnownReport:
        """Return a report with these sessions instead of its own."""
        return cls.model_construct(
            **{**dict(report), "sessions": sessions, "unconfirmed": unconfirmed, "others": others}
        )


class Agent(Protocol):
    """What the service asks of a node's agent.

    `service.agents.MachineAgent` asks the one of this machine, `service.kubernetes.node.NodeAgent` one in a
    cluster. Methods raise `AgentUnreachable` or `ControlRefused`.
    """

    async def report(self) -> KnownReport: ...

    def report_age(self) -> float:
        """Seconds since the agent made what `report` returned last."""

    async def tier(self, request: TierRequest, /) -> None: ...

    async def carried_out(self, request: TierRequest, /) -> bool:
        """Wait until the session has the tier of the request, which `tier` has made. False: the agent has not said so
        in time, and may still carry it out. Refused with code ``busy`` where the session has another tier since."""

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
    report: KnownReport | None
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


ASKED_WITHIN = 30.0
"""Seconds that one question whether notebook servers ask something waits at the agent."""
AGENT_BACK = 1.0
"""Seconds between two tries while the agent does not answer."""


class NoAgents(RuntimeError):
    """Agents cannot be asked in the way that the options say; the text says why."""


class ClusterAgents(Protocol):
    """Gives the agents of a cluster. cli.py hands in `service.kubernetes.agents.agents_of_cluster`."""

    def __call__(
        self,
        namespace: str,
        all_namespaces: bool,
        on_change: Callable[[], None],
        hub: str,
        templates: Callable[[], Mapping[str, Template]],
    ) -> AbstractAsyncContextManager[Agents]:
        """Return the agents of the nodes while the context is open.

        `on_change` is called when agents may have published something; `hub` is the address of the hub's API as the
        hub itself says it (empty: not known); `templates` gives the valid ones by name. Raises NoAgents.
        """


class MachineAgent(AgentClient):
    """The agent of this machine, as `reports.Agent`.

    Its report is as good as the hub's own list of sessions: a session is opened only by a request of the hub's spawner
    on the control socket, with its user, server, template and share. Only root and the agent's own user can use that
    socket, they alone can write the agent's state, and nothing that a session's socket takes changes these fields.
    """

    async def report(self) -> KnownReport:
        """Return the agent's report: the hub has opened all its sessions."""
        report = await super().report()
        return KnownReport.of(report, report.sessions)


class MachineAgents:
    """The agent of this machine, as `reports.Agents`."""

    def __init__(self, agent: MachineAgent) -> None:
        self._agent = agent

    def __iter__(self) -> Iterator[Agent]:
        return iter([self._agent])

    async def asking(self) -> Sequence[Agent]:
        """Wait until notebook servers ask something. Asks the agent once in `ASKED_WITHIN` seconds."""
        while True:
            try:
                if await self._agent.asked(ASKED_WITHIN):
                    return [self._agent]
            except ControlRefused:
                # an agent that is older than asks; it can be updated
                await asyncio.sleep(ASKED_WITHIN)
            except AgentUnreachable:
                await asyncio.sleep(AGENT_BACK)


def agents_of_machine(socket: Path) -> MachineAgents:
    """Return the agent behind a control socket."""
    return MachineAgents(MachineAgent(socket))
