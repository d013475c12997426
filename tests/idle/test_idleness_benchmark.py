"""The model of `benchmarks.idleness` serves, lends and counts as the product's parts say."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.idleness import SHORT, TASKS, cluster, one_gpu, p95_of, shipped_template, ways
from benchmarks.idleness_cluster import Outcome
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
