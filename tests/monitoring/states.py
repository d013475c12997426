"""A service in trouble of every kind, for the metrics, the alert rules and the dashboard."""

from __future__ import annotations

from collections.abc import Sequence

from gpushare_spawner.model.quota import BudgetState, Quotas
from gpushare_spawner.model.report import DeliveredReport, GpuReport, HostMemoryReport
from gpushare_spawner.service.actions.context import Counters
from gpushare_spawner.service.culler.decisions import CullerSettings, decide_sessions
from gpushare_spawner.service.history.store import Wait, WaitOutcome
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.service.reports import KnownReport, NodeSnapshot
from gpushare_spawner.service.sources import ServiceSnapshot
from gpushare_spawner.service.waiting import waiting_spawns
from tests.service.dashboards import GIB, NO_AGENT, NOW, TEMPLATES, afternoon, session

QUOTAS = Quotas.model_validate(
    {
        "groups": {
            "optics": {"guarantee": 0.5, "maximum": 2},
            "physics": {"guarantee": 3, "teams": {"lasers": {"guarantee": 1}}},
        },
        "users": {"erin": {"guarantee": 0.1}},
        "prices": {"gpu_hours": [{"gpu_hour": 2}], "energy": 0.3, "co2": 380},
    }
)
DELIVERED_RATIO = 0.5
"""What a session in trouble receives of its entitled time."""


def report(working_seconds: float = 1000.0) -> KnownReport:
    """The afternoon, with what goes wrong. ``working_seconds``: the entitled time of a session that gets half of it."""
    usual = afternoon()
    short = DeliveredReport(
        entitled_seconds=working_seconds, delivered_seconds=DELIVERED_RATIO * working_seconds, waits=3
    )
    gpus: tuple[GpuReport, ...] = (
        usual.gpus[0].model_copy(update={"utilisation": 0.97, "temperature_celsius": 91, "power_watts": 233.5}),
        usual.gpus[1].model_copy(update={"healthy": False, "utilisation": None}),
    )
    late = session("zoe", quota="group:optics", share_units=75, gpus=("GPU-1",), delivered=short,
                   gpu_seconds=working_seconds)  # fmt: skip
    memory = HostMemoryReport(budget_bytes=8 * GIB, needed_bytes=8 * GIB, paged_out_bytes=5 * GIB)
    changes = {"gpus": gpus, "sessions": (*usual.sessions, late), "host_memory": memory, "state_trouble": "disk full"}
    return usual.model_copy(update=changes)


def waiting(number: int, now: float = NOW) -> list[HubServer]:
    """Servers that the hub is starting; the oldest for an hour."""
    return [
        HubServer(f"waiting{index}", "", ready=False, pending="spawn", profile="quarter", started=now - 3600 + index)
        for index in range(number)
    ]


def counters(spawns: int = 1) -> Counters:
    """``spawns``: how many got a GPU so far, and how many did not."""
    counted = Counters()
    for index in range(spawns):
        counted.waited(Wait(NOW, 0.5 + 4 * index, WaitOutcome.STARTED, "ann", template="quarter"))
        counted.waited(Wait(NOW, 30.0, WaitOutcome.GAVE_UP, "bob", template="half"))
        counted.failures["hub"] += 1
    return counted


def trouble(
    counted: Counters | None = None,
    reported: KnownReport | None = None,
    pending: Sequence[HubServer] | None = None,
    now: float = NOW,
) -> tuple[ServiceSnapshot, Counters, str]:
    """What the service's metrics show: an agent that does not answer, an unhealthy GPU, a long queue, ..."""
    reported = reported if reported is not None else report()
    snapshots = [NodeSnapshot(NO_AGENT, reported), NodeSnapshot(NO_AGENT, None, "The agent does not answer.")]
    snapshot = ServiceSnapshot(
        now,
        snapshots,
        decide_sessions(snapshots, (), TEMPLATES, now, CullerSettings()),
        TEMPLATES,
        waiting=waiting_spawns(pending if pending is not None else waiting(12, now), [reported], TEMPLATES),
        quotas=QUOTAS,
        budgets=(BudgetState(account="group:physics", hours=20, used=19, window=86400.0),),
    )
    return (snapshot, counted if counted is not None else counters(), "The database does not answer.")
