"""Accounts: who is entitled to what, who received what, and what of the difference survives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.arbiter.accounting import Accounts, divide
from gpushare_spawner.arbiter.session import ArbiterSettings


class Books:
    """Accounts, and a clock for them."""

    def __init__(self, **weights: int) -> None:
        self.accounts = Accounts(ArbiterSettings())
        self.now = 0.0
        for name, weight in weights.items():
            self.accounts.add(name, weight)
            self.accounts.work(name, 1.0)

    def run(self, seconds: float, held_back: bool = False, **processes: int) -> None:
        self.now += seconds
        self.accounts.advance(self.now, seconds, processes, {}, held_back)

    def lags(self) -> dict[str, float]:
        return {name: self.accounts.lag(name) for name in sorted(self.accounts.working)}


def test_even_slices_are_less_than_its_part_for_the_heavy_and_more_for_the_light() -> None:
    books = Books(a=50, b=10, c=10)
    books.run(21.0, a=1, b=1, c=1)
    assert books.lags() == pytest.approx({"a": 8.0, "b": -4.0, "c": -4.0})
    assert books.accounts.entitled("a") == pytest.approx(15.0)
    assert books.accounts.delivered("a") == pytest.approx(7.0)


def test_two_processes_of_a_session_have_two_slices() -> None:
    books = Books(a=50, b=50)
    books.run(3.0, a=2, b=1)
    assert books.lags() == pytest.approx({"a": -0.5, "b": 0.5})


def test_time_without_competition_costs_nothing() -> None:
    books = Books(a=50)
    books.run(100.0, a=1)
    assert books.lags() == {"a": 0.0}
    assert books.accounts.delivered("a") == 0.0
    assert books.accounts.received("a") == pytest.approx(100.0)


def test_debt_survives_a_moment_away() -> None:
    books = Books(a=50, b=50)
    books.run(4.0, a=1)
    books.accounts.rest("a")
    books.accounts.work("a", 1.0)
    assert books.lags() == pytest.approx({"a": -2.0, "b": 2.0})


def test_debt_of_the_absent_is_paid_back_as_if_they_waited() -> None:
    books = Books(a=50, b=50)
    books.run(4.0, a=1)
    books.accounts.rest("a")
    books.run(32.0, b=1)
    books.accounts.work("a", 1.0)
    assert books.accounts._accounts["a"].lag == pytest.approx(-1.0), "it shrinks by 1 s in 2 s, after 30 s"


def test_debt_fades_while_nobody_else_wants_the_gpu() -> None:
    books = Books(a=50, b=50)
    books.run(4.0, a=1)
    books.accounts.rest("b")
    books.run(31.5, a=1)
    assert books.accounts._accounts["a"].lag == pytest.approx(-0.5), "from 30 s after the other has left"
    books.run(10.0)
    assert books.accounts._accounts["a"].lag == 0.0


@pytest.mark.parametrize("steps", [1, 7, 290])
def test_nothing_fades_between_a_session_and_one_that_pauses_for_seconds(steps: int) -> None:
    books = Books(a=30, b=70)
    books.run(10.0, b=1)
    for _ in range(3):
        books.accounts.rest("b")
        for _ in range(steps):
            books.run(29.0 / steps, a=1)
        books.accounts.work("b", 1.0)
        assert books.lags() == pytest.approx({"a": 3.0, "b": -3.0})
        books.run(1e-6, a=1)


@pytest.mark.parametrize("steps", [1, 7, 600])
def test_a_session_returns_after_minutes_without_debt_and_the_other_is_owed_nothing(steps: int) -> None:
    books = Books(a=30, b=70)
    books.run(10.0, b=1)
    books.accounts.rest("b")
    for _ in range(steps):
        books.run(60.0 / steps, a=1)
    books.accounts.work("b", 1.0)
    assert books.lags() == pytest.approx({"a": 0.0, "b": 0.0})


def test_more_than_the_absent_owe_fades_at_once() -> None:
    books = Books(a=30, b=30, c=40)
    books.run(10.0, b=1, c=1)
    assert books.lags() == pytest.approx({"a": 3.0, "b": -2.0, "c": -1.0})
    books.accounts.rest("b")
    books.run(60.0, a=3, c=4)
    books.accounts.rest("c")
    books.run(20.0, a=1)
    assert books.accounts._accounts["a"].lag == pytest.approx(1.0), "b was away for long, and owes nothing any more"


def test_unused_time_is_not_saved_up() -> None:
    books = Books(a=50, b=50)
    books.run(100.0, b=1)
    books.accounts.rest("a")
    books.run(0.9, b=1)
    books.accounts.work("a", 0.2)
    assert books.accounts._accounts["a"].lag == pytest.approx(50.0), "less than a second is no pause"
    books.accounts.rest("a")
    books.accounts.work("a", 0.2, memory_short=True)
    assert books.accounts._accounts["a"].lag == pytest.approx(0.4), "two time slices while sessions take turns"
    books.run(0.1, a=1, b=1)
    books.accounts.rest("a")
    books.run(1.1, b=1)
    books.accounts.work("a", 0.2)
    assert books.accounts._accounts["a"].lag == pytest.approx(0.2)


def test_debt_is_bounded() -> None:
    books = Books(a=10, b=90)
    books.run(1e5, a=1)
    assert books.accounts._accounts["a"].lag == pytest.approx(-30.0)


@pytest.mark.parametrize("weight", [1, 40, 100])
def test_a_weight_change_leaves_the_debt(weight: int) -> None:
    books = Books(a=50, b=50)
    books.run(4.0, a=1)
    books.accounts.set_weight("a", weight)
    assert books.lags() == pytest.approx({"a": -2.0, "b": 2.0})


def test_samples_replace_the_estimate_of_their_interval() -> None:
    books = Books(a=50, b=50)
    books.run(1.0, a=1, b=1)
    books.run(1.0, b=1)
    # a said that it was quiet in the second half, and was not
    books.accounts.sample(0.0, 2.0, {"a": 1.2, "b": 0.8})
    assert books.lags() == pytest.approx({"a": -0.2, "b": 0.2})
    assert books.accounts.delivered("a") == pytest.approx(1.2)
    books.accounts.sample(0.0, 2.0, {"a": 0.0, "b": 2.0})
    assert books.lags() == pytest.approx({"a": -0.2, "b": 0.2}), "an interval counts once"


def test_sessions_that_the_driver_does_not_tell_keep_their_estimate() -> None:
    books = Books(a=50, b=50)
    books.run(1.0, a=1, b=1)
    books.accounts.sample(0.0, 1.0, {"a": 0.5})
    assert books.lags() == pytest.approx({"a": 0.0, "b": 0.0})
    assert books.accounts.measured("a", 1.1)
    assert not books.accounts.measured("b", 1.1)
    assert not books.accounts.measured("a", 60.0)


def test_on_an_idle_gpu_nobody_owes_anything() -> None:
    books = Books(a=10, b=90)
    books.run(1.0, a=1, b=1)
    books.accounts.sample(0.0, 1.0, {"a": 0.4, "b": 0.2})
    assert not books.accounts.saturated
    assert books.lags() == pytest.approx({"a": 0.0, "b": 0.0})
    assert books.accounts.entitled("b") == pytest.approx(books.accounts.delivered("b")) == pytest.approx(0.2)
    books.run(1.0, a=1, b=1)
    books.accounts.sample(1.0, 2.0, {"a": 0.7, "b": 0.3})
    assert books.accounts.saturated


def test_a_sample_of_an_idle_gpu_that_covers_time_alone_too_leaves_nobody_owing() -> None:
    books = Books(a=10, b=90)
    books.accounts.rest("b")
    books.run(0.5, a=1)
    books.accounts.work("b", 1.0)
    books.run(0.5, a=1, b=1)
    books.accounts.sample(0.0, 1.0, {"a": 0.5, "b": 0.1})
    assert not books.accounts.saturated
    assert books.lags() == pytest.approx({"a": 0.0, "b": 0.0})


def test_one_that_cannot_use_its_part_is_entitled_to_what_it_uses() -> None:
    books = Books(a=90, b=10)
    for _ in range(6):
        start = books.now
        books.run(1.0, a=1, b=1)
        books.accounts.sample(start, books.now, {"a": 0.1, "b": 0.9})
    parts = books.accounts.parts(["a", "b"])
    assert parts["a"] < 0.35
    assert sum(parts.values()) == pytest.approx(1.0)


def test_what_is_left_is_divided_by_weight() -> None:
    free = {"a": 1.0, "b": 1.0, "c": 1.0}
    assert divide({"a": 50, "b": 30, "c": 20}, free) == pytest.approx({"a": 0.5, "b": 0.3, "c": 0.2})
    limited = divide({"a": 50, "b": 30, "c": 20}, free | {"a": 0.1})
    assert limited == pytest.approx({"a": 0.1, "b": 0.54, "c": 0.36})
    assert divide({"a": 50, "b": 50}, {"a": 0.1, "b": 0.1}) == pytest.approx({"a": 0.5, "b": 0.5})


@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(1, 100), st.floats(0.02, 1.0)), min_size=1))
def test_parts_add_up_and_keep_to_their_limits(sessions: dict[str, tuple[int, float]]) -> None:
    limits = {name: limit for name, (_, limit) in sessions.items()}
    parts = divide({name: weight for name, (weight, _) in sessions.items()}, limits)
    assert sum(parts.values()) == pytest.approx(1.0)
    if sum(limits.values()) >= 1:
        assert all(part <= limits[name] + 1e-6 for name, part in parts.items())


def test_the_eligible_come_first_each_by_its_deadline() -> None:
    books = Books(a=10, b=10, c=20)
    requests = dict.fromkeys("abc", 1.0)
    assert books.accounts.order("abc", requests) == ["c", "a", "b"]
    books.run(1.0, c=1)
    assert books.accounts.order("abc", requests) == ["a", "b", "c"]


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["work", "rest", "run", "weigh"]), st.integers(1, 100)))
)
def test_lags_always_add_up_to_nothing(events: list[tuple[str, str, int]]) -> None:
    books = Books(a=25, b=25, c=25, d=25)
    for name, event, number in events:
        if event == "work":
            books.accounts.work(name, float(number))
        elif event == "rest":
            books.accounts.rest(name)
        elif event == "run":
            books.run(float(number), **{name: 1})  # type: ignore[arg-type]
        else:
            books.accounts.set_weight(name, number)
        lags = books.lags().values()
        assert sum(lags) == pytest.approx(0.0, abs=1e-6 * (1 + sum(abs(lag) for lag in lags)))


def test_unknown_sessions_are_errors() -> None:
    with pytest.raises(KeyError):
        Accounts(ArbiterSettings()).work("nobody", 1.0)
