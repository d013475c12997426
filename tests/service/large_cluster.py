"""504 GPUs in 63 nodes, with 5,000 sessions, as their agents would report them."""

from __future__ import annotations

from gpushare_spawner.model.report import DeliveredReport, GpuReport, HostMemoryReport, SessionReport
from gpushare_spawner.model.share import Tier
from gpushare_spawner.service.reports import KnownReport
from tests.service.dashboards import GIB, MINUTE, NOW, session

NODES = 63
GPUS = 8
SESSIONS = 5000
TIERS = (Tier.ACTIVE, Tier.ACTIVE, Tier.DOWNGRADED, Tier.RELEASED)
UNITS = {Tier.ACTIVE: 10, Tier.DOWNGRADED: 4, Tier.RELEASED: 0}


def large_cluster(sessions: int = SESSIONS) -> list[KnownReport]:
    """Return one report for each node; sessions are spread over all GPUs."""
    return [_node(number, sessions) for number in range(NODES)]


def _node(number: int, sessions: int) -> KnownReport:
    name = f"gpu-{number:03d}"
    gpus = tuple(
        GpuReport(index=index, uuid=f"{name}-{index}", model="Simulated GPU 80 GiB", memory_bytes=80 * GIB,
                  memory_used_bytes=(20 + index) * GIB, utilisation=0.5, simulated=True)
        for index in range(GPUS)
    )  # fmt: skip
    return KnownReport(
        node=name,
        published_at=NOW,
        gpus=gpus,
        sessions=tuple(_session(one, gpus[(one // NODES) % GPUS].uuid) for one in range(number, sessions, NODES)),
        host_memory=HostMemoryReport(budget_bytes=512 * GIB, needed_bytes=100 * GIB, paged_out_bytes=40 * GIB),
    )


def _session(number: int, uuid: str) -> SessionReport:
    tier = TIERS[number % len(TIERS)]
    return session(
        f"user-{number:04d}", template="tenth", share_units=10, effective_units=UNITS[tier], tier=tier, gpus=(uuid,),
        gpu_busy=number % 8 == 0, last_gpu_activity=NOW - (number % 90) * MINUTE, memory_bytes=(1 + number % 7) * GIB,
        resident_bytes=GIB, kernels=number % 4, opened_at=NOW - 9000 - number,
        delivered=DeliveredReport(entitled_seconds=100 + number, delivered_seconds=99 + number * 0.9,
                                  waits=number % 50),
    )  # fmt: skip
