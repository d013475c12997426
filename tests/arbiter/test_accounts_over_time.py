"""Accounts over several intervals: what samples correct, what demand is learned, what fades and what is forfeited."""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter.accounting import Accounts, divide
from gpushare_spawner.arbiter.session import ArbiterSettings


class Books(Accounts):
    """Accounts whose sessions all have work, and a clock."""

    def __init__(self, **weights: int) -> None:
        super().__init__(ArbiterSettings())
        self.now = 0.0
        for name, weight in weights.items():
            self.add(name, weight)
            self.work(name, 1.0)

    def run(self, seconds: float, held_back: bool = False, memory_short: bool = False, **processes: int) -> Books:
        self.now += seconds
        self.advance(self.now, seconds, processes, {}, held_back, memory_short)
        return self

    def lags(self, *sessions: str) -> list[float]:
        """As they are booked, without the part of those that have left."""
        return [self._accounts[session].lag for session in sessions]

    def books(self, session: str) -> tuple[float, float]:
        return self.entitled(session), self.delivered(session)


# -- competition -------------------------------------------------------------------------------------------------


def test_one_without_work_whose_process_is_on_the_gpu_competes_like_the_others() -> None:
    books = Books(a=50, b=50)
    books.rest("b")
    books.run(4.0, a=1, b=3)
    assert books.books("a") + books.books("b") == pytest.approx((2.0, 1.0, 2.0, 3.0))


def test_who_has_work_and_no_process_on_the_gpu_is_owed_its_part() -> None:
    books = Books(a=50, b=50).run(4.0, a=1, b=0)
    assert books.books("a") + books.books("b") == pytest.approx((2.0, 4.0, 2.0, 0.0))


def test_the_total_weight_is_that_of_sessions_with_work_as_they_come_go_and_change() -> None:
    books = Books(a=50, b=20)
    assert (books.total_weight, set(books.working)) == (70, {"a", "b"})
    books.rest("b")
    assert (books.total_weight, set(books.working)) == (50, {"a"})
    books.set_weight("a", 60)
    assert books.total_weight == 60
    books.add("c", 5)
    assert (books.total_weight, set(books.working)) == (60, {"a"})
    books.work("c", 1.0)
    books.remove("a")
    assert (books.total_weight, set(books.working)) == (5, {"c"})


def test_what_a_session_that_left_owes_is_borne_by_those_with_work_by_weight() -> None:
    books = Books(a=50, b=30, c=20).run(10.0, a=1)
    assert books.lags("a", "b", "c") == pytest.approx([-5.0, 3.0, 2.0])
    books.rest("a")
    assert [books.lag(name) for name in "bc"] == pytest.approx([0.0, 0.0])
    books.set_weight("c", 70)
    assert [books.lag(name) for name in "bc"] == pytest.approx([1.5, -1.5])


def test_a_request_that_comes_while_the_session_has_work_changes_nothing() -> None:
    books = Books(a=50, b=50).run(4.0, b=1)
    books.work("a", 0.1)
    assert books.lags("a") == [2.0]
    books.rest("a")
    books.rest("a")
    books.run(1.0)  # a pause
    books.work("a", 0.1)
    assert books.lags("a") == [0.1]


@pytest.mark.parametrize(("owed", "order"), [(0.0, ["b", "a"]), (1.0, ["a", "b"])])
def test_virtual_time_goes_by_with_the_service_for_each_unit_of_weight(owed: float, order: list[str]) -> None:
    books = Books(a=10, b=10)
    books.rest("b")
    books.run(5.0, a=1)  # virtual time 0.5
    books.work("b", 0.1 + owed)  # due at 0.51 or 0.61; a renews its request: 0.55
    books._accounts["a"].deadline = 0.55
    assert books.order("ab", dict.fromkeys("ab", 0.5)) == order


