"""The operations that return data: nodes, sessions, the queue, quotas, events, and the history.

The module also filters and sorts the sessions of a request. `acting` has the operations that act, and `answers` the
models of the answers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from sqlalchemy import Connection

from gpushare_spawner.model.quota import NOTHING, BudgetState, Resource
from gpushare_spawner.model.report import shared_fields
from gpushare_spawner.model.share import Tier
from gpushare_spawner.quota.accounts import Account, QuotaUsage
from gpushare_spawner.service.api import answers
from gpushare_spawner.service.api.entries import node_entry, problems, session_entry, spawn_entry
from gpushare_spawner.service.api.router import ApiError, Arguments, Call, Nothing, Operation, Raw
from gpushare_spawner.service.api.snapshots import ChangedResources, TooManyStreams
from gpushare_spawner.service.culler.decisions import SessionDecision
from gpushare_spawner.service.history.queries import Period, group_of_session
from gpushare_spawner.service.history.store import HistoryFailed
from gpushare_spawner.service.hub.caller import Caller
from gpushare_spawner.service.hub.roles import CUSTOM
from gpushare_spawner.service.right_size import advice_of, sums_of
from gpushare_spawner.service.sources import ServiceSnapshot
from gpushare_spawner.service.units import KINDS
from gpushare_spawner.service.web.history import (
    CSV_HEADERS,
    CSV_TYPE,
    actions_text,
    division_of,
    gpu_time_text,
    period_of,
    user_of,
)
from gpushare_spawner.wording import service as words

OPERATIONS: list[Operation] = []
T = TypeVar("T")
operation = partial(Operation, OPERATIONS)
_ERRORS = {404: "The service keeps no history.", 503: "The database does not answer."}

MOST = 1000
"""Maximum number of sessions or nodes on one page."""

Column = Literal[
    "user", "node", "template", "tier", "share", "delivered", "idle", "memory", "kernels", "next", "opened"
]
Sort = Literal[Column, "-user", "-node", "-template", "-tier", "-share", "-delivered", "-idle", "-memory", "-kernels",
               "-next", "-opened"]  # fmt: skip


class PageArguments(Arguments):
    """A part of a list."""

    offset: Annotated[int, Field(ge=0)] = 0
    """Number of entries to skip."""
    limit: Annotated[int, Field(ge=1, le=MOST)] = 100
    """Largest number of entries to return."""


class SessionsQuery(PageArguments):
    """Session filters and sort order."""

    q: Annotated[str, Field(max_length=200)] = ""
    """Part of the name of the user, server, node, template or group, ignoring case."""
    node: str = ""
    """Only sessions on this node."""
    template: str = ""
    """Only sessions of this template."""
    user: str = ""
    """Only sessions of this user."""
    tier: Tier | None = None
    """Only sessions in this tier."""
    group: str = ""
    """Only sessions that are charged to this group."""
    own: bool = False
    """Only the caller's own sessions."""
    sort: Sort = "user"
    """The column to sort by; with a leading `-`, in descending order."""


def matching_rows(snapshot: ServiceSnapshot, query: SessionsQuery, viewer: Caller) -> list[SessionDecision]:
    """Return all sessions that match the query and that the viewer may see, in order."""
    rows = _ordered(snapshot, query.sort)
    if query.own or not viewer.sees_all:
        rows = [row for row in rows if row.session.user == viewer.name]
    for name, value_of in _FILTERED.items():
        if value := getattr(query, name):
            rows = [row for row in rows if value_of(row) == value]
    if search_text := query.q.casefold():
        rows = [row for row in rows if search_text in _text(row, snapshot)]
    return rows


_FILTERED: dict[str, Callable[[SessionDecision], str]] = {
    "node": lambda row: row.node,
    "template": lambda row: row.session.template,
    "user": lambda row: row.session.user,
    "tier": lambda row: row.session.tier,
    "group": lambda row: group_of_session(row.session, {}),
}
"""Functions that return the value that a filter of `SessionsQuery` compares."""


