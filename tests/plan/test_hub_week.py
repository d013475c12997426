"""A week of a hub with our service, and the plan that is made from what the hub and the service wrote, agree."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.model.layers import Placement
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.plan import answers
from gpushare_spawner.plan.cluster import Outcome, PlannedCluster
from gpushare_spawner.plan.servers import GIB, PlannedBurst, Running, ServerPlan, Trace
from gpushare_spawner.plan.sources import Reading
from gpushare_spawner.service.history.recorder import History, HistorySources
from gpushare_spawner.service.history.store import Action, HistoryStore
from gpushare_spawner.service.hub.client import HubServer, HubUser
from gpushare_spawner.service.reports import NodeSnapshot

HOUR, DAY = 3600.0, 86400.0
BEGAN = datetime(2026, 3, 2, tzinfo=UTC).timestamp()
OBSERVE_EVERY = 60.0
GPUS = 2
QUARTER = Template.model_validate(
    {
        "name": "quarter",
        "display_name": "0.25 GPU",
        "gpu": {"fraction": 0.25},
        "idle": {"downgrade_after": "5m", "downgrade_to": 0.1, "release_after": "10m", "warn_before": "2m"},
    }
)


class RecordedWeek(PlannedCluster):
    """The cluster with arbiters, whose reports the service's recorder sees, and whose hub writes its log."""

    def __init__(self, url: str) -> None:
        super().__init__(GPUS, 80 * GIB, [QUARTER], arbiter=ArbiterSettings(period=30.0))
        self.log: list[str] = []
        self.history = History(
            HistoryStore(url),
            HistorySources(
                self._snapshots,
                self._users,
                self._pending,
                lambda: self.templates,
                clock=lambda: BEGAN + self.clock.now,
                steady=lambda: self.clock.now,
            ),
        )

    async def _run(self, horizon: float) -> None:
        while self.clock.now < horizon:
            self.clock.run(min(horizon, self.clock.now + OBSERVE_EVERY))
            await self.history.observe()
            if self.clock.now % HOUR == 0:
                await self.history.store()
        await self.history.store()

    async def _snapshots(self) -> list[NodeSnapshot]:
        def moved(instant: float | None) -> float | None:
            return None if instant is None else BEGAN + instant

        snapshots = []
        for report in self.reports():
            sessions = [
                session.model_copy(
                    update={
                        name: moved(getattr(session, name)) for name in ("opened_at", "tier_since", "last_gpu_activity")
                    }
                )
                for session in report.sessions
            ]
            known = report.model_copy(update={"published_at": BEGAN + self.clock.now, "sessions": tuple(sessions)})
            snapshots.append(NodeSnapshot(None, known))  # type: ignore[arg-type]
        return snapshots

    def _users(self) -> list[HubUser]:
        return [
            HubUser(
                server.plan.user,
                servers=(HubServer(server.plan.user, "", started=BEGAN + server.arrived, profile="quarter"),),
            )
            for server in self.running.values()
        ]

    async def _pending(self) -> None:
        return None

    def _say(self, text: str) -> None:
        now = datetime.fromtimestamp(BEGAN + self.clock.now, UTC)
        self.log.append(f"[I {now:%Y-%m-%d %H:%M:%S}.{now.microsecond // 1000:03} JupyterHub test:1] {text}\n")

    def _start(self, server: Running, placement: Placement) -> None:
        user, waited = server.plan.user, self.clock.now - server.arrived
        self._say(f"Adding user {user} to proxy /user/{user}/ => http://127.0.0.1:1")
        self._say(f"User {user} took {waited:.3f} seconds to start")
        super()._start(server, placement)

    def _end(self, server: Running) -> None:
        self._say(f"Removing user {server.plan.user} from proxy (/user/{server.plan.user}/)")
        super()._end(server)

    def _change_tier(self, server: Running, tier: Tier, units: int) -> None:
        super()._change_tier(server, tier, units)
        if tier is not Tier.ACTIVE:
            at, user = BEGAN + self.clock.now, server.plan.user
            self.history.record(Action(at, str(tier), "culler", user, "", "quarter", units=units, cause="idle"))


def week_of(users: int, seed: int) -> list[ServerPlan]:
    def bursts(name: str) -> Iterable[PlannedBurst]:
        own = random.Random(f"{seed}-{name}")
        while True:
            yield PlannedBurst(answers.pause_of(own.random()), 300 * math.exp(own.gauss(0, 1)) * 0.4, 0.4)

    chance = random.Random(seed)
    plans = []
    for user in range(users):
        free = 0.0
        for day in range(7):
            arrives = max(free + HOUR, (day + chance.gauss(10.5, 1.5) / 24) * DAY)
            lasts = HOUR * chance.lognormvariate(1.5, 0.5)
            free = arrives + lasts + 3 * HOUR
            if free < (day + 1) * DAY:
                name = f"{user}-{day}"
                plans.append(ServerPlan(name, f"u{user}", QUARTER, arrives, partial(bursts, name), lasts, 8 * GIB))
    return sorted(plans, key=lambda plan: plan.arrives)


@pytest.fixture(scope="module")
def week(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path, Path]:
    folder = tmp_path_factory.mktemp("week")
    cluster = RecordedWeek(f"sqlite:///{folder}/history.sqlite")
    outcome = cluster.run(week_of(20, 1), 7 * DAY)
    (folder / "jupyterhub.log").write_text("".join(cluster.log))
    return outcome, folder / "jupyterhub.log", folder / "history.sqlite"


def planned(*sources: Path) -> tuple[Trace, Outcome]:
    reading = Reading(ZoneInfo("UTC"), {"quarter": 0.25})
    reading.idle_times({"quarter": 300.0})
    for source in sources:
        reading.read(str(source))
    trace = reading.finish()
    assert not trace.problems
    goal = answers.Goal((QUARTER,))
    work = answers.workload(trace, goal, [])
    outcome, _ = answers.ShareRuns(goal, work, True).run(GPUS, to_the_end=True)
    return trace, outcome


@pytest.mark.parametrize("which", ["log and history", "history"])
def test_plan_from_the_logs_of_a_week_agrees_on_gpu_hours_and_mean_wait(
    week: tuple[Outcome, Path, Path], which: str
) -> None:
    real, log, history = week
    _, plan = planned(*([log, history] if which == "log and history" else [history]))
    assert sum(real.waits) / len(real.waits) > 60
    assert len(plan.waits) == pytest.approx(len(real.waits), abs=1)
    assert plan.use.reserved == pytest.approx(real.use.reserved, rel=0.05)
    assert plan.use.held == pytest.approx(real.use.held, rel=0.05)
    assert sum(plan.waits) / len(plan.waits) == pytest.approx(sum(real.waits) / len(real.waits), rel=0.05)


def test_the_log_of_the_hub_alone_has_all_servers_and_their_waits(week: tuple[Outcome, Path, Path]) -> None:
    real, log, _ = week
    reading = Reading(ZoneInfo("UTC"))
    reading.read(str(log))
    servers = reading.finish().servers
    assert sum(server.wait for server in servers) == pytest.approx(sum(real.waits), rel=0.001)
    hours = sum((server.end or BEGAN + 7 * DAY) - server.start - server.wait for server in servers) / HOUR
    assert hours * 0.25 == pytest.approx(real.use.reserved, rel=0.001)
