"""Builds the entries of the answers for one caller: nodes, GPUs, sessions and spawns. The dashboard shows the same.

A field with the same name in an entry and in the agent's report has the report's value. `reading` has the operations.

The path of a spawn below the API's prefix is ``queue/USER/SERVER``. The default server has no name, and a path segment
cannot be empty, so `~` stands for it. A name that begins with `~` gets another `~` in front.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from urllib.parse import quote

from gpushare_spawner.idle.keep import KeepsLeft, in_force
from gpushare_spawner.idle.policy import IdleAction
from gpushare_spawner.model.control import QueueProgress
from gpushare_spawner.model.controls import Cordon, MessageCause
from gpushare_spawner.model.layers import LAYERS, LayerName
from gpushare_spawner.model.report import GpuReport, SessionReport, doubled_gpus, shared_fields
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.service.actions import keeps
from gpushare_spawner.service.actions.context import ActionContext
from gpushare_spawner.service.api import answers
from gpushare_spawner.service.culler.decisions import SessionDecision
from gpushare_spawner.service.history.queries import group_of_session
from gpushare_spawner.service.hub.caller import Caller
from gpushare_spawner.service.reports import KnownReport, NodeSnapshot, answered
from gpushare_spawner.service.sources import AVAILABLE, ServiceSnapshot
from gpushare_spawner.service.templates import allowed, other_units, templates_of_kind
from gpushare_spawner.service.units import KINDS, Segment, gpu_bar, units_of
from gpushare_spawner.service.waiting import WaitingSpawn
from gpushare_spawner.wording import idle_decisions
from gpushare_spawner.wording import service as words
from gpushare_spawner.wording.amounts import doubled_gpu
from gpushare_spawner.wording.share_status import LACKING, stays

DEFAULT_SERVER = "~"


def address_of(user: str, server: str) -> str:
    """Return the path of the spawn of a user's server."""
    part = DEFAULT_SERVER + server if not server or server.startswith(DEFAULT_SERVER) else server
    return f"queue/{quote(user, safe='')}/{quote(part, safe='')}"


def server_of(part: str) -> str:
    """Return the server's name from the last segment of a path."""
    return part.removeprefix(DEFAULT_SERVER)


def problems(snapshots: Sequence[NodeSnapshot], caller: Caller, notes: Sequence[str]) -> tuple[str, ...]:
    """Return sentences about data that cannot be shown.

    For callers that see all sessions, these include GPUs that two nodes report, unconfirmed sessions, agents that
    cannot write their records, and ``notes``.
    """
    silent = [snapshot.problem for snapshot in snapshots if snapshot.report is None]
    if not caller.sees_all:
        return (words.AGENT_UNAVAILABLE,) if silent else ()
    reports = answered(snapshots)
    unconfirmed = (
        words.unconfirmed_sessions(report.node, [session.id for session in report.unconfirmed])
        for report in reports
        if report.unconfirmed
    )
    doubled = (doubled_gpu(uuid, nodes) for uuid, nodes in doubled_gpus(reports).items())
    forgetful = (
        words.not_durable(report.node, report.state_trouble) for report in reports if report.state_trouble is not None
    )
    return (*silent, *unconfirmed, *doubled, *forgetful, *notes)


def spawn_entry(spawn: WaitingSpawn, caller: Caller, now: float) -> answers.SpawnEntry:
    """Return the entry of a waiting spawn."""
    share, since = spawn.template.share, spawn.server.started
    progress = spawn.progress or QueueProgress(queue_position=spawn.position)
    return answers.SpawnEntry(
        address=address_of(spawn.server.user, spawn.server.name),
        position=spawn.position,
        user=spawn.server.user,
        server=spawn.server.name,
        own=spawn.server.user == caller.name,
        may_act=caller.may_act_on(spawn.server),
        template=spawn.template.name,
        display_name=spawn.template.display_name,
        priority=spawn.template.priority,
        share=str(share) if share is not None else "",
        since=since,
        seconds=max(0.0, now - since) if since is not None else None,
        **shared_fields(progress, answers.SpawnEntry),
    )