def _ordered(snapshot: ServiceSnapshot, sort: Sort) -> list[SessionDecision]:
    rows = snapshot.orders.get(sort)
    if rows is None:
        column, largest_first = sort.removeprefix("-"), sort.startswith("-")
        by_name = sorted(snapshot.decisions, key=_KEYS["user"])
        # sorting is stable, so equal rows stay in the order of names
        rows = by_name if sort == "user" else sorted(by_name, key=_KEYS[column], reverse=largest_first)
        snapshot.orders[sort] = rows
    return rows


def _text(row: SessionDecision, snapshot: ServiceSnapshot) -> str:
    session, template = row.session, snapshot.templates.get(row.session.template)
    shown = template.display_name if template is not None else ""
    names = (session.user, session.server, row.node, session.template, shown, group_of_session(session, {}))
    # no name contains a line break, so a match never spans two names
    return "\n".join(names).casefold()


def _delivered(row: SessionDecision) -> float:
    time = row.session.delivered
    # without competition, no time is owed
    return time.delivered_seconds / time.entitled_seconds if time.entitled_seconds else 1.0


def _idle_since(row: SessionDecision) -> float:
    return float("-inf") if row.session.gpu_busy else -row.decision.idle_since


def _next(row: SessionDecision) -> float:
    coming = row.decision.upcoming
    return coming.at if coming is not None else float("inf")


_TIERS = {tier: number for number, tier in enumerate((Tier.ACTIVE, Tier.DOWNGRADED, Tier.RELEASED, Tier.STOPPED))}
_KEYS: dict[str, Callable[[SessionDecision], Any]] = {
    "user": lambda row: (row.session.user.casefold(), row.session.server.casefold(), row.session.id),
    "node": lambda row: row.node,
    "template": lambda row: row.session.template,
    "tier": lambda row: _TIERS[row.session.tier],
    "share": lambda row: row.session.total_units or row.session.share_units,
    "delivered": _delivered,
    "idle": _idle_since,
    "memory": lambda row: row.session.memory_bytes,
    "kernels": lambda row: row.session.kernels or 0,
    "next": _next,
    "opened": lambda row: row.session.opened_at,
}


MOST_ACTIONS = 1000


class PeriodQuery(Arguments):
    """A period and filters."""

    since: str = ""
    """Start in ISO 8601 (UTC if without a zone) or in seconds since the epoch. Not given: 30 days before `until`."""
    until: str = ""
    """End, in the same format. Not given: now."""
    user: str = ""
    """Only this user. For other users, the caller needs the right to see all sessions."""
    group: str = ""
    """Only this group."""
    template: str = ""
    """Only this template."""


class HistoryQuery(PeriodQuery):
    """A period, the keys of its sums, and the format."""

    by: str = ""
    """Keys to group the sums by, separated by commas: user, group, template, model, node, gpu, hour, day."""
    format: Literal["json", "csv"] = "json"
    """`csv`: for a spreadsheet."""


class ActionsQuery(PeriodQuery):
    """A period and a page of its actions."""

    limit: Annotated[int, Field(ge=1, le=MOST_ACTIONS)] = 100
    """Largest number of entries to return."""
    before: Annotated[int, Field(ge=1, le=2**62)] | None = None
    """Only actions with a smaller `id`, for the next page."""


@operation(
    "GET",
    "history",
    "GPU time by user, group, template, GPU and time",
    answer=answers.HistoryAnswer,
    errors=_ERRORS,
    other_content=("text/csv",),
)
async def history(call: Call[HistoryQuery, Nothing]) -> Raw:
    """Return sums of GPU time in GPU-hours.

    The amounts are `reserved`, `idle`, `recovered`, `borrowed`, `used`, `entitled` and `delivered`; `waits` is a count.
    """
    period = _period(call)
    try:
        by = division_of(call.query.by)
    except ValueError as error:
        raise ApiError(400, "bad-request", str(error)) from None
    as_csv = call.query.format == "csv"
    text = await _query_history(call, lambda connection: gpu_time_text(connection, period, by, as_csv))
    return Raw(text, CSV_TYPE, CSV_HEADERS) if as_csv else Raw(text)


