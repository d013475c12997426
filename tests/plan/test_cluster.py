"""The cluster of the plan lets the product's parts decide, in virtual time."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest

from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.plan.cluster import HourlyMean, Lateness, PlannedCluster
from gpushare_spawner.plan.servers import GIB, PlannedBurst, ServerPlan, idle_steps, merged

HOUR = 3600.0


def template(**idle: object) -> Template:
    fields = {"name": "quarter", "display_name": "0.25 GPU", "gpu": {"fraction": 0.25}, "idle": idle}
    return Template.model_validate(fields)


SHIPPED: dict[str, object] = {"downgrade_after": "5m", "downgrade_to": 0.1, "release_after": "10m", "warn_before": "2m"}


def plan(number: int, of: Template, arrives: float, lasts: float, *bursts: PlannedBurst, quota: str = "") -> ServerPlan:
    return ServerPlan(f"s{number}", f"u{number}", of, arrives, lambda: bursts, lasts, GIB, quota)


def test_idle_steps_are_those_of_the_policy_with_their_times() -> None:
    steps = idle_steps(template(stop_after="8h", **SHIPPED))
    assert [(step.after, step.tier, step.units) for step in steps] == [
        (300.0, Tier.DOWNGRADED, 10),
        (600.0, Tier.RELEASED, 0),
        (8 * HOUR, Tier.STOPPED, 0),
    ]
    assert idle_steps(template()) == []
    assert [step.tier for step in idle_steps(template(when="pressure", **SHIPPED))] == []


def test_fifth_server_waits_until_the_first_ends() -> None:
    quarter = template()
    plans = [plan(number, quarter, number * 10.0, 1000.0) for number in range(5)]
    outcome = PlannedCluster(1, 80 * GIB, [quarter]).run(plans, 5000.0)
    assert list(outcome.waits) == pytest.approx([0.0, 0.0, 0.0, 0.0, 960.0])
    assert outcome.use.reserved == pytest.approx(5 * 1000 * 0.25 / HOUR)
    assert outcome.never == 0


def test_released_share_lets_the_fifth_server_in_and_its_work_restores_it() -> None:
    quarter = template(**SHIPPED)
    plans = [plan(number, quarter, 0.0, 3000.0, PlannedBurst(1200.0, 60.0)) for number in range(4)]
    plans.append(plan(4, quarter, 10.0, 3000.0))
    cluster = PlannedCluster(1, 80 * GIB, [quarter])
    outcome = cluster.run(plans, 4000.0)
    # two sessions with 15 units less each make room for 25 units
    assert outcome.waits[-1] == pytest.approx(290.0)
    assert [units for _, units in cluster.servers[0].tiers] == [25, 10, 0, 25, 10, 0, -1]
    assert cluster.servers[0].tiers[3][0] == 1200.0


def test_work_shorter_than_min_use_restores_nothing() -> None:
    quarter = template(min_use="5s", **SHIPPED)
    cluster = PlannedCluster(1, 80 * GIB, [quarter])
    cluster.run([plan(0, quarter, 0.0, 3000.0, PlannedBurst(1200.0, 1.0))], 4000.0)
    assert [units for _, units in cluster.servers[0].tiers] == [25, 10, 0, -1]


def test_server_stopped_by_the_culler_comes_back_with_its_next_work() -> None:
    quarter = template(stop_after="1h", warn_before="1m")
    cluster = PlannedCluster(1, 80 * GIB, [quarter])
    outcome = cluster.run(
        [plan(0, quarter, 0.0, 10 * HOUR, PlannedBurst(60.0, 60.0), PlannedBurst(5 * HOUR, 60.0))], 20 * HOUR
    )
    assert len(outcome.waits) == 2
    # 60 s of pause, 60 s of work, an hour of idleness; twice, without the first pause
    assert outcome.server_seconds == pytest.approx(2 * HOUR + 180.0)


def test_spawn_over_a_maximum_is_refused_and_low_priority_waits() -> None:
    quarter = template()
    quotas = Quotas.model_validate({"groups": {"a": {"maximum": 0.25}}})
    plans = [plan(number, quarter, float(number), 100.0, quota="group:a") for number in range(2)]
    outcome = PlannedCluster(1, 80 * GIB, [quarter], quotas).run(plans, 1000.0)
    assert (outcome.refused, len(outcome.waits)) == (1, 1)


def test_group_in_quota_gets_its_guarantee_back_by_reclaim() -> None:
    quarter = template()
    quotas = Quotas.model_validate({"groups": {"owners": {"guarantee": 0.5}, "guests": {}}})
    busy = PlannedBurst(0.0, 10 * HOUR)
    plans = [plan(number, quarter, 0.0, 10 * HOUR, busy, quota="group:guests") for number in range(4)]
    plans.append(plan(4, quarter, HOUR, HOUR, quota="group:owners"))
    outcome = PlannedCluster(1, 80 * GIB, [quarter], quotas).run(plans, 3 * HOUR)
    assert outcome.waits[-1] == pytest.approx(70.0, abs=25.0)  # the notice period is 60 s
    assert PlannedCluster(1, 80 * GIB, [quarter], quotas, idle_actions=False).run(plans, 3 * HOUR).never == 1


def test_pressure_takes_idle_shares_only_for_a_spawn_that_waits() -> None:
    quarter = template(when="pressure", **SHIPPED)
    plans = [plan(number, quarter, 0.0, 10 * HOUR) for number in range(4)]
    alone = PlannedCluster(1, 80 * GIB, [quarter]).run(plans, 5 * HOUR)
    assert alone.use.held == pytest.approx(alone.use.reserved)
    outcome = PlannedCluster(1, 80 * GIB, [quarter]).run([*plans, plan(4, quarter, HOUR, HOUR)], 5 * HOUR)
    assert 0 < outcome.waits[-1] <= 80.0
    assert outcome.use.held < outcome.use.reserved


def test_share_of_several_gpus_is_placed_on_one_node_and_counted_in_full() -> None:
    pair = Template.model_validate({"name": "pair", "display_name": "pair", "gpu": {"count": 2}})
    outcome = PlannedCluster(8, 80 * GIB, [pair]).run([plan(0, pair, 0.0, HOUR, PlannedBurst(0.0, 600.0))], 2 * HOUR)
    assert outcome.use.reserved == pytest.approx(2.0)
    assert outcome.use.delivered == pytest.approx(2 * 600 / HOUR)


def test_merged_bursts_keep_time_and_work() -> None:
    bursts = [PlannedBurst(10.0, 30.0, 0.5), PlannedBurst(20.0, 5.0), PlannedBurst(400.0, 10.0)]
    joined = merged(bursts, 300.0)
    assert [burst.pause for burst in joined] == [10.0, 400.0]
    assert joined[0].gpu_seconds / joined[0].demand == pytest.approx(60 + 20 + 5)
    assert sum(burst.gpu_seconds for burst in joined) == 45.0
    assert joined[0].quiet == 20.0


def random_plans(count: int, of: Template, seed: int, demand: float = 0.4) -> list[ServerPlan]:
    def bursts(name: int) -> list[PlannedBurst]:
        own = random.Random(f"{seed}-{name}")
        return [
            PlannedBurst(60 * math.exp(own.gauss(1.2, 1.2)), 60 * math.exp(own.gauss(0, 1)), demand) for _ in range(60)
        ]

    chance = random.Random(seed)
    plans = [
        ServerPlan(
            f"s{number}", f"u{number}", of, chance.uniform(0, 10 * HOUR), partial(bursts, number),
            chance.uniform(1, 4) * HOUR, 4 * GIB,
        )
        for number in range(count)
    ]  # fmt: skip
    return sorted(plans, key=lambda plan: plan.arrives)


def test_merging_short_pauses_changes_neither_tiers_nor_waits() -> None:
    quarter = template(**SHIPPED)
    plans = random_plans(60, quarter, 3, demand=0.05)
    joined = [
        ServerPlan(one.name, one.user, quarter, one.arrives, partial(merged, one.bursts(), 300.0), one.lasts, 4 * GIB)
        for one in plans
    ]
    first = PlannedCluster(3, 80 * GIB, [quarter]).run(plans, 16 * HOUR)
    second = PlannedCluster(3, 80 * GIB, [quarter]).run(joined, 16 * HOUR)
    assert second.waits == pytest.approx(first.waits)
    assert second.use.held == pytest.approx(first.use.held)
    assert second.use.idle == pytest.approx(first.use.idle, rel=0.02)
    assert second.use.delivered == pytest.approx(first.use.delivered, rel=0.02)


def test_runs_with_and_without_arbiters_agree_on_waits_and_gpu_hours() -> None:
    quarter = template(**SHIPPED)
    plans = random_plans(60, quarter, 5)
    fast = PlannedCluster(2, 80 * GIB, [quarter]).run(plans, 16 * HOUR)
    exact = PlannedCluster(2, 80 * GIB, [quarter], arbiter=ArbiterSettings(period=30.0)).run(plans, 16 * HOUR)
    assert sum(fast.waits) > HOUR
    assert sum(exact.waits) == pytest.approx(sum(fast.waits), rel=0.1)
    assert exact.use.reserved == pytest.approx(fast.use.reserved, rel=0.02)
    assert exact.use.held == pytest.approx(fast.use.held, rel=0.05)
    assert exact.use.delivered == pytest.approx(fast.use.delivered, rel=0.08)
    assert exact.delays
    assert not fast.delays


def test_run_ends_early_once_too_many_spawns_are_late() -> None:
    quarter = template()
    plans = [plan(number, quarter, number * 10.0, 10 * HOUR) for number in range(50)]
    outcome = PlannedCluster(1, 80 * GIB, [quarter]).run(plans, 20 * HOUR, Lateness(60.0, 5))
    assert outcome.gave_up
    assert not PlannedCluster(13, 80 * GIB, [quarter]).run(plans, 20 * HOUR, Lateness(60.0, 5)).gave_up


def test_hourly_means_are_areas_by_hours() -> None:
    mean = HourlyMean()
    mean.change(1800.0, 2.0)
    mean.change(5400.0, -1.0)
    assert mean.means(3 * HOUR) == pytest.approx([1.0, 1.5, 1.0])