def node_entry(report: KnownReport, caller: Caller) -> answers.NodeEntry:
    """Return the entry of a node with its GPUs. Users are named only if the caller may see them."""
    uuids, whole = {gpu.uuid for gpu in report.gpus}, report.cordon()
    return answers.NodeEntry(
        name=report.node,
        published_at=report.published_at,
        cordoned=whole is not None,
        drained=_drains(whole),
        cordon=_cordon(whole),
        host_memory=report.host_memory,
        layers=_other_layers(session for session in report.sessions if uuids.isdisjoint(session.gpus)),
        gpus=tuple(_gpu(gpu, report, caller) for gpu in report.gpus),
        unconfirmed=report.unconfirmed if caller.sees_all else (),
    )


def _gpu(gpu: GpuReport, report: KnownReport, caller: Caller) -> answers.GpuEntry:
    bar, whole, alone = gpu_bar(gpu, report.allocated_to), report.cordon(), report.cordon(gpu.uuid)
    here = [session for session in report.sessions if gpu.uuid in session.gpus]
    shown = {
        # sessions on several GPUs have their memory spread over these
        "paged_out_bytes": sum(
            max(0, session.memory_bytes - session.resident_bytes) // len(session.gpus) for session in here
        ),
        "units": {kind: units_of(bar, kind) for kind in KINDS},
        "context_bytes": sum(session.context_bytes // len(session.gpus) for session in here),
        "layers": _other_layers(here),
        "trouble": _distinct(session.layer_trouble for session in here if session.layer_trouble is not None),
        "sessions": len(here),
        "working": sum(session.gpu_busy for session in here),
        "suspended": sum(session.suspended for session in here),
        "cordoned": whole is not None or alone is not None,
        "drained": _drains(whole) or _drains(alone),
        "cordon": _cordon(alone),
        "bar": [_segment(segment, report, caller) for segment in bar],
    }
    return answers.GpuEntry.model_validate(shared_fields(gpu, answers.GpuEntry) | shown)


def _drains(cordon: Cordon | None) -> bool:
    return cordon is not None and cordon.drain


def _cordon(cordon: Cordon | None) -> answers.CordonEntry | None:
    return answers.CordonEntry.model_validate(cordon) if cordon is not None else None


def _other_layers(sessions: Iterable[SessionReport]) -> tuple[str, ...]:
    """Return the titles of other sharing layers. The title of our own is omitted."""
    return _distinct(LAYERS[session.layer].title for session in sessions if session.layer is not LayerName.NATIVE)


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def _segment(segment: Segment, report: KnownReport, caller: Caller) -> answers.SegmentEntry:
    session = report.session(segment.session) if segment.session is not None else None
    seen = session if session is not None and caller.may_see(session) else None
    return answers.SegmentEntry(
        kind=segment.kind,
        units=segment.units,
        user=seen.user if seen is not None else None,
        server=seen.server if seen is not None else None,
        over_limit=seen is not None and seen.over_memory_limit,
        own=session is not None and session.user == caller.name,
    )


def session_entry(
    snapshot: ServiceSnapshot, row: SessionDecision, caller: Caller, now: float, actions: ActionContext
) -> answers.SessionEntry:
    """Return the entry of a session that the caller may see. All views of a session for people use it."""
    session, decision, layer = row.session, row.decision, LAYERS[row.session.layer]
    template, usage = snapshot.templates.get(session.template), snapshot.usage
    better = snapshot.to_own.node_for(session, template)
    messages = [message for message in session.messages if message.cause is not MessageCause.BUDGET]
    controls, left = in_force(session.controls, now), _keeps_left(snapshot, session, now, actions)
    borrowed = [here.borrowed_now for here in session.each]
    shown = {
        "node": row.node,
        "own": session.user == caller.name,
        "may_act": caller.may_act_on(session),
        "display_name": template.display_name if template is not None else session.template,
        "group": group_of_session(session, {}),
        "gpus": [gpu.index for uuid in session.gpus for gpu in row.report.gpus if gpu.uuid == uuid],
        "gpu_count": session.share.count,
        "layer_title": layer.title,
        "layer_trouble": session.layer_trouble or "",
        "sharing": words.shared_by(layer, session.gpu_use_known),
        "measured": session.gpu_use_known,
        "starting": not session.confirmed,
        "borrowed_units": max(borrowed, default=0),
        "borrowed_each": borrowed,
        "gpu_worked": session.gpu_busy or session.last_gpu_activity is not None,
        "gpu_idle_seconds": 0.0 if session.gpu_busy else max(0.0, now - decision.idle_since),
        "not_suspendable": stays(session.not_suspendable or "", session.suspended),
        "memory_limit_hits": session.memory_limit_hits.count,
        "short_work": _short_work(row) if caller.sees_all else "",
        "bypassing": len(session.bypassing_pids),
        "offer": words.restart_offer(better) if better is not None else "",
        "lacking": LACKING if session.lacks_requests else "",
        "why": idle_decisions.why_none(decision.no_action) if decision.no_action is not None else "",
        "next": _next(row, decision.upcoming, now) if decision.upcoming is not None else None,
        "quota": words.name_of(usage.accounts.find(session.quota, session.user)) if usage is not None else None,
        "in_quota": usage.in_quota(session.id) if usage is not None else None,
        "keep": controls.keep,
        "exemption": controls.exemption,
        "message": messages[-1] if messages else None,
        "messages": messages,
        "background": session.background,
        "keep_limits": {
            "longest_seconds": left.rule.longest,
            "per_day": left.rule.per_day,
            "at_once": left.rule.at_once,
            "left": left.left,
            "again_at": left.again_at,
        },
        "share_choices": _share_choices(snapshot, row, caller),
        "largest_share_units": _largest_share(snapshot, row),
    }
    return answers.SessionEntry.model_validate(shared_fields(session, answers.SessionEntry) | shown)


def _short_work(decision: SessionDecision) -> str:
    """Return a note if short GPU work would have kept the share, otherwise an empty text."""
    work = decision.observation.short_work
    return idle_decisions.kept_by_short_work(work.rule) if work is not None and decision.kept_by_short_work else ""


def _next(decision: SessionDecision, action: IdleAction, now: float) -> answers.NextAction:
    notice = decision.observation.notice
    return answers.NextAction(
        tier=action.tier,
        units=action.units,
        at=action.at,
        in_seconds=max(0.0, action.at - now),
        notified=notice is not None and notice.tier is action.tier and not decision.dry_run,
        dry_run=decision.dry_run,
        action=idle_decisions.upcoming(action.tier, action.units),
        reason=idle_decisions.explained(action, decision.session.share),
    )


def _keeps_left(snapshot: ServiceSnapshot, session: SessionReport, now: float, actions: ActionContext) -> KeepsLeft:
    sessions = (other.session for other in snapshot.by_user[session.user])
    return keeps.left(actions, session, {other.id: in_force(other.controls, now) for other in sessions}, now)


def _largest_share(snapshot: ServiceSnapshot, row: SessionDecision) -> int:
    """Return the largest share that the session's agent would grant now, according to the last report.

    An idle session can get more free units but cannot borrow. A GPU that is cordoned or unhealthy provides no more
    units.
    """
    session, report = row.session, row.report
    kinds = AVAILABLE if session.effective_units == session.share_units else ("free",)
    each = [
        session.on(gpu.uuid).share_units + sum(units_of(snapshot.bars[report.node, gpu.uuid], kind) for kind in kinds)
        if gpu.healthy and report.cordon() is None and report.cordon(gpu.uuid) is None
        else session.on(gpu.uuid).share_units
        for gpu in report.gpus
        if gpu.uuid in session.gpus
    ]
    return min([UNITS_PER_GPU, *each]) if each else session.share_units


def _share_choices(snapshot: ServiceSnapshot, row: SessionDecision, caller: Caller) -> tuple[int, ...]:
    session = row.session
    if not caller.may_act_on(session):
        return ()
    choices = templates_of_kind(session, row.report.gpus, snapshot.templates, any_rules=caller.acts_on_all)
    if not caller.acts_on_all:
        # a caller without the right to act on all sessions can act on its own
        choices = allowed(choices, session.user, caller.groups)
    return other_units(session, choices)