@operation("GET", "actions", "The log of actions", answer=answers.ActionsAnswer, errors=_ERRORS)
async def actions(call: Call[ActionsQuery, Nothing]) -> Raw:
    """Return the latest actions: idle actions, restored shares, and actions of users and admins."""
    period, query = _period(call), call.query
    return Raw(
        await _query_history(call, lambda connection: actions_text(connection, period, query.limit, query.before))
    )


class AdviceQuery(Arguments):
    """Filter of advice."""

    user: str = ""
    """Only this user. For other users, the caller needs the right to see all sessions."""


@operation("GET", "advice", "The right size of shares", errors=_ERRORS)
async def advice(call: Call[AdviceQuery, Nothing]) -> answers.AdviceAnswer:
    """Return which shares would have been enough, or would have saved waiting, by the record of the last days."""
    try:
        only = user_of(call.caller)
    except PermissionError as error:
        raise ApiError(403, "forbidden", str(error)) from None
    if only is not None and call.query.user not in ("", only):
        raise ApiError(403, "forbidden", words.NOT_YOURS)
    user = only if only is not None else call.query.user or None

    def answer(connection: Connection) -> answers.AdviceAnswer:
        records, now = advice_of(connection, user), call.services.actions.clock()
        return answers.AdviceAnswer(
            advice=tuple(answers.AdviceEntry(**{**asdict(record), "text": words.advice(record)}) for record in records),
            sums=tuple(answers.AdviceSum(**asdict(entry)) for entry in sums_of(records, now)),
        )

    # in the history's thread: for 5,000 users, this takes longer than the event loop may stand still
    return await _query_history(call, answer)


def _period(call: Call[Any, Any]) -> Period:
    query = call.query.model_dump()
    try:
        return period_of(lambda name: str(query[name]), call.caller, call.services.actions.clock())
    except PermissionError as error:
        raise ApiError(403, "forbidden", str(error)) from None
    except ValueError as error:
        raise ApiError(400, "bad-request", str(error)) from None


async def _query_history(call: Call[Any, Any], query: Callable[[Connection], T]) -> T:
    if call.services.history is None:
        raise ApiError(404, "no-history", words.NO_HISTORY)
    try:
        return await call.services.history.ask(query)
    except HistoryFailed as error:
        # only admins may see the database's address
        why = str(error) if call.caller.sees_all else words.UNAVAILABLE
        raise ApiError(503, "unavailable", why) from None


class NodesQuery(PageArguments):
    """Filter of nodes."""

    q: str = ""
    """Part of the node's name, or of the model or UUID of one of its GPUs, ignoring case."""


PlainCall = Call[Nothing, Nothing]


@operation("GET", "viewer", "The caller and their rights")
async def viewer(call: PlainCall) -> answers.ViewerAnswer:
    """Return the caller and the caller's rights."""
    caller = call.caller
    return answers.ViewerAnswer(
        name=caller.name,
        admin=caller.is_admin,
        scopes=tuple(sorted(caller.scopes & CUSTOM.keys())),
        may=answers.CallerRights(
            read_all=caller.sees_all, act_own=caller.acts_on_own, act_all=caller.acts_on_all, drain=caller.drains
        ),
    )