def test_a_deadline_counts_from_the_sessions_own_virtual_time() -> None:
    books = Books(a=50, b=50, c=50).run(10.0, b=1)
    books.rest("a")  # it is owed 10/3 s, b owes 20/3, c is owed 10/3
    books.add("d", 50)
    books.work("d", 1.0)
    # those with work owe 10/3 s together, so that each of 150 units is that much behind: d would be served first
    assert books._accounts["d"].deadline == pytest.approx(10 / 150 - 10 / 3 / 150 + 1 / 50)
    books._accounts["d"].deadline = 1.0
    assert books.order("bcd", dict.fromkeys("bcd", 1.0)) == ["c", "d", "b"]
    assert [books.eligible(name) for name in "bcd"] == [False, True, True]


def test_one_that_is_owed_less_than_its_part_of_what_those_that_left_owe_comes_after_the_eligible() -> None:
    books = Books(a=50, b=30, c=20).run(10.0, a=1)
    books.rest("a")  # it owes 5 s, b is owed 3 and c 2
    books.set_weight("c", 70)  # and bears 3.5 of the 5 s
    books._accounts["b"].deadline, books._accounts["c"].deadline = 2.0, 1.0
    assert books.order("bc", dict.fromkeys("bc", 1.0)) == ["b", "c"]


def test_where_nobody_has_work_nobody_owes_anybody() -> None:
    books = Accounts(ArbiterSettings())
    assert books.total_weight == 0
    books.advance(5.0, 5.0, {}, {})
    assert books._clock == 0.0
    books.add("a", 50)
    assert (books.total_weight, books.lag("a"), books.working) == (0, 0.0, frozenset())


def test_time_without_service_is_no_virtual_time() -> None:
    books = Books(a=10, b=10).run(5.0)
    assert books._clock == 0.0
    books.run(5.0, a=1)
    assert books._clock == pytest.approx(0.25)


# -- samples of the driver ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("later", "corrected"), [(2.9, True), (3.1, False)])
def test_a_sample_corrects_what_is_no_more_than_three_seconds_past(later: float, corrected: bool) -> None:
    books = Books(a=50, b=50).run(1.0, a=1, b=1).run(later, a=1, b=1)
    books.sample(0.0, 1.0, {"a": 0.9, "b": 0.1})
    assert books.lags("a", "b") == pytest.approx([-0.4, 0.4] if corrected else [0.0, 0.0], abs=1e-6)


def test_of_a_sample_that_covers_time_alone_the_part_with_competition_counts() -> None:
    books = Books(a=50, b=50)
    books.rest("b")
    books.run(1.0, a=1)
    books.work("b", 1.0)
    books.run(1.0, a=1, b=1)
    books.sample(0.0, 2.0, {"a": 1.6, "b": 0.4})
    # a had 0.1 s more than was taken to be, and half of it counts
    assert books.lags("a", "b") == pytest.approx([-0.05, 0.05])
    assert books.books("a") == pytest.approx((0.5, 0.55))


def test_time_that_is_more_than_was_taken_to_be_is_divided_like_all_other_time() -> None:
    books = Books(a=30, b=10).run(2.0, a=1, b=1)
    books.sample(0.0, 2.0, {"a": 1.4})  # b is not shown: it keeps its estimate of 1 s, and 0.4 s are left to divide
    assert books.books("a") == pytest.approx((1.5 + 0.3, 1.4))
    assert books.books("b") == pytest.approx((0.5 + 0.1, 1.0))
    assert books.lags("a", "b") == pytest.approx([0.4, -0.4])


def test_a_sample_of_an_idle_gpu_takes_back_what_was_booked_for_its_interval_and_nothing_else() -> None:
    books = Books(a=50, b=50).run(1.0, b=1).run(1.0, a=1, b=1)
    books.sample(1.0, 2.0, {"a": 0.2, "b": 0.3})
    assert books.lags("a", "b") == pytest.approx([0.5, -0.5])
    assert books.books("a") + books.books("b") == pytest.approx((0.5 + 0.2, 0.2, 0.5 + 0.3, 1.3))
    books.run(1.0, a=1)
    assert books.lags("a") == pytest.approx([0.5 + books.parts("ab")["a"] - 1.0])


