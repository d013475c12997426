"""Nested sets, figure by figure: who is held back, until when, and what an overrun changes."""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter.accounting import Accounts
from gpushare_spawner.arbiter.nested_sets import NestedSets
from gpushare_spawner.arbiter.session import ArbiterSettings


class Sets:
    """Nested sets over sessions with work, and the clock of both. Periods last 0.2 s."""

    def __init__(self, **weights: int) -> None:
        self.accounts = Accounts(ArbiterSettings())
        self.nested = NestedSets(self.accounts, ArbiterSettings())
        self.now = 0.0
        for session, weight in weights.items():
            self.accounts.add(session, weight)
            self.accounts.work(session, 0.2)

    def run(self, seconds: float, **processes: int) -> None:
        self.now += seconds
        self.accounts.advance(self.now, seconds, processes, {})

    def held_back(self, alternating: str | None = None, **processes: int) -> str:
        takers = None if alternating is None else frozenset(alternating)
        return "".join(sorted(self.nested.held_back(self.now, processes, takers)))


def test_all_run_until_the_light_ones_had_their_parts_and_then_the_heavy_one_runs_to_the_end_of_the_period() -> None:
    sets = Sets(a=50, b=10, c=10)
    assert sets.held_back(a=1, b=1, c=1) == ""
    assert sets.nested.due == pytest.approx(3 * 0.2 / 7)
    sets.run(3 * 0.2 / 7, a=1, b=1, c=1)
    assert sets.held_back(a=1, b=1, c=1) == "bc"
    assert sets.nested.due == pytest.approx(0.2)
    sets.run(0.2 - sets.now, a=1)
    assert sets.held_back(a=1, b=1, c=1) == ""
    assert sets.nested.due == pytest.approx(0.2 + 3 * 0.2 / 7)


def test_a_session_with_two_processes_reaches_its_part_twice_as_fast() -> None:
    sets = Sets(a=80, b=20)
    assert sets.held_back(a=1, b=2) == ""
    assert sets.nested.due == pytest.approx(0.2 * 0.2 / 2 * 3)


def test_the_first_that_has_had_its_part_decides_when_the_sets_change() -> None:
    sets = Sets(a=50, b=10, c=20)
    assert sets.held_back(a=1, b=1, c=1) == ""
    assert sets.nested.due == pytest.approx(3 * 0.2 / 8)


def test_a_light_session_with_many_processes_has_had_its_part_before_a_heavy_one_with_one() -> None:
    sets = Sets(a=60, b=40)
    assert sets.held_back(a=1, b=3) == ""
    assert sets.nested.due == pytest.approx(0.08 / 3 * 4)
    sets.run(0.12, a=1, b=3)
    assert sets.held_back(a=1, b=3) == "b"


def test_the_sets_change_no_sooner_than_in_a_millisecond() -> None:
    sets = Sets(a=80, b=20)
    assert sets.held_back(a=1, b=1) == ""
    sets.run(0.0799, a=1, b=1)  # b has 50 us of its 40 ms left
    assert sets.held_back(a=1, b=1) == ""
    assert sets.nested.due == pytest.approx(sets.now + 0.001)


def test_what_a_session_that_is_not_there_is_owed_is_owed_by_all_who_are_there() -> None:
    sets = Sets(a=60, b=40, c=50)
    sets.run(3.0, a=6, b=4)  # c should have had a second
    assert sets.accounts.lag("c") == pytest.approx(1.0)
    assert sets.held_back(a=1, b=1) == ""
    assert sets.nested.due == pytest.approx(sets.now + 2 * 0.08)


@pytest.mark.parametrize(
    ("weights", "processes"),
    [
        ({"a": 30, "b": 30}, {"a": 1, "b": 1}),
        ({"a": 30, "b": 30}, {"a": 2, "b": 2}),
        ({"a": 60, "b": 30}, {"a": 2, "b": 1}),
        ({"a": 70, "b": 10, "c": 20}, {"a": 7, "b": 1, "c": 2}),
    ],
)
def test_where_even_slices_are_right_nothing_is_ever_due(weights: dict[str, int], processes: dict[str, int]) -> None:
    sets = Sets(**weights)
    assert sets.held_back(**processes) == ""  # type: ignore[arg-type]
    assert sets.nested.due is None


@pytest.mark.parametrize(("instant", "held_back"), [(0.18, "b"), (0.184, "b"), (0.187, ""), (0.19, "")])
def test_nobody_is_held_back_for_less_than_15_ms(instant: float, held_back: str) -> None:
    sets = Sets(a=60, b=40)
    sets.held_back(a=1, b=1)
    sets.run(instant, a=1, b=1)
    assert sets.held_back(a=1, b=1) == held_back
    assert sets.nested.due == pytest.approx(0.2)


def test_one_that_was_held_back_is_let_in_for_no_less_than_10_ms_of_gpu_time() -> None:
    sets = Sets(a=96, b=4)
    assert sets.held_back(a=1, b=1) == ""
    sets.run(0.016, a=1, b=1)
    assert sets.held_back(a=1, b=1) == "b"
    sets.run(0.2 - 0.016, a=1)
    assert sets.held_back(a=1, b=1) == "b", "it is owed 8 ms in this period"
    sets.run(0.2, a=1)
    assert sets.held_back(a=1, b=1) == "", "it is owed 16 ms"


