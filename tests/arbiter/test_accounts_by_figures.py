"""Accounts, figure by figure: deadlines, samples that come in pieces, and what fades."""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter.accounting import Accounts
from gpushare_spawner.arbiter.session import ArbiterSettings


def accounts(**weights: int) -> Accounts:
    """Sessions without work."""
    made = Accounts(ArbiterSettings())
    for session, weight in weights.items():
        made.add(session, weight)
    return made


def test_a_request_is_due_after_its_seconds_divided_by_the_weight() -> None:
    books = accounts(a=10, b=20, c=10)
    books.work("a", 1.0)  # due at 0.1 in virtual time
    books.work("b", 1.0)  # 0.05
    books.work("c", 0.2)  # 0.02
    assert books.order("abc", {"a": 0.001, "b": 10.0, "c": 3.0}) == ["c", "b", "a"]


def test_a_request_that_was_served_is_renewed_and_one_that_was_not_keeps_its_deadline() -> None:
    books = accounts(a=10, b=40)
    books.work("a", 0.0001)
    books.work("b", 0.01)
    assert books.order("ab", {}) == ["a", "b"]
    slices = {"a": 1, "b": 4}  # to each its part, so nobody is owed anything
    books.advance(1.0, 1.0, slices, {})  # virtual time 0.02: both are served
    assert books.order("ab", {"a": 1.0, "b": 2.0}) == ["b", "a"]  # due at 0.12 and at 0.07
    books.advance(2.0, 1.0, slices, {})
    assert books.order("ab", {"a": 0.001, "b": 100.0}) == ["b", "a"]
    for second in (3.0, 4.0, 5.0):
        books.advance(second, 1.0, slices, {})  # up to 0.1: b is served, a is not
    assert books.order("ab", {"a": 0.001, "b": 100.0}) == ["a", "b"]


@pytest.mark.parametrize(("request_of_c", "order"), [(0.8, ["b", "c", "a"]), (0.2, ["c", "b", "a"])])
def test_one_that_is_owed_time_has_an_earlier_deadline_and_a_debtor_comes_last(
    request_of_c: float, order: list[str]
) -> None:
    books = accounts(a=10, b=10, c=10)
    books.work("a", 1.0)
    books.work("b", 1.0)
    books.advance(1.0, 1.0, {"a": 1}, {})  # a owes half a second to b: virtual time 0.05, and 0 for b
    for session in "ab":
        books.rest(session)
        books.work(session, 1.0)
    books.work("c", request_of_c)
    assert books.lag("b") == pytest.approx(0.5)
    assert books.order("abc", dict.fromkeys("abc", 1.0)) == order
    assert [books.eligible(session) for session in "abc"] == [False, True, True]


def test_all_is_taken_to_be_wanted_and_nothing_to_be_measured_before_the_first_sample() -> None:
    books = accounts(a=10)
    assert books.saturated is True
    assert not books.measured("a", 0.0)


def test_a_measurement_is_of_use_for_three_seconds() -> None:
    books = accounts(a=10, b=10)
    books.sample(9.0, 10.0, {"a": 0.5})
    assert books.measured("a", 10.0)
    assert books.measured("a", 12.9)
    assert not books.measured("a", 13.0)
    assert not books.measured("b", 10.0)


def test_time_in_which_nobody_is_on_the_gpu_is_owed_to_nobody() -> None:
    books = accounts(a=75, b=25)
    books.work("a", 1.0)
    books.work("b", 1.0)
    books.advance(5.0, 5.0, {}, {})
    for session in "ab":
        assert books.lag(session) == books.entitled(session) == books.received(session) == 0.0
    books.advance(7.0, 2.0, {"a": 1, "b": 1}, {})
    books.advance(8.0, 1.0, {"b": 1}, {})
    assert (books.received("a"), books.received("b")) == pytest.approx((1.0, 2.0))
    assert (books.entitled("a"), books.entitled("b")) == pytest.approx((2.25, 0.75))


def test_a_sample_of_time_without_competition_changes_no_lag() -> None:
    books = accounts(a=10, b=10)
    books.work("a", 1.0)
    books.advance(1.0, 1.0, {"a": 1}, {})
    books.sample(0.0, 1.0, {"a": 0.99})
    books.work("b", 1.0)
    assert (books.lag("a"), books.lag("b")) == (0.0, 0.0)
    assert books.delivered("a") == books.entitled("a") == 0.0