def test_sessions_that_left_before_the_sample_came_are_of_no_account() -> None:
    books = Books(a=50, b=25, c=25).run(1.0, a=1, b=1, c=1)
    books.remove("c")
    books.sample(0.0, 1.0, {"a": 0.6, "c": 0.4})
    more = 0.6 - 1 / 3  # a had so much more than was taken to be, and two thirds of it by right
    assert books.lags("a", "b") == pytest.approx([0.5 - 1 / 3 - more / 3, 0.25 - 1 / 3 + more / 3])


@pytest.mark.parametrize(("others", "saturated"), [(1, False), (3, True)])
def test_of_sessions_that_the_driver_does_not_show_the_estimate_counts_for_the_load(
    others: int, saturated: bool
) -> None:
    books = Books(a=50, b=50).run(1.0, a=1, b=others)
    books.sample(0.0, 1.0, {"a": 0.2})
    assert books.saturated is saturated


def test_of_an_interval_that_is_corrected_in_pieces_each_piece_is_corrected_by_its_part() -> None:
    books = Books(a=50, b=50).run(3.0).run(4.0, a=1, b=1)
    books.sample(3.0, 4.0, {"a": 0.5, "b": 0.5})
    books.sample(4.0, 7.0, {"a": 0.3, "b": 0.6})  # idle: what was booked for three seconds is taken back
    assert books.lags("a", "b") == pytest.approx([0.0, 0.0])
    assert books.books("a") + books.books("b") == pytest.approx((0.8, 0.8, 1.1, 1.1))


def test_a_sample_of_a_part_of_an_interval_tells_the_demand_in_that_part() -> None:
    books = Books(a=50, b=50).run(2.0, a=1, b=1)
    books.sample(0.0, 1.0, {"a": 0.3, "b": 0.2})
    assert [books._accounts[name].demand for name in "ab"] == pytest.approx([0.3, 0.2])


def test_on_an_idle_gpu_one_that_the_driver_does_not_show_had_what_was_taken_to_be_and_a_stranger_what_it_shows() -> (
    None
):
    books = Books(a=50, b=50, c=50)
    books.rest("c")
    books.run(1.0, a=1).sample(0.0, 1.0, {"a": 0.3, "c": 0.1})
    assert books.saturated is False
    assert books.lags("a", "b", "c") == pytest.approx([0.0, 0.0, 0.0])
    assert books.books("a") + books.books("b") + books.books("c") == pytest.approx((0.3, 0.3, 0.0, 0.0, 0.1, 0.1))


def test_alone_a_session_makes_the_gpu_count_as_saturated_again() -> None:
    books = Books(a=50, b=50).run(1.0, a=1, b=1)
    books.sample(0.0, 1.0, {"a": 0.2, "b": 0.2})
    assert books.saturated is False
    books.rest("b")
    books.run(1.0, a=1)
    assert books.saturated is True


# -- demand ------------------------------------------------------------------------------------------------------


def test_a_session_that_comes_to_an_idle_gpu_saturates_it_by_what_it_is_known_to_want() -> None:
    books = Books(a=50, b=50).run(1.0, a=1, b=1)
    books.sample(0.0, 1.0, {"a": 0.4, "b": 0.3})
    books.rest("b")
    books.work("b", 1.0)
    assert books.saturated is False
    books.add("c", 50)
    books.work("c", 1.0)
    assert books.saturated is True


@pytest.mark.parametrize(("used", "demand"), [(0.36, 0.86), (0.46, 1.0), (0.5, 1.0)])
def test_on_a_saturated_gpu_demand_falls_by_half_and_one_that_uses_nine_tenths_may_want_all(
    used: float, demand: float
) -> None:
    books = Books(a=50, b=50).run(1.0, a=1, b=1)
    books.sample(0.0, 1.0, {"a": used, "b": 1.0 - used})
    assert books._accounts["a"].demand == pytest.approx(demand)
    assert books._accounts["b"].demand == 1.0


