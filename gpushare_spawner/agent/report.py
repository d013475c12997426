"""What the agent says about its node."""

from __future__ import annotations

from collections.abc import Iterable

from gpushare_spawner.agent.gpus.nvml import Gpu, GpuState
from gpushare_spawner.agent.sessions.activity import Activity
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.model.report import DeliveredReport, GpuReport, HostMemoryReport, Report, SessionReport


def gpu_report(gpu: Gpu, state: GpuState, capacity_units: int, waiting: int) -> GpuReport:
    """One GPU. `waiting`: sessions that have work for it and no lease."""
    return GpuReport(
        index=gpu.index,
        uuid=gpu.uuid,
        model=gpu.model,
        memory_bytes=gpu.memory_bytes,
        memory_used_bytes=state.memory_used_bytes,
        healthy=state.healthy,
        simulated=gpu.simulated,
        capacity_units=capacity_units,
        waiting=waiting,
    )


def session_report(session: Session, now: Activity, host_memory: tuple[int, int | None] = (0, None)) -> SessionReport:
    """One session, doing what `now` says. `host_memory`: bytes that it may need, and its budget."""
    record, request = session.record, session.record.request
    return SessionReport(
        id=request.id,
        user=request.user,
        server=request.server,
        template=request.template,
        gpus=request.gpus,
        share_units=request.share_units,
        borrowed_units=record.borrowed_units,
        tier=record.tier,
        tier_since=record.tier_since,
        effective_units=record.effective_units,
        guaranteed_units=session.guaranteed_units,
        opened_at=record.opened_at,
        confirmed=record.process is not None or record.pod is not None,
        pid=record.process.pid if record.process is not None else None,
        memory_bytes=now.memory_bytes,
        resident_bytes=now.resident_bytes,
        memory_limit_bytes=session.memory_limit(session.gpus[0]) if session.gpus else 0,
        host_memory_needed_bytes=host_memory[0],
        host_memory_budget_bytes=host_memory[1],
        gpu_busy=now.busy,
        waiting=now.waiting,
        last_gpu_activity=now.last,
        gpu_seconds=now.gpu_seconds,
        kernels=session.kernels.alive if session.kernels else None,
        kernels_busy=session.kernels.busy if session.kernels else None,
        last_kernel_activity=session.kernels.last_activity if session.kernels else None,
        processes=len(session.cuda),
        bypassing_pids=session.bypassing,
        announcement=record.announcement,
        memory_limit_hits=session.memory_hits,
        delivered=DeliveredReport.of(now.delivered),
    )


def node_report(
    node: str,
    published_at: float,
    gpus: Iterable[GpuReport],
    sessions: Iterable[SessionReport],
    host_memory: HostMemoryReport | None = None,
) -> Report:
    """The node; the oldest session first."""
    oldest_first = tuple(sorted(sessions, key=lambda session: (session.opened_at, session.id)))
    return Report(
        node=node, published_at=published_at, gpus=tuple(gpus), sessions=oldest_first, host_memory=host_memory
    )
