"""The operations that show something."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

from gpushare_spawner.idle import KeepsLeft, in_force
from gpushare_spawner.model.cordon import Cordon
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.quota import Account, QuotaUsage
from gpushare_spawner.service.actions.session_actions import SessionActions
from gpushare_spawner.service.api import answers
from gpushare_spawner.service.api.events import Changed, TooManyStreams
from gpushare_spawner.service.api.operation import AnyOperation, ApiError, Call, Nothing, Operation
from gpushare_spawner.service.api.session_list import Page, SessionsQuery, found
from gpushare_spawner.service.api.snapshots import AVAILABLE, Row, ServiceSnapshot
from gpushare_spawner.service.api.spawn_address import address_of
from gpushare_spawner.service.history.groups import group_of_session
from gpushare_spawner.service.hub.scopes import CUSTOM
from gpushare_spawner.service.share_choices import allowed, other_units, templates_of_kind
from gpushare_spawner.service.web.caller import Caller
from gpushare_spawner.service.web.dashboard_data import (
    node_data,
    problems_data,
    quota_data,
    session_data,
    spawn_data,
)
from gpushare_spawner.service.web.gpu_bar import units_of
from gpushare_spawner.wording import api as words


class NodesQuery(Page):
    """Which nodes."""

    q: str = ""
    """A part of the name of the node, or of a model or UUID of its GPUs; case is ignored."""


Asked = Call[Nothing, Nothing]


async def viewer(call: Asked) -> answers.ViewerAnswer:
    """Return who asks, and what they may do."""
    caller = call.caller
    return answers.ViewerAnswer(
        name=caller.name,
        admin=caller.is_admin,
        scopes=tuple(sorted(caller.scopes & CUSTOM.keys())),
        may=answers.Rights(
            read_all=caller.sees_all, act_own=caller.acts_on_own, act_all=caller.acts_on_all, drain=caller.drains
        ),
    )


async def summary(call: Asked) -> answers.Summary:
    """Return totals. They count the sessions of all users, without names."""
    snapshot = await call.services.snapshots.current()
    sessions = [row.session for row in snapshot.rows]
    gpus = [gpu for _, gpu in snapshot.counted_gpus]
    budgets = [report.host_memory for report in snapshot.reports if report.host_memory is not None]
    return answers.Summary(
        version=snapshot.version,
        at=snapshot.taken_at,
        nodes=len(snapshot.reports),
        gpus=len({gpu.whole for gpu in gpus}),
        unhealthy_gpus=len({gpu.whole for gpu in gpus if not gpu.healthy}),
        capacity_units=sum(gpu.capacity_units for gpu in gpus),
        units=answers.Units(
            owned=snapshot.units["owned"],
            borrowed=snapshot.units["borrowed"],
            lent=snapshot.units["lent"],
            free=snapshot.units["free"],
        ),
        available_units=snapshot.available_units,
        sessions={tier: sum(one.tier is tier for one in sessions) for tier in Tier if tier is not Tier.STOPPED},
        own_sessions=len(snapshot.by_user.get(call.caller.name, ())) if call.caller.name else 0,
        working=sum(one.gpu_busy for one in sessions),
        waiting=sum(one.waiting for one in sessions),
        memory_bytes=sum(gpu.memory_bytes for gpu in gpus),
        memory_used_bytes=sum(gpu.memory_used_bytes for gpu in gpus),
        allocated_bytes=sum(one.memory_bytes for one in sessions),
        resident_bytes=sum(one.resident_bytes for one in sessions),
        host_memory_budget_bytes=sum(one.budget_bytes for one in budgets) if budgets else None,
        host_memory_needed_bytes=sum(one.needed_bytes for one in budgets) if budgets else None,
        paged_out_bytes=sum(one.paged_out_bytes for one in budgets) if budgets else None,
        queue=len(snapshot.waiting) if snapshot.waiting is not None else None,
        problems=tuple(problems_data(snapshot.snapshots, call.caller.viewer, snapshot.notes)),
        complete=len(snapshot.reports) == len(snapshot.snapshots),
    )


async def nodes(call: Call[NodesQuery, Nothing]) -> answers.Nodes:
    """Return the nodes whose agents answer, with their GPUs. Users are named only where the caller may see them."""
    snapshot = await call.services.snapshots.current()
    wanted = call.query.q.casefold()
    listed = sorted(
        (
            report
            for report in snapshot.reports
            if wanted in report.node.casefold()
            or any(wanted in f"{gpu.model}\n{gpu.uuid}".casefold() for gpu in report.gpus)
        ),
        key=lambda report: report.node,
    )
    page = listed[call.query.offset : call.query.offset + call.query.limit]
    return answers.Nodes(
        total=len(listed),
        offset=call.query.offset,
        nodes=tuple(_node(snapshot, report.node, call.caller) for report in page),
    )


async def node(call: Asked) -> answers.Node:
    """Return one node."""
    snapshot = await call.services.snapshots.current()
    if call.path["node"] not in {report.node for report in snapshot.reports}:
        raise ApiError(404, "unknown", words.unknown_node(call.path["node"]))
    return _node(snapshot, call.path["node"], call.caller)


def _node(snapshot: ServiceSnapshot, name: str, caller: Caller) -> answers.Node:
    report = next(report for report in snapshot.reports if report.node == name)
    data = node_data(report, caller.viewer)
    whole = report.cordon()
    gpus = []
    for gpu in data["gpus"]:
        alone = report.cordon(gpu["uuid"])
        drained = any(one is not None and one.drain for one in (whole, alone))
        gpus.append(gpu | {"cordoned": bool(whole or alone), "drained": drained, "cordon": _cordon(alone)})
    more = {"gpus": gpus, "cordoned": whole is not None, "drained": whole is not None and whole.drain}
    return answers.Node.model_validate(data | more | {"cordon": _cordon(whole)})


def _cordon(cordon: Cordon | None) -> dict[str, Any] | None:
    return cordon.model_dump(exclude={"gpu"}) if cordon is not None else None


async def sessions(call: Call[SessionsQuery, Nothing]) -> answers.Sessions:
    """Return the sessions that the caller may see."""
    snapshot = await call.services.snapshots.current()
    query, viewer, now = call.query, call.caller.viewer, call.services.clock()
    rows = found(snapshot, query, viewer)
    seen = len(snapshot.rows) if viewer.sees_all else len(snapshot.by_user.get(viewer.name, ()))
    return answers.Sessions(
        total=len(rows),
        offset=query.offset,
        others=len(snapshot.rows) - seen,
        sessions=tuple(
            _session(snapshot, row, call.caller, now, call.services.actions)
            for row in rows[query.offset : query.offset + query.limit]
        ),
    )


async def session(call: Asked) -> answers.Session:
    """Return one session."""
    snapshot = await call.services.snapshots.current()
    return _session(
        snapshot, visible_session(snapshot, call), call.caller, call.services.clock(), call.services.actions
    )


def visible_session(snapshot: ServiceSnapshot, call: Asked) -> Row:
    """Return the session that the address names. Raises ApiError if there is none, or the caller may not see it."""
    row = snapshot.by_id.get(call.path["id"])
    if row is None or not call.caller.viewer.may_see(row.session):
        raise ApiError(404, "unknown", words.unknown_session(call.path["id"]))
    return row


def _session(
    snapshot: ServiceSnapshot, row: Row, caller: Caller, now: float, actions: SessionActions
) -> answers.Session:
    one = row.session
    controls, keeps = in_force(one.controls, now), _keeps_left(snapshot, row, now, actions)
    data = session_data(row.decision, row.report, snapshot.to_own, snapshot.templates, caller.viewer, now)
    more = {
        "id": one.id,
        "may_act": caller.may_act_on(one),
        "group": group_of_session(one, {}),
        "opened_at": one.opened_at,
        "keep": controls.keep.model_dump() if controls.keep is not None else None,
        "exemption": controls.exemption.model_dump() if controls.exemption is not None else None,
        "message": one.standing_messages[-1].model_dump() if one.standing_messages else None,
        "messages": [message.model_dump() for message in one.standing_messages],
        "share_choices": _share_choices(snapshot, row, caller),
        "largest_share_units": _largest_share(snapshot, row),
        "keep_limits": {
            "longest_seconds": keeps.rule.longest,
            "per_day": keeps.rule.per_day,
            "at_once": keeps.rule.at_once,
            "left": keeps.left,
            "again_at": keeps.again_at,
        },
    }
    return answers.Session.model_validate(data | quota_data(one, snapshot.usage) | more)


def _keeps_left(snapshot: ServiceSnapshot, row: Row, now: float, actions: SessionActions) -> KeepsLeft:
    sessions = (other.session for other in snapshot.by_user[row.session.user])
    return actions.keeps_left(row.session, {one.id: in_force(one.controls, now) for one in sessions}, now)


def _largest_share(snapshot: ServiceSnapshot, row: Row) -> int:
    """Return the largest share that the session's agent would give it now, by the last report.

    An idle session can own more and not borrow more, and a GPU that is cordoned or unhealthy gives none more.
    """
    one, report = row.session, row.report
    kinds = AVAILABLE if one.effective_units == one.share_units else ("free",)
    more = [
        sum(units_of(snapshot.bars[report.node, gpu.uuid], kind) for kind in kinds)
        if gpu.healthy and report.cordon() is None and report.cordon(gpu.uuid) is None
        else 0
        for gpu in report.gpus
        if gpu.uuid in one.gpus
    ]
    return min(UNITS_PER_GPU, one.share_units + min(more, default=0))


def _share_choices(snapshot: ServiceSnapshot, row: Row, caller: Caller) -> tuple[int, ...]:
    one = row.session
    if not caller.may_act_on(one):
        return ()
    choices = templates_of_kind(one, row.report.gpus, snapshot.templates)
    if not caller.acts_on_all:
        # who does not act on all sessions acts on their own
        choices = allowed(choices, one.user, caller.groups)
    return other_units(one, choices)


async def queue(call: Asked) -> answers.Queue:
    """Return the spawns that wait for a GPU, the longest first; those of others only as a number."""
    snapshot = await call.services.snapshots.current()
    waiting, viewer, now = snapshot.waiting, call.caller.viewer, call.services.clock()
    if waiting is None:
        return answers.Queue(known=False, spawns=(), others=0)
    shown = [one for one in waiting if viewer.may_see(one.server)]
    return answers.Queue(
        known=True,
        spawns=tuple(
            answers.Spawn(
                **spawn_data(one, viewer, now),
                address=address_of(one.server.user, one.server.name),
                may_act=call.caller.may_act_on(one.server),
            )
            for one in shown
        ),
        others=len(waiting) - len(shown),
    )


async def quotas(call: Asked) -> answers.QuotasAnswer:
    """Return the quotas and what is used of them: all of them, or those of the caller and the caller's groups."""
    snapshot = await call.services.snapshots.current()
    usage = snapshot.usage
    if usage is None:
        return answers.QuotasAnswer(known=False, quotas=())
    over = usage.over_quota()
    return answers.QuotasAnswer(
        known=True,
        quotas=tuple(
            answers.QuotaAnswer(
                kind=_kind(account),
                name=account.name,
                department=account.department,
                guaranteed_units=account.quota.guaranteed_units,
                maximum_units=account.quota.maximum_units,
                weight=account.quota.weight,
                used_units=usage.used(account),
                over_units=over.get(account.key, 0),
                sessions=sum(1 for _ in usage.sessions(account)),
            )
            for account in sorted(_accounts(usage, snapshot, call.caller), key=lambda one: (one.kind, one.name))
        ),
    )


