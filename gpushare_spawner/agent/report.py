"""The report of one session. node.py makes the report of the node; the model is in model/report.py."""

from __future__ import annotations

from gpushare_spawner.agent.sessions.session import Activity, Session
from gpushare_spawner.model.report import DeliveredReport, HostUseReport, SessionReport


def session_report(
    session: Session,
    now: Activity,
    host_memory: tuple[int, int | None] = (0, None),
    host_use: HostUseReport | None = None,
    layer_trouble: str | None = None,
) -> SessionReport:
    """Return the report of a session with the activity `now`.

    `host_memory`: the bytes that the session can need, and its budget. `layer_trouble`: see SessionReport.
    """
    record, request = session.record, session.record.request
    return SessionReport(
        id=request.id,
        user=request.user,
        server=request.server,
        template=request.template,
        quota=request.quota,
        gpus=request.gpus,
        layer=request.layer,
        layer_trouble=layer_trouble,
        share_units=request.share_units,
        borrowed_units=record.borrowed_units,
        tier=record.tier,
        tier_since=record.tier_since,
        effective_units=record.effective_units,
        guaranteed_units=session.guaranteed_units,
        yields=record.yields_until is not None,
        opened_at=record.opened_at,
        clock_moved=record.clock_moved,
        confirmed=record.owner is not None,
        pid=record.process.pid if record.process is not None else None,
        memory_bytes=now.memory_bytes,
        resident_bytes=now.resident_bytes,
        memory_limit_bytes=session.memory_limit(session.gpus[0]) if session.gpus and not record.gpus_unknown else 0,
        engine=request.engine,
        suspended=session.suspended,
        not_suspendable=session.not_suspendable,
        context_bytes=session.context_bytes,
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
        notice=record.notice,
        memory_limit_hits=session.memory_hits,
        delivered=DeliveredReport.of(now.delivered),
        host_use=host_use,
        lacks_requests=session.lacks_requests,
        keep=record.controls.keep,
        keeps=record.controls.keeps,
        exemption=record.controls.exemption,
        message=record.messages[-1] if record.messages else None,
        messages=record.messages,
        asks=session.asks.waiting() if session.asks is not None else (),
    )
