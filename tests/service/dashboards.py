"""A machine with sessions in all tiers, for the tests of the dashboard and for a browser."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from gpushare_spawner.idle.use import RecentUse
from gpushare_spawner.model.control import QueueProgress
from gpushare_spawner.model.quota import BudgetState, Quotas
from gpushare_spawner.model.report import DeliveredReport, GpuReport, MemoryLimitHits, Notice, SessionReport
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions.context import ActionContext
from gpushare_spawner.service.api import reading
from gpushare_spawner.service.api.router import Call, Nothing, Services
from gpushare_spawner.service.api.snapshots import Events, ServiceSnapshots
from gpushare_spawner.service.culler.decisions import CullerState
from gpushare_spawner.service.dashboard import DashboardAddress, dashboard
from gpushare_spawner.service.hub.caller import Caller
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.service.reports import KnownReport, NodeSnapshot, RecentReports
from gpushare_spawner.service.sources import DashboardSources
from gpushare_spawner.service.web.app import HubTheme
from gpushare_spawner.service.web.dashboard import page_environment
from tests.service.conftest import deciding

NOW = 1_000_000.0
GIB = 2**30
MINUTE = 60.0
ADMIN = Caller("ann", is_admin=True)
PREFIX = "/services/gpushare/"


# dashboards are made of reports and ask no agent
NO_AGENT: Any = None


def template(name: str, fraction: float, shown: str) -> Template:
    idle = {
        "downgrade_after": "15m",
        "downgrade_to": round(fraction * 0.4, 2),
        "release_after": "45m",
        "stop_after": "8h",
    }
    return Template(name=name, display_name=shown, gpu={"fraction": fraction}, idle=idle)


TEMPLATES = {
    one.name: one
    for one in (
        template("quarter", 0.25, "0.25 GPU"),
        template("half", 0.50, "0.50 GPU"),
        template("tenth", 0.10, "0.10 GPU"),
    )
}


def session(user: str, **changes: Any) -> SessionReport:
    """A quarter of GPU 0, whose GPU has been idle for two minutes."""
    values: dict[str, Any] = {
        "id": user, "user": user, "template": "quarter", "gpus": ("GPU-0",), "share_units": 25, "opened_at": NOW - 9000,
        "tier_since": NOW - 9000, "effective_units": 25, "last_gpu_activity": NOW - 2 * MINUTE,
        "memory_bytes": 3 * GIB, "resident_bytes": 3 * GIB, "memory_limit_bytes": 16 * GIB,
        "kernels": 1, "kernels_busy": 0,
    }  # fmt: skip
    values |= changes
    return SessionReport(**({"guaranteed_units": values["effective_units"]} | values))


def afternoon(*more: SessionReport) -> KnownReport:
    """GPU 0 is full and has lent units, GPU 1 half empty."""
    gpu = {"model": "Simulated GPU 16 GiB", "memory_bytes": 16 * GIB, "simulated": True}
    return KnownReport(
        node="workstation",
        published_at=NOW,
        gpus=(
            GpuReport(index=0, uuid="GPU-0", memory_used_bytes=int(14.2 * GIB), waiting=1, **gpu),
            GpuReport(index=1, uuid="GPU-1", memory_used_bytes=2 * GIB, **gpu),
        ),
        sessions=(
            session("ann", gpu_busy=True, kernels_busy=1, memory_bytes=6 * GIB, resident_bytes=5 * GIB,
                    delivered=DeliveredReport(entitled_seconds=1500, delivered_seconds=1482, waits=12,
                                              wait_p50_seconds=0.022, wait_p95_seconds=0.194),
                    memory_limit_hits=MemoryLimitHits(count=3)),
            session(
                "bob", server="thesis", tier=Tier.DOWNGRADED, effective_units=10, last_gpu_activity=NOW - 41 * MINUTE,
                notice=Notice(tier=Tier.RELEASED, at=NOW + 4 * MINUTE, reason="told"),
            ),
            session("carol", template="half", share_units=50, tier=Tier.RELEASED, effective_units=0, kernels=3,
                    last_gpu_activity=NOW - 80 * MINUTE, memory_bytes=9 * GIB, resident_bytes=0),
            session("dave", borrowed_units=25, opened_at=NOW - 600, tier_since=NOW - 600, waiting=True, gpu_busy=True),
            session("erin", template="tenth", share_units=10, effective_units=10, gpus=("GPU-1",),
                    bypassing_pids=(4711,),
                    last_gpu_activity=NOW - 11 * MINUTE),
            *more,
        ),
    )  # fmt: skip


def shown(
    report: KnownReport | None = None,
    viewer: Caller = ADMIN,
    notes: tuple[str, ...] = (),
    pending: Sequence[HubServer] | None = (),
    quotas: Quotas | None = None,
    use: RecentUse | None = None,
) -> dict[str, Any]:
    """What the REST API says of that afternoon."""

    async def parts() -> dict[str, Any]:
        given = services([NodeSnapshot(NO_AGENT, report or afternoon())], notes, pending, quotas, use)
        nodes = await reading.nodes(Call(given, viewer, {}, reading.NodesQuery(), Nothing()))
        queue = await reading.queue(Call(given, viewer, {}, Nothing(), Nothing()))
        shown = nodes.model_dump(mode="json") | {"queue": queue.model_dump(mode="json")}
        return shown | await sessions_shown(given, viewer)

    return asyncio.run(parts())


async def sessions_shown(services: Services, viewer: Caller) -> dict[str, Any]:
    """What the REST API says of the sessions."""
    query = reading.SessionsQuery(limit=reading.MOST)
    answer = await reading.sessions(Call(services, viewer, {}, query, Nothing()))
    return answer.model_dump(mode="json")


def page(
    report: KnownReport | None = None,
    viewer: Caller = ADMIN,
    notes: tuple[str, ...] = (),
    pending: Sequence[HubServer] | None = (),
    quotas: Quotas | None = None,
    use: RecentUse | None = None,
    asks: Mapping[str, str] | None = None,
    snapshots: Sequence[NodeSnapshot] | None = None,
    told: Mapping[tuple[str, str], QueueProgress] | None = None,
    budgets: Sequence[BudgetState] = (),
) -> str:
    """The dashboard of that afternoon, as the browser gets it. ``asks``: the arguments of its address; ``told``: what
    the hub tells the users of spawns."""
    reported = snapshots or [NodeSnapshot(NO_AGENT, report if report is not None else afternoon())]
    given = services(reported, notes, pending, quotas, use, told, budgets)
    data = asyncio.run(dashboard(given, viewer, DashboardAddress.of(PREFIX, asks or {})))
    template = page_environment(PREFIX, HubTheme()).get_template("dashboard.html")
    return template.render(dashboard=data, xsrf="x", admin=False)


def services(
    snapshots: Sequence[NodeSnapshot],
    notes: tuple[str, ...] = (),
    pending: Sequence[HubServer] | None = (),
    quotas: Quotas | None = None,
    use: RecentUse | None = None,
    told: Mapping[tuple[str, str], QueueProgress] | None = None,
    budgets: Sequence[BudgetState] = (),
) -> Services:
    """The parts of a service that has these reports."""

    async def waiting() -> Sequence[HubServer] | None:
        return pending

    async def told_of(waiting: Sequence[HubServer]) -> Mapping[tuple[str, str], QueueProgress]:
        return {key: one for key, one in (told or {}).items() if key in {(one.user, one.name) for one in waiting}}

    context = ActionContext((), NO_AGENT, lambda: TEMPLATES, clock=lambda: NOW, quotas=lambda: quotas, pending=waiting)
    decide = deciding((), CullerState(use=use or RecentUse()))
    shots = ServiceSnapshots(
        DashboardSources(context, Reports(snapshots), decide, lambda: notes, told_of, lambda: budgets)
    )
    return Services(PREFIX, shots, Events(shots), context)


class Reports(RecentReports):
    """Those of a test."""

    def __init__(self, given: Sequence[NodeSnapshot]) -> None:
        super().__init__([])
        self._given = list(given)

    async def snapshots(self) -> list[NodeSnapshot]:
        return self._given