def _kind(account: Account) -> Literal["user", "group", "default"]:
    kinds: dict[str, Literal["user", "group", "default"]] = {"user": "user", "group": "group", "default": "default"}
    return kinds[account.kind.value]


def _accounts(usage: QuotaUsage, snapshot: ServiceSnapshot, caller: Caller) -> Iterator[Account]:
    charged = {row.session.quota for row in snapshot.by_user.get(caller.name, ())} if caller.name else set()
    for account in usage.all_accounts():
        group = account.kind == "group"
        own = account.name in caller.groups or account.key in charged if group else account.name == caller.name
        if caller.sees_all or own:
            yield account


async def events(call: Asked) -> AsyncIterator[str]:
    """Stream an event whenever something has changed, at most one in 2 s; a page then asks again for what it shows.

    The stream carries a comment every 15 s without an event, and ends after an hour. In a browser, send the XSRF token
    as the argument `_xsrf`: an EventSource cannot send headers.
    """
    try:
        async for event in call.services.events.stream(call.caller.label):
            yield event
    except TooManyStreams as error:
        raise ApiError(503, "overloaded", str(error)) from None


OPERATIONS: list[AnyOperation] = [
    Operation("GET", "viewer", viewer, "The caller and their rights", answers.ViewerAnswer, Nothing, Nothing),
    Operation("GET", "summary", summary, "Totals", answers.Summary, Nothing, Nothing),
    Operation("GET", "nodes", nodes, "Nodes and their GPUs", answers.Nodes, NodesQuery, Nothing),
    Operation("GET", "nodes/{node}", node, "One node", answers.Node, Nothing, Nothing),
    Operation("GET", "sessions", sessions, "Sessions", answers.Sessions, SessionsQuery, Nothing),
    Operation("GET", "sessions/{id}", session, "One session", answers.Session, Nothing, Nothing),
    Operation("GET", "queue", queue, "The queue", answers.Queue, Nothing, Nothing),
    Operation("GET", "quotas", quotas, "Quotas", answers.QuotasAnswer, Nothing, Nothing),
    Operation(
        "GET",
        "events",
        events,
        "What has changed, as server-sent events",
        Changed,
        Nothing,
        Nothing,
        errors={503: "Too many streams are open."},
        streams=True,
    ),
]
