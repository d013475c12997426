"""The dashboard: a page built from the answers of the REST API's operations. Its HTML and scripts are in `web`.

The service also renders the page after a change, and the script merges the new page into the displayed one. So there is
only one renderer, and the page shows the same without scripts. Filters, order and pages are in the query of the
dashboard's URL, so that links and the browser's history preserve them.

`DialogTargets` provides the dialogs' targets: the path of a session, GPU, node or spawn in the REST API, and the forms
that the caller may use now. The API checks each request again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

from pydantic import ValidationError
from tornado.web import authenticated

from gpushare_spawner.idle.keep import KeepRule, KeepsLeft
from gpushare_spawner.model.controls import Exemption, MessageCause
from gpushare_spawner.model.layers import LAYERS, IdleReach
from gpushare_spawner.model.share import UNITS_PER_GPU, Share, Tier, chosen
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.api import answers, reading
from gpushare_spawner.service.api.reading import SessionsQuery
from gpushare_spawner.service.api.router import Call, Nothing, Services
from gpushare_spawner.service.hub.caller import Caller
from gpushare_spawner.service.sources import ServiceSnapshot
from gpushare_spawner.service.web.app import Page
from gpushare_spawner.wording import service as words
from gpushare_spawner.wording.actions import keeps_left
from gpushare_spawner.wording.amounts import gpu_share

_NODES_FROM = "nodes_from"
_LARGEST_OFFSET = 10**9
_COLUMNS = (
    ("Session", "user"),
    ("GPU", "node"),
    ("Tier and share", "tier"),
    ("GPU time", "delivered"),
    ("Last use", "-idle"),
    ("Memory", "-memory"),
    ("Next idle action", "next"),
)
"""Column titles, and the order after a click on the title; a second click reverses the order."""


@dataclass(frozen=True)
class Column:
    """A column of the sessions' table."""

    title: str
    name: str
    link: str
    """The link that sorts by the column."""
    direction: str
    """`ascending` or `descending`; empty: the table is not sorted by it."""


@dataclass(frozen=True)
class DashboardAddress:
    """The content of the page that a URL requests."""

    prefix: str
    query: SessionsQuery = field(default_factory=SessionsQuery)
    nodes_from: int = 0
    """Number of nodes to skip."""

    @classmethod
    def of(cls, prefix: str, arguments: Mapping[str, str]) -> DashboardAddress:
        """Return the address with these arguments. Invalid and unknown arguments are ignored."""
        number = arguments.get(_NODES_FROM, "")
        nodes_from = min(int(number), _LARGEST_OFFSET) if number.isascii() and number.isdigit() else 0
        requested = {name: arguments[name] for name in SessionsQuery.model_fields if arguments.get(name)}
        requested.pop("limit", None)
        try:
            query = SessionsQuery.model_validate(requested)
        except ValidationError as error:
            wrong = {detail["loc"][0] for detail in error.errors()}
            query = SessionsQuery.model_validate({name: requested[name] for name in requested.keys() - wrong})
        return cls(prefix, query, nodes_from)

    @property
    def filtered(self) -> bool:
        """Whether a filter is set."""
        return bool(self._fields().keys() - {"sort", "offset"})

    @property
    def unfiltered(self) -> str:
        """The address of all sessions, in the same order."""
        return self._address({name: value for name, value in self._fields().items() if name == "sort"})

    def link(self, **changes: Any) -> str:
        """Return the address with changed arguments, without empty ones. A different list starts on page one."""
        fields = self._fields() | changes
        if "offset" not in changes and _NODES_FROM not in changes:
            fields.pop("offset", None)
        if _NODES_FROM not in changes and "node" not in changes and self.nodes_from:
            fields[_NODES_FROM] = self.nodes_from
        return self._address(fields)

    def columns(self) -> Sequence[Column]:
        """Return the columns of the sessions' table."""
        return [self._column(title, sort) for title, sort in _COLUMNS]

    def _column(self, title: str, sort: str) -> Column:
        name, now = sort.removeprefix("-"), self.query.sort
        if now.removeprefix("-") != name:
            return Column(title, name, self.link(sort=sort), "")
        other = name if now.startswith("-") else f"-{name}"
        return Column(title, name, self.link(sort=other), "descending" if now.startswith("-") else "ascending")

    def _fields(self) -> dict[str, Any]:
        return self.query.model_dump(mode="json", exclude_defaults=True, exclude={"limit"})

    def _address(self, fields: Mapping[str, Any]) -> str:
        given = {name: "true" if value is True else value for name, value in fields.items() if value}
        return self.prefix + (f"?{urlencode(given)}" if given else "")


_TIERS = [(tier.value, tier.value) for tier in (Tier.ACTIVE, Tier.DOWNGRADED, Tier.RELEASED)]
"""The choices of a running session's tier, as pairs of a value and its text."""

