"""The model of `benchmarks.idleness` serves, lends and counts as the product's parts say."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.idleness import SHORT, TASKS, cluster, one_gpu, p95_of, shipped_template, ways
from benchmarks.idleness_cluster import Habits, Outcome
from benchmarks.idleness_rules import PerCell, Rule, Turns, Users, times
from benchmarks.interactive import HOURS
from gpushare_spawner.model.share import Share

GPUS, SERVERS = 2, 14


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """14 servers on 2 GPUs, all users come within half an hour."""
    return {way: cluster(way, GPUS, HOURS / 2, 1, SERVERS, 3 * HOURS) for way in ways()}


def test_reserved_gpus_serve_as_many_as_there_are_parts_and_lend_nothing(outcomes: dict[str, Outcome]) -> None:
    for way, parts in (("whole", 1), ("static", 4)):
        run = outcomes[way]
        assert run.never == SERVERS - GPUS * parts
        assert run.recovered == 0
        assert max(run.delays) == pytest.approx(0.0, abs=0.01)


def test_released_shares_serve_everybody_sooner(outcomes: dict[str, Outcome]) -> None:
    shipped, static = outcomes["shipped"], outcomes["static"]
    assert shipped.never == 0
    assert sum(shipped.waits) < sum(static.waits) / 10
    assert 0.5 * shipped.idle < shipped.recovered < shipped.idle


def test_pressure_takes_less_than_a_release_in_any_case_and_serves_everybody(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["pressure"].never == 0
    assert 0 < outcomes["pressure"].recovered < outcomes["shipped"].recovered


def test_gpu_hours_of_cells_are_their_work(outcomes: dict[str, Outcome]) -> None:
    for way, run in outcomes.items():
        busy = run.reserved - run.idle
        if way in ("whole", "static"):
            # a reserved part computes for as long as its session is not idle; cells that run at the end are not counted
            assert run.delivered == pytest.approx(busy, rel=0.06)
        assert 0 < run.delivered <= GPUS * 3


def test_more_sessions_on_one_gpu_wait_longer() -> None:
    assert p95_of(10, [1], HOURS / 6) < 2.0 < p95_of(33, [1], HOURS / 6)


def test_shipped_tenth_of_a_gpu_admits_more_than_ten_only_while_shares_are_lent() -> None:
    run = one_gpu(shipped_template("tenth-gpu"), 14, 1, HOURS / 10)
    assert run.servers_per_gpu == pytest.approx(10.0)  # nobody was idle for ten minutes
    assert shipped_template("tenth-gpu").share == Share(10)


def test_habits_are_those_of_the_facts() -> None:
    chance = random.Random(1)
    tasks = sorted(TASKS.work(chance) for _ in range(2001))
    assert tasks[1000] == pytest.approx(75, rel=0.1)  # 5 min with a quarter of the GPU
    assert sorted(SHORT.work(chance) for _ in range(2001))[1000] == pytest.approx(3.7, rel=0.15)
    assert sorted(SHORT.think(chance) for _ in range(2001))[1000] == pytest.approx(120, rel=0.1)
    assert all(math.isfinite(TASKS.memory(chance)) for _ in range(10))


def users(gpus: int, count: int, think: float, work: float) -> Users:
    """All come at once; the same pause and work each time, in seconds; working sets need no time."""
    habits = Habits(think=lambda chance: think, work=lambda chance: work, memory=lambda chance: 0)
    return Users(gpus, habits, [0.0] * count, HOURS, 1)


def test_a_stop_of_idle_servers_lets_others_start_and_loses_what_was_computed() -> None:
    held = Rule(users(1, 2, think=1000.0, work=100.0)).figures()
    assert (held.never, held.killed) == (1, 0)
    assert held.computed == pytest.approx(300 / HOURS)
    stopped = Rule(users(1, 2, think=1000.0, work=100.0), stop_after=600.0).figures()
    assert stopped.never == 0
    assert stopped.killed == 5
    assert stopped.lost > 0
    assert stopped.mean_wait_min == pytest.approx(5.0), "one waits for 10 minutes, the other not"


def test_a_gpu_for_each_cell_serves_everybody_and_lets_cells_wait_for_each_other() -> None:
    run = PerCell(users(1, 3, think=300.0, work=100.0)).figures()
    assert run.never == 0
    assert run.delayed == pytest.approx(100 * 2 / 26, abs=0.1), "only the first cells come at the same time"
    assert run.won == 100


def test_kernels_that_take_turns_share_the_time_equally() -> None:
    alone = Turns(users(1, 1, think=100.0, work=100.0)).figures()
    four = Turns(users(1, 5, think=100.0, work=100.0)).figures()
    assert (alone.never, four.never) == (0, 1)
    assert alone.computed == pytest.approx(0.5, abs=0.02)
    assert four.computed == pytest.approx((HOURS - 8 * 100) / HOURS, abs=0.1), "all pause at the same time"


def test_one_release_takes_less_often_from_a_user_who_is_back_soon_than_a_downgrade_and_a_release() -> None:
    for of_times in times(shipped_template("quarter-gpu")).values():
        assert of_times["shipped"]["back"] < of_times["5/10"]["back"] * 0.75
        assert of_times["shipped"]["won"] > of_times["5/10"]["won"] - 5
        assert (
            of_times["learned"]["won"] < of_times["shipped"]["won"]
            or of_times["learned"]["back"] > of_times["-/7"]["back"]
        )