def test_samples_of_parts_of_an_interval_add_up_to_the_truth() -> None:
    """The estimate is 2 s for each of four; the driver tells of one second, and then of the other three."""
    books = accounts(a=50, b=50)
    books.work("a", 1.0)
    books.work("b", 1.0)
    books.advance(4.0, 4.0, {"a": 1, "b": 1}, {})
    books.sample(2.0, 2.0, {"a": 9.0})  # of no time at all: nothing
    books.sample(0.0, 1.0, {"a": 1.0, "b": 0.0})
    assert books.lag("a") == pytest.approx(-0.5)
    books.sample(1.0, 4.0, {"a": 0.0, "b": 3.0})
    assert (books.lag("a"), books.lag("b")) == pytest.approx((1.0, -1.0))
    assert (books.delivered("a"), books.delivered("b")) == pytest.approx((1.0, 3.0))
    assert (books.entitled("a"), books.entitled("b")) == pytest.approx((2.0, 2.0))


def test_a_sample_of_an_idle_gpu_leaves_the_only_session_with_work_owed_nothing() -> None:
    books = accounts(a=50, b=50)
    books.work("a", 1.0)
    books.work("b", 1.0)
    books.advance(1.0, 1.0, {"a": 2, "b": 1}, {})
    books.rest("b")
    assert books.lag("a") == pytest.approx(0.0)
    books.sample(0.0, 1.0, {"a": 0.3, "b": 0.1})
    assert books.lag("a") == pytest.approx(0.0)


def test_a_session_whose_return_makes_demands_reach_92_percent_saturates_the_gpu() -> None:
    books = accounts(a=50, b=50, c=50)
    for second, (first, other) in enumerate((("a", "b"), ("c", "b"))):
        books.work(first, 1.0)
        books.work("b", 1.0)
        books.advance(second + 1.0, 1.0, {first: 1, other: 1}, {})
        books.sample(second, second + 1.0, {first: 0.46, other: 0.2})
        books.rest("b")
        if first == "a":
            books.rest("a")
    assert books.saturated is False
    books.work("a", 1.0)
    assert books.saturated is True


def test_a_sample_corrects_an_interval_that_ended_three_seconds_ago() -> None:
    books = accounts(a=50, b=50)
    books.work("a", 1.0)
    books.work("b", 1.0)
    books.advance(1.0, 1.0, {"a": 1, "b": 1}, {})
    books.advance(4.0, 3.0, {"a": 1, "b": 1}, {})
    books.sample(0.0, 1.0, {"a": 1.0, "b": 0.0})
    assert books.lag("a") == pytest.approx(-0.5)


def test_what_a_session_owes_one_that_left_long_ago_fades_though_another_has_just_left() -> None:
    books = accounts(a=30, b=30, c=40)
    for session in "abc":
        books.work(session, 1.0)
    books.advance(10.0, 10.0, {"a": 6, "b": 1, "c": 3}, {})
    books.rest("b")
    books.advance(70.0, 60.0, {"a": 3, "c": 4}, {})
    books.rest("c")
    assert [books._accounts[session].lag for session in "abc"] == pytest.approx([-3.0, 2.0, 1.0])
    books.advance(90.0, 20.0, {"a": 1}, {})
    assert books._accounts["a"].lag == pytest.approx(-1.0)


def test_samples_reach_over_several_intervals() -> None:
    books = accounts(a=50, b=50)
    books.work("a", 1.0)
    books.work("b", 1.0)
    for second in (1.0, 2.0):
        books.advance(second, 1.0, {"a": 1, "b": 1}, {})
    books.sample(0.5, 2.0, {"a": 1.5, "b": 0.0})
    assert books.lag("a") == pytest.approx(-0.75)
    assert books.delivered("a") == pytest.approx(0.5 + 1.25)


@pytest.mark.parametrize(("busy", "saturated"), [(1.2, False), (1.84, True), (1.9, True)])
def test_a_gpu_is_saturated_by_its_busy_share_whatever_the_length_of_the_sample(busy: float, saturated: bool) -> None:
    books = accounts(a=50, b=50)
    books.work("a", 1.0)
    books.work("b", 1.0)
    books.advance(2.0, 2.0, {"a": 1, "b": 1}, {})
    books.sample(0.0, 2.0, {"a": busy / 2, "b": busy / 2})
    assert books.saturated is saturated


