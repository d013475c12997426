"""Which requests are expected."""

from __future__ import annotations

import pytest

from gpushare_spawner.placement.request import Demand, RecentSpawns, Workload, workload_of

DAY = 86400.0
QUARTER, WHOLE = Demand(25, 1, cpu=1000), Demand(100, 1, cpu=8000)
TEMPLATES = {"quarter": QUARTER, "whole": WHOLE}


def popularity(workload: Workload) -> dict[Demand, float]:
    return {kind.demand: kind.popularity for kind in workload.kinds}


def test_before_there_is_any_spawn_all_templates_count_the_same() -> None:
    assert popularity(RecentSpawns().workload(TEMPLATES, 5.0)) == {QUARTER: 1, WHOLE: 1}


def test_what_is_spawned_often_counts_more() -> None:
    spawns = RecentSpawns()
    for _ in range(9):
        spawns.spawned("quarter", 0.0)
    assert popularity(spawns.workload(TEMPLATES, 0.0)) == {QUARTER: 10, WHOLE: 1}


def test_a_spawn_counts_half_after_a_week() -> None:
    spawns = RecentSpawns()
    spawns.spawned("quarter", 0.0)
    assert spawns.count("quarter", 0.0) == 1
    assert spawns.count("quarter", 7 * DAY) == pytest.approx(0.5)
    spawns.spawned("quarter", 7 * DAY)
    assert spawns.count("quarter", 14 * DAY) == pytest.approx(0.75)
    assert RecentSpawns(half_life=10.0).count("quarter", 0.0) == 0


def test_a_clock_that_was_set_back_makes_nothing_count_more() -> None:
    spawns = RecentSpawns()
    spawns.spawned("quarter", 7 * DAY)
    assert spawns.count("quarter", 0.0) == 1


def test_one_spawn_more_of_many_leaves_a_workload_that_resembles_it() -> None:
    spawns = RecentSpawns()
    for _ in range(100):
        spawns.spawned("quarter", 0.0)
        spawns.spawned("whole", 0.0)
    before = spawns.workload(TEMPLATES, 0.0)
    spawns.spawned("quarter", 0.0)
    after = spawns.workload(TEMPLATES, 1.0)
    assert before.resembles(after)
    assert after.resembles(before)


def test_a_workload_resembles_another_up_to_a_twentieth_of_the_requests() -> None:
    half = workload_of([(QUARTER, 50), (WHOLE, 50)])
    assert half.resembles(workload_of([(QUARTER, 5.4), (WHOLE, 4.6)]))
    assert not half.resembles(workload_of([(QUARTER, 56), (WHOLE, 44)]))
    assert not half.resembles(workload_of([(QUARTER, 50)]))
    assert Workload().resembles(Workload())


def test_a_template_that_nobody_wants_any_more_still_counts_a_little() -> None:
    spawns = RecentSpawns()
    for _ in range(1000):
        spawns.spawned("quarter", 0.0)
    assert popularity(spawns.workload(TEMPLATES, 0.0))[WHOLE] == 1


def test_templates_that_ask_for_the_same_are_one_kind_of_request() -> None:
    same = {"a": QUARTER, "b": Demand(25, 1, cpu=1000), "c": WHOLE}
    assert popularity(RecentSpawns().workload(same, 0.0)) == {QUARTER: 2, WHOLE: 1}


def test_templates_that_are_gone_do_not_count() -> None:
    spawns = RecentSpawns()
    spawns.spawned("gone", 0.0)
    assert popularity(spawns.workload({"whole": WHOLE}, 0.0)) == {WHOLE: 1}
    assert spawns.workload({}, 0.0) == Workload()


def test_the_mean_cpu_for_a_gpu_weighs_requests_by_popularity_and_size() -> None:
    workload = workload_of([(Demand(50, 1, cpu=1000), 2), (Demand(100, 2, cpu=6000), 1), (Demand(0, 0, cpu=2000), 1)])
    assert workload.cpu_per_gpu == pytest.approx((2 * 1000 + 6000 + 2000) / (2 * 0.5 + 2))
    assert Workload().cpu_per_gpu == 0


def test_what_is_not_popular_at_all_is_left_out() -> None:
    assert workload_of([(QUARTER, 0.0), (WHOLE, 1.0)]).kinds == workload_of([(WHOLE, 1.0)]).kinds
