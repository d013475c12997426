"""The right size of a share: what a replay of recorded bursts predicts, and what then happens with that share."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import pytest

from gpushare_spawner.arbiter.replay import VirtualClock, VirtualGpu, VirtualProcess
from gpushare_spawner.arbiter.right_size import (
    FEWEST_BURSTS,
    MOST_CONTENDED,
    MOST_OTHER,
    MOST_OWN,
    PREDICTION_ERROR,
    WORTH_GPU_SECONDS,
    WORTH_WAITING,
    OtherShare,
    RecordedSession,
    Recording,
    advise,
    is_evidence,
    waits,
)
from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.model.report import Burst

GB, HOUR = 10**9, 3600.0
SETTINGS = ArbiterSettings()
Step = tuple[float, float, float]
"""Seconds of thinking, GPU seconds, part of the GPU that the burst can use."""
Work = Callable[[], Iterator[Step]]


@dataclass(frozen=True)
class World:
    """Sessions on one GPU of 80 GB under the shipped arbiter, which records their bursts."""

    units: dict[str, int]
    work: dict[str, Work]
    memory: dict[str, int]

    def run(self, seconds: float, most: int = 10**9) -> dict[str, list[Burst]]:
        """Return the recorded bursts, after so much time, or when the session `own` has so many."""
        clock = VirtualClock()
        gpu = VirtualGpu(clock, 80 * GB, SETTINGS.bandwidth_guess, SETTINGS)
        recorded: dict[str, list[Burst]] = {name: [] for name in self.units}
        for name, units in self.units.items():
            gpu.session(name, units)
            process = VirtualProcess(name, self.memory[name])
            gpu.connect(process)

            def think(process: VirtualProcess, coming: Iterator[Step]) -> None:
                pause, gpu_seconds, demand = next(coming)
                clock.after(pause, partial(gpu.submit, process, gpu_seconds, demand))

            process.done = partial(think, process, self.work[name]())
            process.done()
        while clock.now < seconds and len(recorded["own"]) < most:
            clock.run(clock.now + 10.0)
            for name, bursts in recorded.items():
                bursts += gpu.arbiter.take_bursts(name, clock.now)
        return recorded

    def with_share(self, units: int) -> World:
        return replace(self, units={**self.units, "own": units})


def cells(seed: str, think: float, median: float) -> Work:
    def steps() -> Iterator[Step]:
        chance = random.Random(seed)
        while True:
            yield 1.5 + think * math.exp(chance.gauss(0, 0.7)), median * math.exp(chance.gauss(0, 1)), 1.0

    return steps


def training(seed: str, epoch: float, pause: float, demand: float = 1.0) -> Work:
    """Epochs with short pauses, and half a minute of reading the results after every tenth."""

    def steps() -> Iterator[Step]:
        chance = random.Random(seed)
        for number in count():
            after = pause * chance.uniform(0.8, 1.2) if number % 10 else 30.0
            yield after, epoch * chance.uniform(0.8, 1.2), demand

    return steps


UNITS = {"own": 50, "b": 25, "c": 25}
FITS = {"own": 20 * GB, "b": 20 * GB, "c": 20 * GB}
WORLDS = {
    "cells": World(UNITS, {"own": cells("a", 20, 3), "b": training("b", 6, 0.4), "c": cells("c", 15, 5)}, FITS),
    "training": World(UNITS, {"own": training("a", 5, 0.5), "b": training("b", 6, 0.3), "c": cells("c", 15, 5)}, FITS),
    "more memory than the GPU has": World(
        UNITS,
        {"own": cells("a", 30, 4), "b": training("b", 6, 0.4), "c": cells("c", 20, 5)},
        {"own": 40 * GB, "b": 40 * GB, "c": 30 * GB},
    ),
}


def recording(world: World, recorded: dict[str, list[Burst]]) -> Recording:
    own, *others = (RecordedSession(world.units[name], tuple(bursts)) for name, bursts in recorded.items())
    return Recording(80 * GB, own, tuple(others))


@pytest.mark.parametrize("kind", WORLDS)
def test_replay_predicts_the_waits_with_a_smaller_share_that_is_then_given(kind: str) -> None:
    world = WORLDS[kind]
    before = world.run(1200.0)
    number = len(before["own"])
    predicted = waits(recording(world, before), 25)
    then = world.with_share(25).run(6000.0, most=number)["own"][:number]
    assert predicted is not None
    assert len(then) == number
    happened = sum(burst.waited_seconds for burst in then)
    # a smaller share makes a difference that a guess would miss
    assert happened > 1.25 * sum(burst.waited_seconds for burst in before["own"])
    assert sum(predicted) == pytest.approx(happened, rel=PREDICTION_ERROR)


QUIET = World({"own": 50, "b": 25}, {"own": cells("a", 40, 1), "b": cells("b", 40, 1)}, {"own": 8 * GB, "b": 20 * GB})
CROWDED = World(
    {"own": 10, "b": 45, "c": 45},
    {"own": cells("a", 8, 4), "b": training("b", 6, 0.4), "c": training("c", 6, 0.4)},
    {"own": 8 * GB, "b": 20 * GB, "c": 20 * GB},
)
SHARES = [OtherShare(units, units * 80 * GB // 100, 80 * GB) for units in (5, 10, 25, 50, 100)]
MANY_HOURS = 40 * HOUR


@pytest.fixture(scope="module")
def quiet() -> Recording:
    return recording(QUIET, QUIET.run(2400.0))


@pytest.fixture(scope="module")
def crowded() -> Recording:
    return recording(CROWDED, CROWDED.run(2400.0))


def test_share_that_would_have_been_enough_is_advised_with_its_few_delays(quiet: Recording) -> None:
    advice = advise([quiet], SHARES, MANY_HOURS)
    assert advice is not None
    assert (advice.units, advice.advised_units) == (50, 10), "5 % of the memory is less than the session's"
    assert advice.later_seconds <= 0.02 * advice.gpu_seconds
    assert advice.freed_gpu_seconds == 0.4 * MANY_HOURS
    assert (advice.memory_p50_bytes, advice.memory_p95_bytes, advice.memory_peak_bytes) == (8 * GB,) * 3


def test_small_gain_is_not_advised(quiet: Recording) -> None:
    advice = advise([quiet], SHARES, WORTH_GPU_SECONDS / 0.4 - 1)
    assert advice is not None
    assert advice.advised_units == advice.units


def test_share_without_room_for_the_sessions_memory_is_not_advised(quiet: Recording) -> None:
    guarantee_is_less, limit_is_less = OtherShare(10, 7 * GB, 80 * GB), OtherShare(25, 20 * GB, 7 * GB)
    advice = advise([quiet], [guarantee_is_less, limit_is_less], MANY_HOURS)
    assert advice is not None
    assert advice.advised_units == 50


def test_larger_share_is_advised_for_the_waiting_that_it_would_have_saved(crowded: Recording) -> None:
    advice = advise([crowded], SHARES, MANY_HOURS)
    assert advice is not None
    assert advice.advised_units in (25, 50)
    assert WORTH_WAITING < advice.saved_seconds < advice.waited_seconds
    recorded = sum(burst.waited_seconds for burst in crowded.own.bursts)
    assert advice.waited_seconds == pytest.approx(recorded)


def test_there_is_no_advice_after_few_bursts_or_against_the_record(quiet: Recording, crowded: Recording) -> None:
    few = replace(quiet, own=replace(quiet.own, bursts=quiet.own.bursts[: FEWEST_BURSTS - 1]))
    # the record shows no neighbour that explains the waits
    unexplained = replace(crowded, neighbours=())
    for wrong in (few, unexplained):
        advice = advise([wrong], SHARES, MANY_HOURS)
        assert advice is not None
        assert advice.advised_units == advice.units
    assert advise([], SHARES, MANY_HOURS) is None
    assert advise([replace(quiet, own=RecordedSession(50, ()))], SHARES, MANY_HOURS) is None


def test_few_long_bursts_are_evidence_too() -> None:
    assert not is_evidence([burst(0.0, 599.0)] * 3)
    assert is_evidence([burst(0.0, 600.0)] * 3)


def burst(at: float, seconds: float = 1.0, contended: float = 0.0) -> Burst:
    return Burst(at + seconds, seconds, seconds, 0.0, contended, GB)


def test_replay_has_the_most_recent_bursts_and_the_neighbours_near_them() -> None:
    own = tuple(burst(1000.0 * number) for number in range(2 * MOST_OWN))
    last = own[-1].began_at
    near, far, old = burst(last + 30.0), burst(last + 500.0), burst(1000.0)
    recent = Recording(GB, RecordedSession(50, own), (RecordedSession(25, (near, far)), RecordedSession(5, (old,))))
    assert recent.recent().own.bursts == own[-MOST_OWN:]
    assert recent.recent().neighbours == (RecordedSession(25, (near,)),)


def test_replay_is_bounded_by_the_contended_time_and_by_the_neighbours_bursts() -> None:
    own = tuple(burst(1000.0 * number, 600.0, contended=600.0) for number in range(100))
    recent = Recording(GB, RecordedSession(50, own), ()).recent()
    assert len(recent.own.bursts) == MOST_CONTENDED / 600.0
    long = (burst(0.0, 100_000.0),)
    many = tuple(burst(2.0 * number) for number in range(2 * MOST_OTHER))
    crowd = Recording(GB, RecordedSession(50, (*many[::4], *long)), (RecordedSession(25, many),)).recent()
    assert sum(len(session.bursts) for session in crowd.neighbours) <= MOST_OTHER
    assert min(burst.ended_at for burst in crowd.own.bursts) >= min(
        burst.ended_at for session in crowd.neighbours for burst in session.bursts
    )


def test_work_that_takes_more_than_thrice_the_time_gives_no_prediction() -> None:
    own = RecordedSession(1, (burst(0.0, 10.0),))
    hog = RecordedSession(100, (Burst(10.0, 10.0, 1e6, 0.0, 0.0, GB),))
    assert waits(Recording(80 * GB, RecordedSession(1, (Burst(10.0, 10.0, 1e4, 0.0, 0.0, GB),)), (hog,)), 1) is None
    alone = waits(Recording(80 * GB, own, ()), 1)
    assert alone is not None
    assert alone == pytest.approx([0.0], abs=0.01)
