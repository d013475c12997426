"""Sums of GPU time over a day, with kills of service and hub at random instants, against the sessions' own integral."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.report import DeliveredReport, EndedSession, SessionReport
from gpushare_spawner.model.share import Tier
from gpushare_spawner.quota.accounts import QuotaAccounts
from gpushare_spawner.quota.budgets import BudgetUse, GpuTimeUse
from gpushare_spawner.service.history.queries import By, gpu_time
from gpushare_spawner.service.history.recorder import OBSERVE_EVERY, STORE_EVERY, History
from gpushare_spawner.service.history.store import DAY, HOUR, HistoryStore
from gpushare_spawner.service.reports import KnownReport
from tests.service.history.test_metering import BEGIN, report
from tests.service.history.test_recorder import ALWAYS, World, in_groups

GPUS = ("GPU-0", "GPU-1", "GPU-2", "GPU-3")
USERS = ("ann", "bob", "cat", "dan", "eve", "fay")
QUOTA = {"ann": "group:optics", "bob": "group:optics", "cat": "group:theory", "dan": "user:dan"}
GROUPS = {"dan": ("ml",), "eve": ("ml",), "fay": ("bio", "ml")}


def group_of(user: str) -> str:
    kind, _, name = QUOTA.get(user, "").partition(":")
    return name if kind == "group" else min(GROUPS[user])


@dataclass
class Life:
    """A session, and what it held and used so far."""

    user: str
    number: int
    gpu: str
    units: int
    opened: float
    until: float
    effective: int = 0
    tier_since: float = 0.0
    held: float = 0.0
    worked: float = 0.0
    changes: list[float] = field(default_factory=list)

    def live(self, seconds: float, works: bool) -> None:
        self.held += self.effective / 100 * seconds
        self.worked += seconds if works else 0.0

    def reported(self) -> SessionReport:
        return SessionReport(
            id=f"{self.user}-{self.number % 3}", user=self.user, template="t", quota=QUOTA.get(self.user, ""),
            gpus=(self.gpu,), share_units=self.units, effective_units=self.effective, guaranteed_units=self.effective,
            tier=Tier.ACTIVE if self.effective else Tier.RELEASED, tier_since=self.tier_since, opened_at=self.opened,
            gpu_seconds=self.worked,
        )  # fmt: skip

    def ended(self, at: float) -> EndedSession:
        return EndedSession(
            id=self.reported().id, opened_at=self.opened, ended_at=at, effective_units=self.effective,
            tier_since=self.tier_since, gpu_seconds=self.worked, delivered=DeliveredReport(),
        )  # fmt: skip


class Day:
    """A day of sessions that come, change their tier, and go, second by second."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.open: dict[str, Life] = {}
        self.ended: list[EndedSession] = []
        self.lives: list[Life] = []

    def second(self, now: float, service_runs: bool) -> None:
        for user in USERS:
            life = self.open.get(user)
            if life is None and self.rng.random() < 1 / 900:
                units = self.rng.choice([10, 25, 50])
                until = now + max(180.0, self.rng.expovariate(1 / 3600))
                life = Life(user, len(self.lives), self.rng.choice(GPUS), units, now, until, units, now)
                self.open[user] = life
                self.lives.append(life)
            elif life is not None and now >= life.until:
                self.ended.append(life.ended(now))
                del self.open[user]
            elif life is not None:
                life.live(1.0, works=bool(life.effective) and int(now) // 300 % 2 == 0)
                # the culler lowers tiers, and the agent restores them
                able = not life.effective or service_runs
                if able and self.rng.random() < 1 / 1800 and now - life.tier_since > 120:
                    life.effective, life.tier_since = (0 if life.effective else life.units), now
        self.ended = [gone for gone in self.ended if now - gone.ended_at < HOUR]

    def reports(self, now: float) -> KnownReport:
        whole = report(now).model_copy(update={"ended": tuple(self.ended)})
        return KnownReport.of(whole, tuple(life.reported() for life in self.open.values()))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_a_day_with_kills_of_service_and_hub_counts_what_the_sessions_held(tmp_path: Path, seed: int) -> None:
    world, day, url = World(), Day(seed), f"sqlite:///{tmp_path}/history.sqlite"
    rng = random.Random(100 + seed)
    users = [in_groups(user, *GROUPS.get(user, ())) for user in USERS]
    quotas = {
        "groups": {"physics": {"budget": {"hours": 1, "window": "week"}, "teams": {"optics": {}, "theory": {}}}},
        "users": {"dan": {"budget": {"hours": 1, "window": "week"}}},
    }
    budgets = BudgetUse(QuotaAccounts(Quotas.model_validate(quotas)))
    history: History | None = None
    kills, down_until, hub_until = 0, 0.0, 0.0

    def count(uses: list[GpuTimeUse]) -> None:
        budgets.add(uses)

    for second in range(DAY + 120):
        now = BEGIN + float(second)
        if second < DAY:
            day.second(now, service_runs=history is not None)
        else:
            day.ended += [life.ended(now) for life in day.open.values()]
            day.open.clear()
        world.now = now
        if rng.random() < 1 / 1200:  # the hub is killed, and its service with it
            down_until, hub_until = now + rng.uniform(1, 30), now + rng.uniform(1, 90)
        elif rng.random() < 1 / 900:
            down_until = now + rng.uniform(1, 120)
        if now < down_until:
            kills += history is not None
            history = None
            continue
        world.users = users if now >= hub_until else None  # type: ignore[assignment]
        if history is None:
            history = History(HistoryStore(url), world.sources())
            await history.store()
            budgets = BudgetUse(budgets.accounts)
            await history.read_uses(budgets.earliest(now), budgets.add)
            history.counted = count  # type: ignore[assignment]
        if second % OBSERVE_EVERY == 0:
            world.reports = [day.reports(now)]
            await history.observe()
        if second % STORE_EVERY == 0:
            await history.store()
    assert history is not None
    assert kills > 50
    assert len(day.lives) > 50
    for key, of in ((By.USER, lambda life: life.user), (By.GROUP, lambda life: group_of(life.user))):
        held, worked = defaultdict[str, float](float), defaultdict[str, float](float)
        for life in day.lives:
            held[of(life)] += life.held
            worked[of(life)] += life.worked
        rows = await history.ask(partial(gpu_time, period=ALWAYS, by=[key]))
        sums = {str(row.key[0]): row.amounts for row in rows}
        assert {name: amounts.held for name, amounts in sums.items()} == pytest.approx(dict(held), rel=1e-3)
        assert {name: amounts.used for name, amounts in sums.items()} == pytest.approx(dict(worked), rel=1e-3)
    by_gpu = defaultdict[str, float](float)
    for life in day.lives:
        by_gpu[f"n {life.gpu}"] += life.held
    gpus = {str(row.key[0]): row.amounts.held for row in await history.ask(lambda c: gpu_time(c, ALWAYS, [By.GPU]))}
    assert gpus == pytest.approx(dict(by_gpu), rel=1e-3)
    states = {state.account: state.used * HOUR for state in budgets.all_states(world.now)}
    physics = sum(life.held for life in day.lives if QUOTA.get(life.user, "").startswith("group"))
    assert states["group:physics"] == pytest.approx(physics, rel=1e-3)
    assert states["user:dan"] == pytest.approx(sum(life.held for life in day.lives if life.user == "dan"), rel=1e-3)
