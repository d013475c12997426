"""Estimates of waits: by idle actions with a notice and by recent waits; none where nothing is known."""

from __future__ import annotations

import pytest

from benchmarks.ledger_check import check_ledger
from gpushare_spawner.model.share import Share, Tier
from gpushare_spawner.spawner.queue.availability import (
    FEWEST_WAITS,
    RECENT_SECONDS,
    RecentWait,
    WaitEstimates,
    after_idle_actions,
    rounded_minutes,
)
from gpushare_spawner.spawner.queue.queue import LoopBreaks, Ticket

from .machine import Machine

A100 = frozenset({"A100"})


def full_machine() -> Machine:
    machine = Machine()
    machine.hold("a", 100)
    machine.hold("b", 100)
    return machine


def waits(*seconds: float) -> WaitEstimates:
    """Waits for 0.25 GPU that ended at 0."""
    recent = WaitEstimates()
    for each in seconds:
        recent.waits.append(RecentWait(0.0, each, Share(25), A100))
    return recent


def one_pass(machine: Machine, now: float, *tickets: Ticket) -> None:
    placer = machine.placer()
    for ticket in tickets:
        placer.place(ticket)
        ticket.publish(now)


# -- idle actions --


async def test_a_spawn_is_expected_to_start_when_an_idle_session_is_released() -> None:
    machine = full_machine()
    machine.notify("a", Tier.RELEASED, at=300.0)
    ticket = machine.join("ada", 0.5)
    assert await after_idle_actions(machine.check(), machine.queue, LoopBreaks()) == {ticket: 300.0}


async def test_a_downgrade_helps_a_spawn_that_fits_into_what_it_frees_and_no_other() -> None:
    machine = full_machine()
    machine.notify("a", Tier.DOWNGRADED, at=300.0, units=60)
    machine.join("ada", 0.5)
    small = machine.join("bob", 0.25)
    assert await after_idle_actions(machine.check(), machine.queue, LoopBreaks()) == {small: 300.0}


async def test_units_that_one_spawn_is_expected_to_get_are_not_expected_for_the_next() -> None:
    machine = full_machine()
    machine.notify("a", Tier.RELEASED, at=300.0)
    machine.notify("b", Tier.STOPPED, at=200.0)
    first, second, third = (machine.join(name, count=1) for name in ("ada", "bob", "cyd"))
    assert await after_idle_actions(machine.check(), machine.queue, LoopBreaks()) == {first: 200.0, second: 300.0}
    assert third not in await after_idle_actions(machine.check(), machine.queue, LoopBreaks())


async def test_the_ledger_is_as_before_when_the_estimates_are_made() -> None:
    machine = full_machine()
    machine.notify("a", Tier.RELEASED, at=300.0)
    machine.notify("b", Tier.STOPPED, at=300.0)
    machine.join("ada", 0.5)
    machine.join("bob", count=1)
    check = machine.check()
    before = dict(check.ledger.allocations)
    assert len(await after_idle_actions(check, machine.queue, LoopBreaks())) == 2
    assert check.ledger.allocations == before
    assert [check.ledger.free_units(gpu) for gpu in ("GPU-a", "GPU-b")] == [0, 0]
    check_ledger(check.ledger)


async def test_actions_of_sessions_that_hold_nothing_and_upgrades_are_no_help() -> None:
    machine = full_machine()
    machine.notify("c", Tier.RELEASED, at=300.0)
    machine.notify("a", Tier.DOWNGRADED, at=300.0, units=100)
    machine.join("ada", 0.5)
    assert await after_idle_actions(machine.check(), machine.queue, LoopBreaks()) == {}


# -- recent waits --


def test_fewer_waits_than_needed_give_no_estimate() -> None:
    assert waits(*[60.0] * (FEWEST_WAITS - 1)).expected(Share(25), A100, 0, 0.0, 0.0) is None
    assert waits(*[60.0] * FEWEST_WAITS).expected(Share(25), A100, 0, 0.0, 0.0) == (60.0,) * 3


def test_waits_of_other_shares_of_other_models_and_of_long_ago_do_not_count() -> None:
    recent = waits(60.0, 60.0, 60.0)
    assert recent.expected(Share(50), A100, 0, 0.0, 0.0) is None
    assert recent.expected(Share(25), frozenset({"L4"}), 0, 0.0, 0.0) is None
    assert recent.expected(Share(25), A100, 0, 0.0, RECENT_SECONDS + 1) is None