def test_demand_rises_at_once() -> None:
    books = Books(a=50, b=50).run(1.0, a=1, b=1)
    books.sample(0.0, 1.0, {"a": 0.1, "b": 0.2})
    assert books._accounts["a"].demand == pytest.approx(0.1)
    books.run(1.0, a=1, b=1)
    books.sample(1.0, 2.0, {"a": 0.4, "b": 0.55})
    # a can use 14.5 % and b the rest by its weight, so that even slices are 0.5 s each for both
    assert books._accounts["a"].demand == pytest.approx(0.8)
    assert books._accounts["b"].demand == 1.0


@pytest.mark.parametrize(("ran", "demand"), [(0.019, 1.0), (0.021, 0.0)])
def test_a_session_that_could_hardly_run_tells_nothing_of_its_demand(ran: float, demand: float) -> None:
    books = Books(a=50, b=50).run(ran, a=1).run(1.0 - ran, b=1)
    books.sample(0.0, 1.0, {"a": 0.0, "b": 0.3})
    assert books._accounts["a"].demand == demand


@pytest.mark.parametrize(("held_back", "demands"), [(0.08, (0.5, 0.2)), (0.12, (0.75, 0.6))])
def test_an_idle_gpu_tells_demands_at_once_unless_somebody_was_held_back_for_a_twentieth_of_the_time(
    held_back: float, demands: tuple[float, float]
) -> None:
    books = Books(a=50, b=50).run(2.0 - held_back, a=1, b=1).run(held_back, held_back=True, a=1)
    books.sample(0.0, 2.0, {"a": 1.0, "b": 0.2 * (2.0 - held_back)})
    assert [books._accounts[name].demand for name in "ab"] == pytest.approx(demands)


def test_where_somebody_was_held_back_even_for_a_moment_time_is_owed_on_an_idle_gpu() -> None:
    books = Books(a=50, b=50).run(0.96, a=1, b=1).run(0.04, held_back=True, a=1)
    books.sample(0.0, 1.0, {"a": 0.5, "b": 0.3})
    assert books.saturated is False
    assert books.lags("a", "b") == pytest.approx([-0.1, 0.1])


def test_no_demand_is_more_than_the_whole_gpu() -> None:
    books = Books(a=50, b=50).run(0.4, a=1).run(0.6, b=1)
    books.sample(0.0, 1.0, {"a": 0.5, "b": 0.2})
    assert books._accounts["a"].demand == 1.0


def test_a_sample_of_time_in_which_memory_was_short_tells_that_each_may_want_all() -> None:
    books = Books(a=50, b=50).run(1.0, a=1, b=1)
    books.sample(0.0, 1.0, {"a": 0.1, "b": 0.1})
    books.run(1.0, memory_short=True, a=1)
    books.sample(1.0, 2.0, {"a": 0.1})
    assert [books._accounts[name].demand for name in "ab"] == pytest.approx([1.0, 0.1])


@pytest.mark.parametrize("memory_short", [True, False])
def test_a_session_that_keeps_others_out_of_the_memory_owes_the_time_in_which_the_gpu_is_idle(
    memory_short: bool,
) -> None:
    """Nor does it look as if it had received less than it was entitled to: it could not use more."""
    books = Books(a=50, b=50).run(1.0, held_back=True, memory_short=memory_short, a=1)
    books.sample(0.0, 1.0, {"a": 0.2, "b": 0.0})
    assert books.lags("a", "b") == pytest.approx([-0.5, 0.5] if memory_short else [-0.1, 0.1])
    assert books.books("a") == pytest.approx((-0.3, 0.2) if memory_short else (0.1, 0.2))
    assert books.books("b") == pytest.approx((0.5, 0.0) if memory_short else (0.1, 0.0))


