"""Parts of the dashboard and of the REST API for one viewer, as plain data. Pure.

`gpu_bar` shows a GPU's units as a bar of owned, borrowed, lent and free units. `UnitsToOwn` finds a node where a
borrower could own its full share after a restart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from gpushare_spawner.model.layers import LAYERS, LayerName
from gpushare_spawner.model.report import GpuReport, Report, SessionReport, doubled_gpus
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.request import suits
from gpushare_spawner.quota.accounts import QuotaUsage
from gpushare_spawner.service.culler.decisions import SessionDecision
from gpushare_spawner.service.reports import KnownReport, NodeSnapshot
from gpushare_spawner.service.waiting import WaitingSpawn
from gpushare_spawner.service.web.app import Viewer
from gpushare_spawner.wording.amounts import doubled_gpu
from gpushare_spawner.wording.idle_decisions import explained, kept_by_short_work, upcoming, why_none
from gpushare_spawner.wording.service import (
    AGENT_UNAVAILABLE,
    name_of,
    not_durable,
    restart_offer,
    shared_by,
    unconfirmed_sessions,
)
from gpushare_spawner.wording.share_status import LACKING, stays

Kind = Literal["owned", "borrowed", "lent", "free"]
"""Owned: guaranteed to their owner, also while it is idle. Borrowed: lent, and used by another session. Lent: lent, and
not borrowed. Free: not allocated."""


@dataclass(frozen=True)
class Segment:
    """A segment of the bar. ``session``: the id of the session that uses it (owned, borrowed) or lends it."""

    kind: Kind
    units: int
    session: str | None = None


def gpu_bar(gpu: GpuReport, sessions: Iterable[SessionReport]) -> list[Segment]:
    """Return the GPU's bar, from the sessions of its node, the oldest first.

    The units add up to the GPU's capacity, or to the allocated units if these are more.
    """
    here = sorted(
        (session for session in sessions if gpu.uuid in session.gpus),
        key=lambda session: (session.opened_at, session.id),
    )
    if gpu.mig is not None and here:
        return [Segment("owned", gpu.capacity_units, here[0].id)]  # a session has all of a MIG instance
    bar: list[Segment] = []
    lent: list[Segment] = []
    taken = 0
    for session in here:
        own = max(0, session.share_units - session.borrowed_units)
        used = min(own, session.guaranteed_units)
        bar += [Segment("owned", used, session.id)] * (used > 0)
        lent += [Segment("lent", own - used, session.id)] * (own > used)
    for session in here:
        borrowed = session.borrowed_now
        bar += [Segment("borrowed", borrowed, session.id)] * (borrowed > 0)
        taken += borrowed
    for segment in lent:
        left = max(0, segment.units - taken)
        taken -= segment.units - left
        bar += [Segment("lent", left, segment.session)] * (left > 0)
    free = gpu.capacity_units - sum(segment.units for segment in bar)
    return bar + [Segment("free", free)] * (free > 0)


def units_of(bar: Iterable[Segment], kind: Kind) -> int:
    """Return the number of units of one kind."""
    return sum(segment.units for segment in bar if segment.kind == kind)


class UnitsToOwn:
    """Units without an owner, on all nodes. They are counted once, at the first call of `node_for`."""

    def __init__(self, reports: Sequence[Report]) -> None:
        self._reports = reports

    def node_for(self, session: SessionReport, template: Template | None) -> str | None:
        """Return the first node with enough units without an owner.

        None if there is no such node, or the session has all its units. Units that idle sessions lend do not count: a
        session that restarts on them would borrow again. The session's own units count as free, since a restart
        releases them. The template counts as it is now. CPU and memory of nodes are not checked.
        """
        if session.tier is not Tier.ACTIVE or session.borrowed_now >= session.borrowed_units:
            return None
        if template is None or template.gpu is None:
            return None
        share = template.gpu.share  # the template may have been changed since the session started
        for node, gpus in self._free:
            matches: Counter[str] = Counter()
            for gpu, free, owned in gpus:
                fits = free + owned[session.id] >= share.units
                if fits and suits(template.gpu, gpu.model, gpu.memory_bytes):
                    matches[gpu.model] += 1
            if any(count >= share.count for count in matches.values()):
                return node
        return None

    @cached_property
    def _free(self) -> list[tuple[str, list[tuple[GpuReport, int, Counter[str]]]]]:
        """The nodes with their GPUs that take native sessions: free units of each, and owned units by session."""
        nodes = []
        for report in self._reports:
            owned: dict[str, Counter[str]] = {gpu.uuid: Counter() for gpu in report.gpus}
            for session in report.sessions:
                for uuid in session.gpus:
                    if uuid in owned:
                        owned[uuid][session.id] += max(0, session.share_units - session.borrowed_units)
            gpus = [
                (gpu, gpu.capacity_units - owned[gpu.uuid].total(), owned[gpu.uuid])
                for gpu in report.gpus
                if gpu.healthy and not gpu.cordoned and gpu.mig is None
            ]
            nodes.append((report.node, gpus))
        return nodes


def problems_data(snapshots: Sequence[NodeSnapshot], viewer: Viewer, notes: Sequence[str]) -> list[str]:
    """Return sentences about data that cannot be shown.

    For viewers that see all also about GPUs that two nodes report and agents that cannot write their records, and
    ``notes``.
    """
    silent = [snapshot.problem for snapshot in snapshots if snapshot.report is None]
    if viewer.sees_all:
        reports = [snapshot.report for snapshot in snapshots if snapshot.report is not None]
        doubled = (doubled_gpu(uuid, nodes) for uuid, nodes in doubled_gpus(reports).items())
        forgetful = (
            not_durable(report.node, report.state_trouble) for report in reports if report.state_trouble is not None
        )
        return [*silent, *_unconfirmed(snapshots), *doubled, *forgetful, *notes]
    return [AGENT_UNAVAILABLE] if silent else []


def _unconfirmed(snapshots: Sequence[NodeSnapshot]) -> list[str]:
    """Return a sentence for each node that reports unconfirmed sessions."""
    reports = [snapshot.report for snapshot in snapshots if snapshot.report is not None]
    return [
        unconfirmed_sessions(report.node, [session.id for session in report.unconfirmed])
        for report in reports
        if report.unconfirmed
    ]


def spawn_data(spawn: WaitingSpawn, viewer: Viewer, now: float) -> dict[str, Any]:
    share, progress = spawn.template.share, spawn.progress
    return {
        "position": spawn.position,
        "user": spawn.server.user,
        "server": spawn.server.name,
        "own": spawn.server.user == viewer.name,
        "template": spawn.template.name,
        "display_name": spawn.template.display_name,
        "share": str(share) if share is not None else "",
        "since": spawn.server.started,
        "seconds": max(0.0, now - spawn.server.started) if spawn.server.started is not None else None,
        "estimated_minutes": progress.estimated_minutes if progress is not None else None,
        "waits_for": progress.waits_for if progress is not None else "",
        "cancelled_at": progress.cancelled_at if progress is not None else None,
    }


def node_data(report: KnownReport, viewer: Viewer) -> dict[str, Any]:
    uuids = {gpu.uuid for gpu in report.gpus}
    return {
        "name": report.node,
        "published_at": report.published_at,
        "layers": _other_layers(session for session in report.sessions if uuids.isdisjoint(session.gpus)),
        "gpus": [_gpu(gpu, report, viewer) for gpu in report.gpus],
        "host_memory": report.host_memory.model_dump() if report.host_memory is not None else None,
        "unconfirmed": [session.model_dump() for session in report.unconfirmed] if viewer.sees_all else [],
    }


def _gpu(gpu: GpuReport, report: Report, viewer: Viewer) -> dict[str, Any]:
    bar = gpu_bar(gpu, report.allocated_to)
    here = [session for session in report.sessions if gpu.uuid in session.gpus]
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "model": gpu.model,
        "simulated": gpu.simulated,
        "healthy": gpu.healthy,
        "utilisation": gpu.utilisation,
        "temperature_celsius": gpu.temperature_celsius,
        "power_watts": gpu.power_watts,
        "memory_bytes": gpu.memory_bytes,
        "memory_used_bytes": gpu.memory_used_bytes,
        # sessions on several GPUs have their memory spread over them
        "paged_out_bytes": sum(
            max(0, session.memory_bytes - session.resident_bytes) // len(session.gpus) for session in here
        ),
        "capacity_units": gpu.capacity_units,
        "units": {kind: units_of(bar, kind) for kind in ("owned", "borrowed", "lent", "free")},
        "context_bytes": sum(session.context_bytes // len(session.gpus) for session in here),
        "layers": _other_layers(here),
        "trouble": _distinct(session.layer_trouble for session in here if session.layer_trouble is not None),
        "sessions": len(here),
        "working": sum(session.gpu_busy for session in here),
        "suspended": sum(session.suspended for session in here),
        "waiting": gpu.waiting,
        "bar": [_segment(segment, report, viewer) for segment in bar],
    }


def _other_layers(sessions: Iterable[SessionReport]) -> list[str]:
    """Return the titles of other sharing layers; the title of ours would add nothing."""
    return _distinct(LAYERS[session.layer].title for session in sessions if session.layer is not LayerName.NATIVE)


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _segment(segment: Segment, report: Report, viewer: Viewer) -> dict[str, Any]:
    session = report.session(segment.session) if segment.session is not None else None
    seen = session is not None and viewer.may_see(session)
    return {
        "kind": segment.kind,
        "units": segment.units,
        "user": session.user if session is not None and seen else None,
        "server": session.server if session is not None and seen else None,
        "over_limit": session is not None and seen and session.over_memory_limit,
        "own": session is not None and session.user == viewer.name,
    }


def quota_data(session: SessionReport, usage: QuotaUsage | None) -> dict[str, Any]:
    """Return the quota to which a session is charged, in words, and whether it is in quota; None without quotas."""
    if usage is None:
        return {"quota": None, "in_quota": None}
    account = usage.accounts.find(session.quota, session.user)
    return {"quota": name_of(account), "in_quota": usage.in_quota(session.id)}


def _short_work(decision: SessionDecision, viewer: Viewer) -> str:
    """Return a note for viewers that see all that short GPU work would have kept the share; otherwise an empty text."""
    work = decision.observation.short_work
    flagged = work is not None and viewer.sees_all and decision.kept_by_short_work
    return kept_by_short_work(work.rule) if work is not None and flagged else ""


def session_data(
    session_decision: SessionDecision,
    report: Report,
    to_own: UnitsToOwn,
    templates: Mapping[str, Template],
    viewer: Viewer,
    now: float,
) -> dict[str, Any]:
    session, decision = session_decision.session, session_decision.decision
    template = templates.get(session.template)
    better = to_own.node_for(session, template)
    indices = {gpu.uuid: gpu.index for gpu in report.gpus}
    action = decision.upcoming
    notice = session_decision.observation.notice
    notified = notice is not None and action is not None and notice.tier is action.tier and not session_decision.dry_run
    return {
        "node": report.node,
        "user": session.user,
        "server": session.server,
        "own": session.user == viewer.name,
        "template": session.template,
        "display_name": template.display_name if template is not None else session.template,
        "gpus": [indices[uuid] for uuid in session.gpus if uuid in indices],
        "gpu_count": session.share.count,
        "layer": session.layer,
        "layer_title": LAYERS[session.layer].title,
        "layer_trouble": session.layer_trouble or "",
        "sharing": shared_by(LAYERS[session.layer], session.gpu_use_known),
        "measured": session.gpu_use_known,
        "tier": session.tier.value,
        "starting": not session.confirmed,
        "share_units": session.share_units,
        "borrowed_units": session.borrowed_now,
        "effective_units": session.effective_units,
        "guaranteed_units": session.guaranteed_units,
        "gpu_busy": session.gpu_busy,
        "waiting": session.waiting,
        "gpu_worked": session.gpu_busy or session.last_gpu_activity is not None,
        "gpu_idle_seconds": 0.0 if session.gpu_busy else max(0.0, now - decision.idle_since),
        "gpu_seconds": session.gpu_seconds,
        "delivered": session.delivered.model_dump(),
        "kernels": session.kernels,
        "kernels_busy": session.kernels_busy,
        "memory_bytes": session.memory_bytes,
        "resident_bytes": session.resident_bytes,
        "memory_limit_bytes": session.memory_limit_bytes,
        "engine": session.engine.value,
        "suspended": session.suspended,
        "not_suspendable": stays(session.not_suspendable or "", session.suspended),
        "context_bytes": session.context_bytes,
        "over_memory_limit": session.over_memory_limit,
        "memory_limit_hits": session.memory_limit_hits.count,
        "host_memory_needed_bytes": session.host_memory_needed_bytes,
        "host_memory_budget_bytes": session.host_memory_budget_bytes,
        "short_work": _short_work(session_decision, viewer),
        "bypassing": len(session.bypassing_pids),
        "offer": restart_offer(better) if better is not None else "",
        "lacking": LACKING if session.lacks_requests else "",
        "why": why_none(decision.no_action) if decision.no_action is not None else "",
        "next": None
        if action is None
        else {
            "tier": action.tier.value,
            "units": action.units,
            "at": action.at,
            "in_seconds": max(0.0, action.at - now),
            "notified": notified,
            "dry_run": session_decision.dry_run,
            "action": upcoming(action.tier, action.units),
            "reason": explained(action, session.share),
        },
    }
