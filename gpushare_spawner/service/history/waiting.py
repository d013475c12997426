"""Watches spawns that wait for a GPU, and says how long each waited. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from gpushare_spawner.model.report import Report
from gpushare_spawner.service.history.events import Outcome, Wait
from gpushare_spawner.service.hub.client import HubServer

_Server = tuple[str, str]
"""User, and server name."""


class SpawnWatch:
    """The spawns that waited when they were observed last, and the sessions that are open."""

    def __init__(self, group_of_user: Callable[[str], str]) -> None:
        self._group_of = group_of_user
        self._waiting: dict[_Server, tuple[float, str]] = {}
        self._open: dict[str, set[tuple[_Server, float]]] = {}

    def observe_report(self, report: Report, started: Mapping[_Server, float]) -> list[Wait]:
        """Return the waits of the sessions that were opened since the node's last report.

        ``started``: when the hub began to start each server (seconds since the epoch), as far as it says. Sessions in
        a node's first report were opened before anybody watched, and are left out.
        """
        before = self._open.get(report.node)
        self._open[report.node] = {((one.user, one.server), one.opened_at) for one in report.sessions}
        waits = []
        for session in report.sessions:
            server = (session.user, session.server)
            if before is None or (server, session.opened_at) in before:
                continue
            began, _ = self._waiting.pop(server, (started.get(server, session.opened_at), ""))
            waits.append(self._wait(server, session.template, began, session.opened_at, Outcome.STARTED))
        return waits

    def observe_queue(self, waiting: Sequence[HubServer], now: float) -> list[Wait]:
        """Return the waits that ended without a session. ``waiting``: those that wait now, each for a GPU.

        All nodes have reported, so a spawn that neither waits nor has a session was cancelled, or has failed.
        ``now``: seconds since the epoch.
        """
        with_share = {server for sessions in self._open.values() for server, _ in sessions}
        still = {(server.user, server.name): server for server in waiting}
        waits = []
        for server in [server for server in self._waiting if server not in still]:
            began, template = self._waiting.pop(server)
            if server not in with_share:
                waits.append(self._wait(server, template, began, now, Outcome.GAVE_UP))
        for server, spawn in still.items():
            if server not in with_share and server not in self._waiting:
                began = now if spawn.started is None else spawn.started
                self._waiting[server] = (began, spawn.profile or "")
        return waits

    def forget_nodes(self, present: Iterable[str]) -> None:
        """Forget nodes that have left the cluster. ``present``: those that have not."""
        for node in set(self._open) - set(present):
            del self._open[node]

    def _wait(self, server: _Server, template: str, began: float, ended: float, outcome: Outcome) -> Wait:
        user, name = server
        return Wait(began, max(0.0, ended - began), outcome, user, name, template, self._group_of(user))