def test_sessions_that_are_on_the_gpu_together_divide_the_idle_time_by_the_time_that_each_was_there() -> None:
    books = Books(a=50, b=25, c=25).run(1.0, memory_short=True, a=1).run(1.0, memory_short=True, a=1, b=1)
    books.sample(0.0, 2.0, {"a": 0.7, "b": 0.1, "c": 0.0})
    # of two seconds 1.2 are nobody's: 1.5 to 0.5 were a's and b's
    assert books.lags("a", "b", "c") == pytest.approx([1.0 - 0.7 - 0.9, 0.5 - 0.1 - 0.3, 0.5])


def test_idle_time_is_charged_only_for_the_part_in_which_memory_was_short() -> None:
    books = Books(a=50, b=50).run(1.0, a=1, b=1).run(1.0, memory_short=True, a=1)
    books.sample(0.0, 2.0, {"a": 0.4, "b": 0.2})
    # 0.7 of the 1.4 idle seconds: 1.5 to 0.5 of the two seconds were a's and b's
    assert books.lags("a", "b") == pytest.approx([0.65 - 0.4 - 0.7 * 0.75, 0.65 - 0.2 - 0.7 * 0.25])


def test_work_without_a_lease_is_no_idle_time_of_the_one_that_has_it() -> None:
    books = Books(a=50, b=50).run(1.0, memory_short=True, a=1)
    books.sample(0.0, 1.0, {"a": 0.5, "b": 0.5})
    assert books.lags("a", "b") == pytest.approx([0.0, 0.0])


# -- what fades, is bounded and is forfeited ---------------------------------------------------------------------


def test_a_debt_of_one_that_is_away_shrinks_as_if_it_waited_by_its_weight() -> None:
    books = Books(a=25, b=75).run(4.0, a=1)
    assert books.lags("a", "b") == pytest.approx([-3.0, 3.0])
    books.rest("a")
    books.run(30.0, b=1)
    assert books.lags("a", "b") == pytest.approx([-3.0, 3.0]), "both stay for 30 s"
    books.run(2.0, b=1)
    assert books.lags("a", "b") == pytest.approx([-3.0 + 2.0 * 25 / 100, 1.0])
    books.run(2.0)
    assert books.lags("a") == pytest.approx([-2.5]), "nobody was served"
    books.run(100.0, b=1)
    assert books.lags("a") == [0.0]


def test_what_one_that_is_away_is_owed_stays_while_others_compete_and_fades_when_nobody_is_there() -> None:
    books = Books(a=50, b=25, c=25).run(4.0, b=1, c=1)
    books.rest("a")
    books.run(4.0, b=1, c=1)
    assert books.lags("a") == pytest.approx([2.0])
    books.rest("b")
    books.rest("c")
    books.run(26.0)
    assert books.lags("a", "b", "c") == pytest.approx([2.0, -1.0, -1.0]), "nobody has been away for longer than 30 s"
    books.run(4.5)
    assert books.lags("a", "b", "c") == pytest.approx([0.0, -0.5, -0.5])


def test_a_debt_is_bounded_by_300_s_with_everybody_at_work_and_so_is_what_is_owed() -> None:
    books = Books(a=10, b=30).run(1e6, a=1)
    assert books.lags("a", "b") == pytest.approx([-75.0, 225.0])
    books.rest("a")
    books.rest("b")
    books.add("c", 40)
    books.work("c", 1.0)
    books.work("b", 1e6)
    books.run(0.001, b=1, c=1)
    assert books.lags("b")[0] == pytest.approx(300 * 30 / 70)


def test_a_debt_of_exactly_a_second_fades_like_any_other() -> None:
    books = Books(a=50, b=50).run(2.0, b=1)
    books.rest("b")
    books.run(30.25, a=1)
    assert books.lags("a") == [0.75]


