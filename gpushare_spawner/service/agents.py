"""Which agents the service asks: the one of this machine, or those of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from gpushare_spawner.clients.agent import AgentClient
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.reports import Agent


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
    ) -> AbstractAsyncContextManager[Iterable[Agent]]:
        """Return the agents of the nodes while the context is open.

        `on_change` is called when agents may have published something; `hub` is the address of the hub's API as the
        hub itself says it (empty: not known); `templates` gives the valid ones by name. Raises NoAgents.
        """


def agents_of_machine(socket: Path) -> list[Agent]:
    """Return the agent behind a control socket."""
    return [AgentClient(socket)]