def test_each_spawn_ahead_adds_a_usual_wait() -> None:
    assert waits(50.0, 60.0, 500.0).expected(Share(25), A100, 2, 0.0, 0.0) == (150.0, 180.0, 1500.0)


def test_a_spawn_that_waits_already_is_compared_with_those_that_waited_as_long() -> None:
    recent = waits(10.0, 20.0, 100.0, 120.0, 160.0)
    assert recent.expected(Share(25), A100, 0, 30.0, 0.0) == (70.0, 90.0, 130.0)
    # it waits longer than nearly all others did: nothing is known
    assert recent.expected(Share(25), A100, 0, 110.0, 0.0) is None


async def test_the_time_at_the_head_of_the_queue_is_what_is_remembered() -> None:
    machine, estimates = full_machine(), WaitEstimates()
    for number in range(FEWEST_WAITS):
        first, second = machine.join(f"first-{number}", 0.25), machine.join(f"second-{number}", 0.25)
        one_pass(machine, 1000.0, first, second)
        machine.queue.leave(first)
        one_pass(machine, 1200.0, second)
        estimates.placed(second, machine.check().snapshot, 1260.0)
        machine.queue.leave(second)
    ticket = machine.join("ada", 0.25)
    one_pass(machine, 1300.0, ticket)
    assert await estimates.intervals(machine.check(), machine.queue, 1300.0, 0.0, LoopBreaks()) == {ticket: (0, 1, 1)}
    other = machine.join("bob", 0.5)
    one_pass(machine, 1300.0, ticket, other)
    assert other not in await estimates.intervals(machine.check(), machine.queue, 1300.0, 0.0, LoopBreaks())


async def test_a_spawn_that_was_placed_at_once_says_nothing_of_waits() -> None:
    machine, estimates = Machine(), WaitEstimates()
    for _ in range(FEWEST_WAITS):
        estimates.placed(machine.join("ada", 0.25), machine.check().snapshot, 10.0)
    machine.queue = full_machine().queue
    machine.hold("a", 100)
    machine.hold("b", 100)
    ticket = machine.join("bob", 0.25)
    one_pass(machine, 20.0, ticket)
    assert await estimates.intervals(machine.check(), machine.queue, 20.0, 0.0, LoopBreaks()) == {}


# -- lengths of sessions --


async def test_the_lengths_of_sessions_are_an_interval_for_the_spawn_with_a_hold() -> None:
    machine = Machine()
    machine.expect(100_000.0)
    assert machine.departures is not None
    for minute in range(100):
        machine.departures.lengths.ended("t", 3600.0 + 60 * minute)
    for gpu in ("a", "b"):
        machine.hold(gpu, 100, opened_at=machine.now - 3600.0, template="t")
    first, second = machine.join("ada", 0.5), machine.join("bob", 0.5)
    placer = machine.placer()
    for ticket in (first, second):
        placer.place(ticket)
        await placer.hold(ticket, LoopBreaks())
        ticket.publish(0.0)
    waits = await WaitEstimates().intervals(machine.check(), machine.queue, 0.0, machine.now, LoopBreaks())
    # it ends at any time of the next 100 minutes; nothing is known of the second spawn
    assert waits == {first: (10, 60, 90)}


# -- both --


async def test_the_earlier_of_two_estimates_counts() -> None:
    machine, estimates = full_machine(), WaitEstimates()
    ticket = machine.join("ada", 0.25)
    one_pass(machine, 0.0, ticket)
    machine.notify("a", Tier.RELEASED, at=1000.0)
    assert await estimates.intervals(machine.check(), machine.queue, 0.0, 880.0, LoopBreaks()) == {ticket: (2, 2, 2)}
    for _ in range(FEWEST_WAITS):
        estimates.placed(ticket, machine.check().snapshot, 30.0)
    assert await estimates.intervals(machine.check(), machine.queue, 0.0, 880.0, LoopBreaks()) == {ticket: (0, 1, 1)}


@pytest.mark.parametrize(
    ("seconds", "minutes"), [(-5.0, 1), (0.0, 1), (61.0, 2), (300.0, 5), (301.0, 10), (1900.0, 45), (7300.0, 180)]
)
def test_estimates_are_rounded_up_to_numbers_that_suit_them(seconds: float, minutes: int) -> None:
    assert rounded_minutes(seconds) == minutes


@pytest.mark.parametrize(("seconds", "minutes"), [(59.0, 0), (119.0, 1), (599.0, 5), (2600.0, 30), (7300.0, 120)])
def test_the_earliest_start_is_rounded_down(seconds: float, minutes: int) -> None:
    assert rounded_minutes(seconds, upward=False) == minutes