def test_the_one_that_needs_most_is_never_held_back_not_even_if_it_was_a_moment_ago() -> None:
    sets = Sets(a=90, b=10)
    sets.held_back(a=1, b=1)
    sets.run(0.04, a=1, b=1)
    assert sets.held_back(a=1, b=1) == "b"
    sets.run(3.0, a=1)  # much more than its part
    assert sets.held_back(a=1, b=1) == "a"


def test_nobody_is_held_back_alone_or_on_a_gpu_that_is_not_saturated() -> None:
    sets = Sets(a=90, b=10)
    sets.run(0.5, b=1)
    assert sets.held_back(b=1) == ""
    assert sets.nested.due is None
    assert sets.held_back(a=1, b=1) == "b"
    sets.accounts.saturated = False
    assert sets.held_back(a=1, b=1) == ""
    assert sets.nested.due is None


def test_half_of_the_typical_overrun_is_taken_off_the_part() -> None:
    sets = Sets(a=60, b=40)
    for overrun in (0.02, 0.015):
        sets.nested.stopped("b")
        sets.run(2 * overrun, a=1, b=1)
        sets.nested.drained("b")
    # averages: 10 ms after the first, 12.5 ms after the second; in 70 ms it had 7 ms more than its part
    assert sets.held_back(a=1, b=1) == ""
    assert sets.nested.due == pytest.approx(sets.now + 2 * (0.08 - 0.007 - 0.0125 / 2))
    sets.nested.drained("b")  # nobody told it to stop since
    assert sets.held_back(a=1, b=1) == ""
    assert sets.nested.due == pytest.approx(sets.now + 2 * (0.08 - 0.007 - 0.0125 / 2))


@pytest.mark.parametrize(("overrun", "patience"), [(0.08, 0.01), (0.4, 0.05), (4.0, 0.05)])
def test_a_quiet_holder_has_a_quarter_of_what_those_held_back_overrun_at_most_50_ms(
    overrun: float, patience: float
) -> None:
    sets = Sets(a=50, b=50)
    sets.nested.stopped("b")
    sets.run(2 * overrun, a=1, b=1)
    sets.nested.drained("b")  # half of it is the average
    assert sets.nested.patience == 0, "nobody is held back"
    sets.run(1.0, b=1)
    assert sets.held_back(a=1, b=1) == "b"
    assert sets.nested.patience == pytest.approx(patience)
    sets.nested.forget("b")
    assert sets.nested.patience == 0


def test_a_quiet_holder_has_a_quarter_of_the_longest_overrun_of_those_held_back_now() -> None:
    sets = Sets(a=80, b=10, c=10)
    for name, overrun in (("b", 0.08), ("c", 0.16)):
        sets.nested.stopped(name)
        sets.run(3 * overrun, a=1, b=1, c=1)
        sets.nested.drained(name)  # half of it is the average
    assert sets.held_back(a=1, b=1, c=1) == "bc"
    assert sets.nested.patience == pytest.approx(0.02)
    assert sets.held_back(a=1, b=1) == "b", "c has no work any more"
    assert sets.nested.patience == pytest.approx(0.01)
    assert sets.held_back(b=1) == "", "b is alone"
    assert sets.nested.patience == 0


def test_an_overrun_of_minutes_counts_as_10_s() -> None:
    sets = Sets(a=50, b=50)
    sets.nested.stopped("b")
    sets.run(200.0, a=1, b=1)
    sets.nested.drained("b")
    # 5 s are typical now, and half of that is taken off its part
    sets.run(2.4, a=1)
    assert sets.held_back(a=1, b=1) == "b", "it is owed 1.2 s, which the other owes"
    sets.run(0.2, a=1)
    assert sets.held_back(a=1, b=1) == "a", "it is owed 1.3 s, which the other owes"


def test_in_a_time_slice_those_who_take_turns_divide_what_the_session_beside_them_leaves() -> None:
    sets = Sets(a=60, b=20, c=20)
    assert sets.held_back("b", a=1, b=1) == ""
    assert sets.nested.due == pytest.approx(2 * 0.08)
    sets.run(0.16, a=1, b=1)
    assert sets.held_back("b", a=1, b=1) == "b", "it had 80 ms of 200: all that is left beside 60 %"
    sets.run(0.04, a=1)
    assert sets.held_back("b", a=1, b=1) == ""
    assert sets.nested.due == pytest.approx(0.2 + 2 * 0.08)


def test_in_a_time_slice_even_slices_that_are_right_now_are_looked_at_again_in_the_next_period() -> None:
    sets = Sets(a=50, b=25, c=25)
    assert sets.held_back("b", a=1, b=1) == ""
    assert sets.nested.due == pytest.approx(0.2)


def test_in_a_time_slice_a_debt_of_the_session_beside_it_counts_with_one_period_at_most() -> None:
    sets = Sets(a=60, b=20, c=20)
    sets.run(10.0, a=1)
    assert sets.held_back("b", a=1, b=1) == "a"
    sets.run(0.2, b=1)
    assert sets.held_back("b", a=1, b=1) == "a"
