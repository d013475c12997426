"""Which agents the service asks: the one of this machine, or those of a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from gpushare_spawner.clients.agent import AgentClient
from gpushare_spawner.model.protocol.control import AgentUnreachable, ControlRefused
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.reports import Agent, Agents, KnownReport

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
