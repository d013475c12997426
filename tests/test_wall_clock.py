"""A clock that is set, and instants of before."""

from __future__ import annotations

import pytest

from gpushare_spawner.clocks import STEP, WallClock

DAY = 86400.0
NOON = 1_000_000_000.0


class Machine:
    def __init__(self) -> None:
        self.wall, self.steady = NOON, 50.0
        self.steps: list[float] = []
        self.clock = WallClock(lambda: self.wall, lambda: self.steady)
        self.clock.was_set = self.steps.append

    def passes(self, seconds: float, set_by: float = 0.0) -> None:
        self.steady += seconds
        self.wall += seconds + set_by


@pytest.mark.parametrize("by", [DAY, -DAY, STEP, -STEP])
def test_a_step_is_told_once(by: float) -> None:
    machine = Machine()
    machine.passes(3600)
    assert machine.clock() == NOON + 3600
    machine.passes(10, set_by=by)
    assert machine.clock() == NOON + 3610 + by
    assert machine.clock() == NOON + 3610 + by
    assert machine.steps == pytest.approx([by])


def test_a_clock_that_runs_too_fast_makes_no_step() -> None:
    machine = Machine()
    for _ in range(1000):
        machine.passes(60, set_by=0.03)  # 500 ppm, the most that NTP corrects without a step
        machine.clock()
    assert machine.steps == []


@pytest.mark.parametrize("by", [DAY, -DAY])
def test_an_instant_of_before_a_step_keeps_its_age_and_one_after_it_too(by: float) -> None:
    machine = Machine()
    machine.passes(3600)
    written = machine.clock() - 60
    machine.passes(5, set_by=by)
    assert machine.clock() - machine.clock.since_set(written) == pytest.approx(65)
    machine.passes(100)
    assert machine.clock() - machine.clock.since_set(written) == pytest.approx(165)
    later = machine.clock()
    machine.passes(30)
    assert machine.clock() - machine.clock.since_set(later) == pytest.approx(30)


def test_steps_that_undo_each_other_leave_instants_as_they_were() -> None:
    for by in (DAY, -DAY):
        machine = Machine()
        written = machine.clock() - 60
        machine.passes(1, set_by=by)
        machine.clock()
        machine.passes(1, set_by=-by)
        assert machine.clock() - machine.clock.since_set(written) == pytest.approx(62)