def idle_gpu_with_one_held_back(used: float, owed: float, quiet: str = "") -> Books:
    """a is owed, c and b owe in proportion to their weights. Over the next second b is held back for 0.2 s; a could
    have had 0.6 s and uses `used`, b uses 0.4 s, and c has no process there."""
    books = Books(a=50, b=30, c=20)
    if owed > 0:
        books.run(2 * owed / 5, b=3).run(2 * owed / 5 * 2 / 3, c=2)
    elif owed < 0:
        books.run(-2 * owed, a=1)
    books._accounts["a"].lag, books._accounts["b"].lag, books._accounts["c"].lag = owed, -0.6 * owed, -0.4 * owed
    books._sums = None
    if quiet:
        books.rest(quiet)
    start = books.now
    books.run(0.8, a=1, b=1).run(0.2, held_back=True, a=1)
    books.sample(start, books.now, {"a": used, "b": 0.4, "c": 0.0})
    return books


@pytest.mark.parametrize("owed", [0.2, 1.0])
def test_one_that_lets_the_gpu_stand_idle_while_others_are_held_back_for_it_is_owed_nothing(owed: float) -> None:
    books = idle_gpu_with_one_held_back(used=0.1, owed=owed)
    assert books.saturated is True
    assert [books.lag(name) for name in "abc"] == pytest.approx([0.0, *(books.lag(name) for name in "bc")])
    assert books.lag("b") + books.lag("c") == pytest.approx(0.0)
    assert books.lag("b") == pytest.approx(-0.6 * owed + (0.5 * 0.3 - 0.4) + 0.6 * (owed + 0.5 * 0.5 - 0.1))


def test_what_one_forfeits_that_has_become_quiet_meanwhile_is_divided_among_those_with_work() -> None:
    books = idle_gpu_with_one_held_back(used=0.1, owed=1.0, quiet="a")
    assert books.lag("b") + books.lag("c") == pytest.approx(0.0)


@pytest.mark.parametrize(("used", "forfeits"), [(0.27, True), (0.29, False)])
def test_who_used_half_of_its_slices_less_a_moment_wanted_them(used: float, forfeits: bool) -> None:
    books = idle_gpu_with_one_held_back(used, owed=1.0)
    load = used + 0.4
    assert books.lag("a") == pytest.approx(0.0 if forfeits else 1.0 + 0.5 * load - used)


def test_one_that_owes_still_owes_when_it_lets_the_gpu_stand_idle() -> None:
    books = idle_gpu_with_one_held_back(used=0.1, owed=-2.0)
    assert books.lag("a") == pytest.approx(-2.0 + 0.5 * 0.5 - 0.1)


# -- division ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "limits", "parts"),
    [
        ((50, 30, 20), (0.1, 0.4, 1.0), (0.1, 0.4, 0.5)),  # b reaches its limit only with what a leaves
        ((50, 30, 20), (0.5, 1.0, 1.0), (0.5, 0.3, 0.2)),
        ((60, 40), (0.3, 0.3), (0.3 + 0.4 * 0.6, 0.3 + 0.4 * 0.4)),  # together they can use less than all
        ((1, 1, 2), (0.25, 0.25, 0.5), (0.25, 0.25, 0.5)),
        ((1, 1), (0.2, 0.8), (0.2, 0.8)),
        ((7,), (0.1,), (1.0,)),
        ((1, 1), (0.5 + 1e-10, 0.5), (0.5, 0.5)),
        ((1, 1), (0.5 - 4e-10, 0.5), (0.5, 0.5)),
    ],
)
def test_one_is_divided_by_weight_up_to_the_limits(
    weights: tuple[int, ...], limits: tuple[float, ...], parts: tuple[float, ...]
) -> None:
    names = "abc"[: len(weights)]
    divided = divide(dict(zip(names, weights, strict=True)), dict(zip(names, limits, strict=True)))
    assert divided == pytest.approx(dict(zip(names, parts, strict=True)))
    assert sum(divided.values()) == pytest.approx(1.0, abs=1e-12)