Target = Mapping[str, Any]
"""A dialog's target, for JSON. `address`: path below the API's prefix. `may`: names of forms in
`web/pages/parts/dialogs.html`. `show`: texts. `choices`: the lists' choices, as pairs of a value and its text.
`chosen`: the lists' preselected values."""


@dataclass(frozen=True)
class DialogTargets:
    """The targets for one caller."""

    caller: Caller
    now: float
    """Seconds since the epoch."""

    def session(self, session: answers.SessionEntry) -> Target:
        """Return the target of a session that the caller may act on."""
        limits, all_sessions, reach = session.keep_limits, self.caller.acts_on_all, LAYERS[session.layer].reach
        may_keep = min(limits.longest_seconds, limits.per_day, limits.at_once) > 0
        # the service's own messages end with their cause
        lasting = {MessageCause.DRAIN, MessageCause.BYPASS, MessageCause.BUDGET}
        withdrawable = [message.text for message in session.messages if message.cause not in lasting]
        forms = {
            "keep": all_sessions or may_keep,
            "end-keep": session.keep is not None,
            "release": IdleReach.RELEASE in reach and session.tier is not Tier.RELEASED,
            "share": IdleReach.RESIZE in reach and bool(session.share_choices),
            "restart": True,
            "stop": True,
            "message": all_sessions,
            "withdraw-message": all_sessions and bool(withdrawable),
            "exempt": all_sessions,
            "end-exempt": all_sessions and session.exemption is not None,
            "tier": all_sessions and not reach.isdisjoint((IdleReach.RELEASE, IdleReach.DOWNGRADE)),
        }
        show = {
            "name": words.server_name(session.user, session.server),
            "terms": words.session_terms(
                session.display_name, session.share_units, session.gpu_count, session.last_units
            ),
            "kept": words.kept(session.keep.until - self.now, session.keep.by) if session.keep else "",
            "keep_terms": ""
            if all_sessions
            else keeps_left(
                KeepsLeft(
                    limits.left, KeepRule(limits.longest_seconds, limits.per_day, limits.at_once), limits.again_at
                ),
                self.now,
            ),
            "message": " ".join(withdrawable),
            "exempt": self._exempt(session.exemption) if session.exemption else "",
        }
        return {
            "address": f"sessions/{quote(session.id, safe='')}",
            "may": [form for form in forms if forms[form]],
            "show": show,
            "choices": {
                "tiers": [choice for choice in _TIERS if choice[0] != session.tier],
                "shares": _shares(session),
            },
            "chosen": {"templates": session.template, "shares": _larger_share(session)},
        }

    def _exempt(self, exemption: Exemption) -> str:
        until = exemption.until
        return words.exempt(until - self.now if until is not None else None, exemption.by, exemption.reason)

    def node(self, node: answers.NodeEntry) -> Target:
        """Return the target of a node."""
        return _target(f"nodes/{quote(node.name, safe='')}", _of_place(node.cordon), name=words.node_name(node.name))

    def gpu(self, node: answers.NodeEntry, gpu: answers.GpuEntry) -> Target:
        """Return the target of a node's GPU."""
        address = f"nodes/{quote(node.name, safe='')}/gpus/{quote(gpu.uuid, safe='')}"
        return _target(address, _of_place(gpu.cordon), name=words.gpu_name(gpu.index, node.name))

    def budget(self, budget: answers.BudgetAnswer, name: str) -> Target:
        """Return the target of a budget."""
        user = f"/users/{quote(budget.user, safe='')}" if budget.user else ""
        forms = ("grant", "end-grant") if budget.granted else ("grant",)
        return _target(f"budgets/{quote(budget.account, safe='')}{user}", forms, name=name, terms=budget.text)

    def spawn(self, spawn: answers.SpawnEntry) -> Target:
        """Return the target of a spawn that the caller may act on."""
        forms = ("requeue", "cancel") if self.caller.acts_on_all else ("cancel",)
        name = words.server_name(spawn.user, spawn.server)
        return _target(spawn.address, forms, name=name, terms=spawn.display_name)


def _target(address: str, may: Sequence[str], **show: str) -> Target:
    return {"address": address, "may": may, "show": show}


def choices_of_sessions(caller: Caller, templates: Iterable[Template]) -> Mapping[str, Sequence[tuple[str, str]]]:
    """Return the choices for the lists in sessions' dialogs, as values with their texts.

    They are the same for all sessions that a caller may act on: the templates that the caller may use, or all templates
    for a caller with the right to act on all sessions.
    """
    allowed = [
        template for template in templates if caller.acts_on_all or template.access.allows(caller.name, caller.groups)
    ]
    return {
        "templates": sorted(
            ((template.name, template.display_name) for template in allowed), key=lambda choice: choice[1]
        )
    }


def _of_place(cordon: answers.CordonEntry | None) -> Sequence[str]:
    if cordon is None:
        return ("cordon", "drain")
    return ("end-drain",) if cordon.drain else ("end-cordon", "drain")