@operation("GET", "summary", "Totals")
async def summary(call: PlainCall) -> answers.Summary:
    """Return totals over the sessions of all users, without names."""
    snapshot = await call.services.snapshots.current()
    sessions = [row.session for row in snapshot.decisions]
    gpus = [gpu for _, gpu in snapshot.counted_gpus]
    budgets = [report.host_memory for report in snapshot.reports if report.host_memory is not None]
    return answers.Summary(
        version=snapshot.version,
        at=snapshot.taken_at,
        nodes=len(snapshot.reports),
        gpus=len({gpu.whole for gpu in gpus}),
        unhealthy_gpus=len({gpu.whole for gpu in gpus if not gpu.healthy}),
        capacity_units=sum(gpu.capacity_units for gpu in gpus),
        units=answers.Units(**{kind: snapshot.units[kind] for kind in KINDS}),
        available_units=snapshot.available_units,
        sessions={tier: sum(session.tier is tier for session in sessions) for tier in Tier if tier is not Tier.STOPPED},
        own_sessions=len(snapshot.by_user.get(call.caller.name, ())) if call.caller.name else 0,
        working=sum(session.gpu_busy for session in sessions),
        waiting=sum(session.waiting for session in sessions),
        memory_bytes=sum(gpu.memory_bytes for gpu in gpus),
        memory_used_bytes=sum(gpu.memory_used_bytes for gpu in gpus),
        allocated_bytes=sum(session.memory_bytes for session in sessions),
        resident_bytes=sum(session.resident_bytes for session in sessions),
        host_memory_budget_bytes=sum(budget.budget_bytes for budget in budgets) if budgets else None,
        host_memory_needed_bytes=sum(budget.needed_bytes for budget in budgets) if budgets else None,
        paged_out_bytes=sum(budget.paged_out_bytes for budget in budgets) if budgets else None,
        queue=len(snapshot.waiting) if snapshot.waiting is not None else None,
        problems=problems(snapshot.snapshots, call.caller, snapshot.notes),
        complete=len(snapshot.reports) == len(snapshot.snapshots),
    )


@operation("GET", "nodes", "Nodes and their GPUs")
async def nodes(call: Call[NodesQuery, Nothing]) -> answers.NodePage:
    """Return the nodes with an available agent, and their GPUs. Users are named only if the caller may see them."""
    snapshot = await call.services.snapshots.current()
    search_text = call.query.q.casefold()
    listed = sorted(
        (
            report
            for report in snapshot.reports
            if search_text in report.node.casefold()
            or any(search_text in f"{gpu.model}\n{gpu.uuid}".casefold() for gpu in report.gpus)
        ),
        key=lambda report: report.node,
    )
    page = listed[call.query.offset : call.query.offset + call.query.limit]
    return answers.NodePage(
        total=len(listed), offset=call.query.offset, nodes=tuple(node_entry(report, call.caller) for report in page)
    )


@operation("GET", "nodes/{node}", "One node")
async def node(call: PlainCall) -> answers.NodeEntry:
    """Return one node."""
    snapshot = await call.services.snapshots.current()
    report = next((report for report in snapshot.reports if report.node == call.path["node"]), None)
    if report is None:
        raise ApiError(404, "unknown", words.unknown_node(call.path["node"]))
    return node_entry(report, call.caller)


@operation("GET", "sessions", "Sessions")
async def sessions(call: Call[SessionsQuery, Nothing]) -> answers.Sessions:
    """Return the sessions that the caller may see."""
    snapshot = await call.services.snapshots.current()
    query, viewer, now = call.query, call.caller, call.services.actions.clock()
    rows = matching_rows(snapshot, query, viewer)
    seen = len(snapshot.decisions) if viewer.sees_all else len(snapshot.by_user.get(viewer.name, ()))
    return answers.Sessions(
        total=len(rows),
        offset=query.offset,
        others=len(snapshot.decisions) - seen,
        sessions=tuple(
            session_entry(snapshot, row, call.caller, now, call.services.actions)
            for row in rows[query.offset : query.offset + query.limit]
        ),
    )


@operation("GET", "sessions/{id}", "One session")
async def session(call: PlainCall) -> answers.SessionEntry:
    """Return one session."""
    snapshot = await call.services.snapshots.current()
    row = visible_session(snapshot, call)
    return session_entry(snapshot, row, call.caller, call.services.actions.clock(), call.services.actions)


