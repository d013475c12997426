"""The dashboard's page. It shows what the operations of the REST API answer, as HTML.

The service renders it, also after a change: the script joins the new page into the one that is shown. So there is one
renderer, and the page shows the same without scripts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tornado.web import authenticated

from gpushare_spawner.model.tier import Tier
from gpushare_spawner.service.api import answers, reading
from gpushare_spawner.service.api.api import OPERATIONS
from gpushare_spawner.service.api.operation import Call, Nothing
from gpushare_spawner.service.api.services import Services
from gpushare_spawner.service.api.snapshots import ServiceSnapshot
from gpushare_spawner.service.dashboard.address import DashboardAddress
from gpushare_spawner.service.dashboard.dialog_targets import DialogTargets, choices_of_sessions
from gpushare_spawner.service.web.caller import Caller
from gpushare_spawner.service.web.page import Page

OFFERED = frozenset((one.method, one.path) for one in OPERATIONS)
MOST_GPUS = 48
"""About so many on one page; a node is never cut in two."""
MOST_ROWS = 100
"""Of the queue and of quotas; the API has all. Sessions have pages of as many."""
FEW = 10
"""Users with so many sessions or fewer need no filter."""

Option = tuple[str, str]
"""A value and its text."""


@dataclass(frozen=True)
class Choices:
    """What filters offer."""

    nodes: Sequence[Option]
    templates: Sequence[Option]
    tiers: Sequence[Option]


@dataclass(frozen=True)
class Dashboard:
    """All that the page shows."""

    caller: Caller
    address: DashboardAddress
    summary: answers.Summary
    nodes: answers.Nodes
    sessions: answers.Sessions
    queue: answers.Queue
    quotas: answers.QuotasAnswer
    choices: Choices
    """Of the filters."""
    targets: DialogTargets
    session_choices: Mapping[str, Sequence[Option]]
    """Of the lists in the dialogs of sessions."""
    nodes_on_page: int
    most: int = MOST_ROWS

    @property
    def has_filters(self) -> bool:
        return self.address.filtered or self.caller.sees_all or self.sessions.total > FEW

    @property
    def earlier_sessions(self) -> str:
        """The address of the page before; empty: this is the first one."""
        query = self.address.query
        return self.address.link(offset=max(0, query.offset - query.limit)) if query.offset else ""

    @property
    def later_sessions(self) -> str:
        """The address of the page after; empty: this is the last one."""
        end = self.sessions.offset + len(self.sessions.sessions)
        return self.address.link(offset=end) if self.sessions.sessions and end < self.sessions.total else ""

    @property
    def earlier_nodes(self) -> str:
        start = self.nodes.offset
        return self._nodes_from(max(0, start - self.nodes_on_page)) if start else ""

    @property
    def later_nodes(self) -> str:
        end = self.nodes.offset + len(self.nodes.nodes)
        return self._nodes_from(end) if self.nodes.nodes and end < self.nodes.total else ""

    def _nodes_from(self, number: int) -> str:
        return self.address.link(nodes_from=number, offset=self.address.query.offset)


async def dashboard(services: Services, caller: Caller, address: DashboardAddress) -> Dashboard:
    """Return what the page shows to a caller."""

    def call(query: Any = None, **path: str) -> Any:
        return Call(services, caller, path, query or Nothing(), Nothing())

    snapshot = await services.snapshots.current()
    summary = await reading.summary(call())
    nodes_on_page = max(1, MOST_GPUS * summary.nodes // summary.gpus) if summary.gpus else MOST_GPUS
    return Dashboard(
        caller=caller,
        address=address,
        summary=summary,
        nodes=await _nodes(call, address, nodes_on_page, snapshot),
        sessions=await reading.sessions(call(address.query)),
        queue=await reading.queue(call()),
        quotas=await reading.quotas(call()),
        choices=_choices(snapshot, caller),
        targets=DialogTargets(caller, services.clock(), OFFERED),
        session_choices=choices_of_sessions(caller, snapshot.templates.values()),
        nodes_on_page=nodes_on_page,
    )


async def _nodes(call: Any, address: DashboardAddress, limit: int, snapshot: ServiceSnapshot) -> answers.Nodes:
    only = address.query.node
    if not only:
        return await reading.nodes(call(reading.NodesQuery(offset=address.nodes_from, limit=limit)))
    if only not in {report.node for report in snapshot.reports}:
        return answers.Nodes(total=0, offset=0, nodes=())
    return answers.Nodes(total=1, offset=0, nodes=(await reading.node(call(node=only)),))


def _choices(snapshot: ServiceSnapshot, caller: Caller) -> Choices:
    rows = snapshot.rows if caller.sees_all else snapshot.by_user.get(caller.name, ())
    used = {row.session.template for row in rows}
    shown = {name: one.display_name for name, one in snapshot.templates.items() if caller.sees_all or name in used}
    return Choices(
        nodes=[(report.node, report.node) for report in sorted(snapshot.reports, key=lambda one: one.node)],
        templates=sorted({name: shown.get(name, name) for name in used | shown.keys()}.items(), key=lambda one: one[1]),
        tiers=[(tier.value, tier.value) for tier in (Tier.ACTIVE, Tier.DOWNGRADED, Tier.RELEASED)],
    )


class DashboardPage(Page):
    """The dashboard: GPUs, their shares, the queue, the sessions, and quotas.

    Admins and users with the scope `custom:gpushare:read` see every session, others their own and totals
    without names. `q`, `node`, `template`, `tier`, `user`, `group`, `own`, `sort`, `offset`: as for the API's sessions.
    """

    def initialize(self, services: Services) -> None:
        self._services = services

    @authenticated
    async def get(self) -> None:
        names = self.request.query_arguments
        address = DashboardAddress.of(self._services.prefix, {name: self.get_query_argument(name) for name in names})
        self.finish_page("dashboard.html", dashboard=await dashboard(self._services, self.caller, address))