def _larger_share(session: answers.SessionEntry) -> str:
    """Return the next larger free share, which is the most frequent choice; empty: none is free."""
    own = Share(session.share_units, max(1, session.gpu_count), session.last_units).total_units
    larger = (choice for choice in session.share_choices if chosen(choice, session.gpu_count).total_units > own)
    return next((f"{choice / UNITS_PER_GPU:g}" for choice in larger if _is_free(session, choice)), "")


def _is_free(session: answers.SessionEntry, choice: int) -> bool:
    share = chosen(choice, session.gpu_count)
    whole = session.share_units == UNITS_PER_GPU  # then only the last GPU may lack units
    return (share.least_units if whole else share.units) <= session.largest_share_units


def _share(session: answers.SessionEntry, choice: int) -> str:
    share = chosen(choice, session.gpu_count)
    return gpu_share(share.units, share.count, share.last_units)


def _shares(session: answers.SessionEntry) -> Sequence[tuple[str, str]]:
    return [
        (
            f"{units / UNITS_PER_GPU:g}",
            _share(session, units) if _is_free(session, units) else words.not_free(_share(session, units)),
        )
        for units in session.share_choices
    ]


MOST_GPUS = 48
"""Approximate maximum number of GPUs on one page. A node is never split."""
MOST_ROWS = 100
"""Maximum rows of the queue and of quotas; the API returns all. A page of sessions has the same number."""
FEW = 10
"""Maximum number of sessions for which a user gets no filter."""

Option = tuple[str, str]
"""A value and its text."""


@dataclass(frozen=True)
class Choices:
    """The choices of the filters."""

    nodes: Sequence[Option]
    templates: Sequence[Option]
    tiers: Sequence[Option]


@dataclass(frozen=True)
class Dashboard:
    """The data of the page."""

    caller: Caller
    address: DashboardAddress
    summary: answers.Summary
    nodes: answers.NodePage
    sessions: answers.Sessions
    queue: answers.Queue
    quotas: answers.QuotasAnswer
    choices: Choices
    """Choices of the filters."""
    targets: DialogTargets
    session_choices: Mapping[str, Sequence[Option]]
    """Choices for the lists in sessions' dialogs."""
    nodes_on_page: int
    most: int = MOST_ROWS

    @property
    def has_filters(self) -> bool:
        return self.address.filtered or self.caller.sees_all or self.sessions.total > FEW

    @property
    def earlier_sessions(self) -> str:
        """The address of the previous page of sessions; empty on the first page."""
        query = self.address.query
        return self.address.link(offset=max(0, query.offset - query.limit)) if query.offset else ""

    @property
    def later_sessions(self) -> str:
        """The address of the next page of sessions; empty on the last page."""
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
    """Return the data of the page for a caller."""

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
        targets=DialogTargets(caller, services.actions.clock()),
        session_choices=choices_of_sessions(caller, snapshot.templates.values()),
        nodes_on_page=nodes_on_page,
    )


async def _nodes(call: Any, address: DashboardAddress, limit: int, snapshot: ServiceSnapshot) -> answers.NodePage:
    only = address.query.node
    if not only:
        return await reading.nodes(call(reading.NodesQuery(offset=address.nodes_from, limit=limit)))
    if only not in {report.node for report in snapshot.reports}:
        return answers.NodePage(total=0, offset=0, nodes=())
    return answers.NodePage(total=1, offset=0, nodes=(await reading.node(call(node=only)),))


def _choices(snapshot: ServiceSnapshot, caller: Caller) -> Choices:
    rows = snapshot.decisions if caller.sees_all else snapshot.by_user.get(caller.name, ())
    used = {row.session.template for row in rows}
    shown = {
        name: template.display_name for name, template in snapshot.templates.items() if caller.sees_all or name in used
    }
    return Choices(
        nodes=[(report.node, report.node) for report in sorted(snapshot.reports, key=lambda report: report.node)],
        templates=sorted(
            {name: shown.get(name, name) for name in used | shown.keys()}.items(), key=lambda choice: choice[1]
        ),
        tiers=_TIERS,
    )


class DashboardPage(Page):
    """The dashboard: GPUs, their shares, the queue, the sessions, and quotas.

    Admins and users with the scope `custom:gpushare:read` see every session. Other users see their own sessions and
    totals without names. The arguments `q`, `node`, `template`, `tier`, `user`, `group`, `own`, `sort` and `offset` are
    those of the API's sessions.
    """

    def initialize(self, services: Services) -> None:
        self._services = services

    @authenticated
    async def get(self) -> None:
        names = self.request.query_arguments
        address = DashboardAddress.of(self._services.prefix, {name: self.get_query_argument(name) for name in names})
        self.finish_page("dashboard.html", dashboard=await dashboard(self._services, self.caller, address))