@pytest.mark.parametrize(("shown", "saturated"), [(0.0168, True), (0.0136, True), (0.0132, False)])
def test_fifty_sessions_may_each_have_used_half_a_percent_more_than_whole_percents_show(
    shown: float, saturated: bool
) -> None:
    names = [f"s{number}" for number in range(50)]
    books = accounts(**dict.fromkeys(names, 1), heavy=40)
    for name in (*names, "heavy"):
        books.work(name, 1.0)
    books.advance(1.0, 1.0, dict.fromkeys((*names, "heavy"), 1), {})
    books.sample(0.0, 1.0, {**dict.fromkeys(names, shown), "heavy": 0.0})
    assert books.saturated is saturated
    # what nobody had shows nothing of the sessions' demand: the heavy one is owed its 40 of 90 parts, not 2 %
    assert (books.parts(("heavy", *names))["heavy"] > 0.4) is saturated


@pytest.mark.parametrize(("on_gpu", "saturated"), [(200, True), (180, False)])
def test_sessions_on_the_gpu_that_the_driver_shows_with_nothing_may_have_used_half_a_percent_each(
    on_gpu: int, saturated: bool
) -> None:
    names = [f"s{number}" for number in range(200)]
    books = accounts(**dict.fromkeys(names, 1))
    for name in names:
        books.work(name, 1.0)
    books.advance(1.0, 1.0, dict.fromkeys(names[:on_gpu], 1), {})
    books.sample(0.0, 1.0, dict.fromkeys(names, 0.0))
    assert books.saturated is saturated


def test_where_memory_is_short_the_gpu_counts_as_saturated_however_idle_it_is() -> None:
    books = accounts(a=50, b=50)
    books.work("a", 1.0)
    books.work("b", 1.0)
    books.advance(1.0, 1.0, {"a": 1, "b": 1}, {})
    books.sample(0.0, 1.0, {"a": 0.1, "b": 0.1})
    assert books.saturated is False
    books.advance(2.0, 1.0, {"a": 1}, {}, memory_short=True)
    books.advance(3.0, 1.0, {"a": 1}, {})
    books.sample(1.0, 3.0, {"a": 0.2})
    assert books.saturated is True
    assert books.parts("ab") == pytest.approx({"a": 0.855, "b": 0.145})


def test_a_sessions_part_may_grow_by_a_quarter_and_two_hundredths_beyond_what_it_used() -> None:
    books = accounts(a=90, b=10)
    books.work("a", 1.0)
    books.work("b", 1.0)
    books.advance(1.0, 1.0, {"a": 1, "b": 1}, {})
    books.sample(0.0, 1.0, {"a": 0.4, "b": 0.1})  # idle: each had what it wanted
    assert books.parts("ab") == pytest.approx({"a": 0.52 + 0.9 * (1 - 0.52 - 0.145), "b": 0.145 + 0.1 * 0.335})


def test_what_a_session_is_owed_fades_while_it_is_alone() -> None:
    books = accounts(a=50, b=50)
    books.work("a", 1.0)
    books.work("b", 1.0)
    books.advance(1.0, 1.0, {"b": 1}, {})
    books.rest("b")
    for elapsed, left in ((29.9, 0.5), (0.3, 0.3), (0.2, 0.1), (5.0, 0.0)):
        books.advance(2.0, elapsed, {"a": 1}, {})
        assert books._accounts["a"].lag == pytest.approx(left)


def test_debt_is_bounded_by_the_weight_and_never_below_two_requests() -> None:
    weights = {"a": 1} | dict.fromkeys("bcdefghij", 100)
    for requests, bound in (({}, 300 / 901), ({"a": 4.0, "b": 100.0}, 8.0)):
        books = accounts(**weights)
        for session in weights:
            books.work(session, 1.0)
        books.advance(1e4, 1e4, {"a": 1}, requests)
        assert books._accounts["a"].lag == pytest.approx(-bound)


def test_an_idle_gpu_on_which_a_session_was_held_back_is_saturated_until_demands_are_known_to_be_less() -> None:
    books = accounts(a=50, b=50)
    books.work("a", 1.0)
    books.work("b", 1.0)
    for start, saturated in ((0.0, True), (1.5, False)):  # each is taken to want 60 %, and then 40 %
        books.advance(start + 1.0, 1.0, {"a": 1, "b": 1}, {})
        books.advance(start + 1.5, 0.5, {"a": 1}, {}, held_back=True)
        books.sample(start, start + 1.5, {"a": 0.3, "b": 0.2})
        assert books.saturated is saturated