def visible_session(snapshot: ServiceSnapshot, call: PlainCall) -> SessionDecision:
    """Return the session in the request's path. Raises ApiError if there is none or the caller may not see it."""
    row = snapshot.by_id.get(call.path["id"])
    if row is None or not call.caller.may_see(row.session):
        raise ApiError(404, "unknown", words.unknown_session(call.path["id"]))
    return row


@operation("GET", "queue", "The queue")
async def queue(call: PlainCall) -> answers.Queue:
    """Return the spawns that wait for a GPU, longest wait first. Other users' spawns are only counted."""
    snapshot = await call.services.snapshots.current()
    waiting, viewer, now = snapshot.waiting, call.caller, call.services.actions.clock()
    if waiting is None:
        return answers.Queue(known=False, spawns=(), others=0)
    shown = [spawn for spawn in waiting if viewer.may_see(spawn.server)]
    return answers.Queue(
        known=True,
        spawns=tuple(spawn_entry(spawn, call.caller, now) for spawn in shown),
        others=len(waiting) - len(shown),
    )


@operation("GET", "quotas", "Quotas")
async def quotas(call: PlainCall) -> answers.QuotasAnswer:
    """Return the quotas and their use: all quotas, or those of the caller and the caller's groups."""
    snapshot = await call.services.snapshots.current()
    usage = snapshot.usage
    if usage is None:
        return answers.QuotasAnswer(known=False, quotas=())
    over = usage.over_quota(with_groups=True)
    return answers.QuotasAnswer(
        known=True,
        quotas=tuple(
            answers.QuotaAnswer(
                **shared_fields(account, answers.QuotaAnswer),
                guaranteed_units=account.quota.guaranteed_units,
                maximum_units=account.quota.maximum_units,
                weight=account.quota.weight,
                used_units=usage.used(account).units,
                over_units=over.get(account.key, NOTHING).units,
                sessions=usage.servers(account),
                cpu=answers.QuotaResource.of(account.quota, Resource.CPU, usage.used(account)),
                memory=answers.QuotaResource.of(account.quota, Resource.MEMORY, usage.used(account)),
            )
            for account in sorted(
                _accounts(usage, snapshot, call.caller), key=lambda account: (account.kind, account.name)
            )
        ),
        budgets=tuple(map(answers.BudgetAnswer.of, _budgets(usage, snapshot, call.caller))),
    )


def _budgets(usage: QuotaUsage, snapshot: ServiceSnapshot, caller: Caller) -> list[BudgetState]:
    """Return the budgets that a caller may see, least left first: those of the caller, and of the caller's groups."""
    states = [state for state in snapshot.budgets if caller.sees_all or state.user in ("", caller.name)]
    if not caller.sees_all:
        mine = {account.key for account in _accounts(usage, snapshot, caller)} | {f"default:{caller.name}"}
        states = [state for state in states if state.account in mine]
    return sorted(states, key=lambda state: (state.part_left, state.account, state.user))


def _accounts(usage: QuotaUsage, snapshot: ServiceSnapshot, caller: Caller) -> Iterator[Account]:
    charged = {row.session.quota for row in snapshot.by_user.get(caller.name, ())} if caller.name else set()
    for account in usage.all_accounts():
        group = account.kind == "group"
        own = account.name in caller.groups or account.key in charged if group else account.name == caller.name
        if caller.sees_all or own:
            yield account


@operation(
    "GET",
    "events",
    "What has changed, as server-sent events",
    answer=ChangedResources,
    errors={503: "Too many streams are open."},
    streams=True,
)
async def events(call: PlainCall) -> AsyncIterator[str]:
    """Stream an event after each change, at most one every 2 s. A page then requests the changed parts again.

    The stream sends a comment after every 15 s without an event, and ends after an hour. In a browser, send the XSRF
    token as the argument `_xsrf`, because an EventSource cannot send headers.
    """
    try:
        async for event in call.services.events.stream(call.caller.label):
            yield event
    except TooManyStreams as error:
        raise ApiError(503, "overloaded", str(error)) from None
