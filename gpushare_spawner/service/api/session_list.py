"""Which sessions a client asks for, in which order. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from gpushare_spawner.model.tier import Tier
from gpushare_spawner.service.api.operation import Arguments
from gpushare_spawner.service.api.snapshots import Row, ServiceSnapshot
from gpushare_spawner.service.history.groups import group_of_session
from gpushare_spawner.service.web.viewer import Viewer

MOST = 1000
"""Of sessions or nodes on one page."""

Column = Literal[
    "user", "node", "template", "tier", "share", "delivered", "idle", "memory", "kernels", "next", "opened"
]
Sort = Literal[Column, "-user", "-node", "-template", "-tier", "-share", "-delivered", "-idle", "-memory", "-kernels",
               "-next", "-opened"]  # fmt: skip


class Page(Arguments):
    """A part of a list."""

    offset: Annotated[int, Field(ge=0)] = 0
    """How many to leave out."""
    limit: Annotated[int, Field(ge=1, le=MOST)] = 100
    """How many to return at most."""


class SessionsQuery(Page):
    """Which sessions, in which order."""

    q: Annotated[str, Field(max_length=200)] = ""
    """A part of the name of the user, server, node, template or group; case is ignored."""
    node: str = ""
    """Only this node's."""
    template: str = ""
    """Only of this template."""
    user: str = ""
    """Only this user's."""
    tier: Tier | None = None
    """Only in this tier."""
    group: str = ""
    """Only those charged to this group's quota."""
    own: bool = False
    """Only the caller's own."""
    sort: Sort = "user"
    """The column to sort by; with `-` before it the largest first."""


def found(snapshot: ServiceSnapshot, query: SessionsQuery, viewer: Viewer) -> list[Row]:
    """Return the sessions that the viewer may see and asks for, in order; all pages."""
    rows = _ordered(snapshot, query.sort)
    if query.own or not viewer.sees_all:
        rows = [row for row in rows if row.session.user == viewer.name]
    return list(_filtered(rows, query, snapshot)) if _filters(query) else rows


def _ordered(snapshot: ServiceSnapshot, sort: Sort) -> list[Row]:
    known = snapshot.orders.get(sort)
    if known is None:
        column, largest_first = sort.removeprefix("-"), sort.startswith("-")
        by_name = sorted(snapshot.rows, key=_KEYS["user"])
        # sorting is stable: equal ones are by name
        known = by_name if sort == "user" else sorted(by_name, key=_KEYS[column], reverse=largest_first)
        snapshot.orders[sort] = known
    return known


def _filters(query: SessionsQuery) -> bool:
    return bool(query.q or query.node or query.template or query.user or query.tier or query.group)


def _filtered(rows: Sequence[Row], query: SessionsQuery, snapshot: ServiceSnapshot) -> Iterator[Row]:
    wanted = query.q.casefold()
    for row in rows:
        session = row.session
        if (
            (not query.node or row.report.node == query.node)
            and (not query.template or session.template == query.template)
            and (not query.user or session.user == query.user)
            and (query.tier is None or session.tier is query.tier)
            and (not query.group or group_of_session(session, {}) == query.group)
            and (not wanted or wanted in _text(row, snapshot))
        ):
            yield row


def _text(row: Row, snapshot: ServiceSnapshot) -> str:
    session, template = row.session, snapshot.templates.get(row.session.template)
    shown = template.display_name if template is not None else ""
    names = (session.user, session.server, row.report.node, session.template, shown, group_of_session(session, {}))
    # a line break is in no query's way: it is in no name
    return "\n".join(names).casefold()


def _delivered(row: Row) -> float:
    time = row.session.delivered
    # without competition nothing is owed
    return time.delivered_seconds / time.entitled_seconds if time.entitled_seconds else 1.0


def _idle_since(row: Row) -> float:
    return float("-inf") if row.session.gpu_busy else -row.decision.decision.idle_since


def _next(row: Row) -> float:
    coming = row.decision.decision.upcoming
    return coming.at if coming is not None else float("inf")


_TIERS = {tier: number for number, tier in enumerate((Tier.ACTIVE, Tier.DOWNGRADED, Tier.RELEASED, Tier.STOPPED))}
_KEYS: dict[str, Callable[[Row], Any]] = {
    "user": lambda row: (row.session.user.casefold(), row.session.server.casefold(), row.session.id),
    "node": lambda row: row.report.node,
    "template": lambda row: row.session.template,
    "tier": lambda row: _TIERS[row.session.tier],
    "share": lambda row: row.session.share_units * max(1, len(row.session.gpus)),
    "delivered": _delivered,
    "idle": _idle_since,
    "memory": lambda row: row.session.memory_bytes,
    "kernels": lambda row: row.session.kernels or 0,
    "next": _next,
    "opened": lambda row: row.session.opened_at,
}
