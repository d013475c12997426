"""The allocation of one session."""

from __future__ import annotations

import pytest

from gpushare_spawner.placement.node import Allocation
from tests.placement.reports import active, session
from tests.present import present


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ({"share_units": 0}, "ann: a share has 1 to 100 units, not 0"),
        ({"share_units": 101}, "ann: a share has 1 to 100 units, not 101"),
        ({"share_units": 10, "borrowed_units": 11}, "ann: borrowed_units is 11, outside 0 to 10"),
        ({"share_units": 10, "borrowed_units": -1}, "ann: borrowed_units is -1, outside 0 to 10"),
        ({"share_units": 10, "effective_units": 11}, "ann: effective_units is 11, outside 0 to 10"),
    ],
)
def test_contradictory_numbers_are_refused_with_the_session_and_the_number(
    numbers: dict[str, int], problem: str
) -> None:
    with pytest.raises(ValueError, match=f"^{problem}$"):
        Allocation("ann", ("a",), **numbers)  # type: ignore[arg-type]


def test_the_bounds_themselves_are_allowed() -> None:
    least = Allocation("ann", ("a",), 1)
    assert (least.owned_units, least.borrowed_units, least.effective_units) == (1, 0, 0)
    assert Allocation("ann", ("a",), 100, borrowed_units=100, effective_units=100).owned_units == 0


def test_an_allocation_is_what_the_agent_reports() -> None:
    held = active("ann", ("a", "b"), 40, borrowed=15, opened_at=3.0).with_effective(5)
    assert Allocation.of(session(held)) == held
    assert Allocation.of(session(active("ann", "a", 1))) == active("ann", "a", 1)


def test_a_session_without_gpus_or_without_units_has_no_allocation() -> None:
    report = session(active("ann", "a", 40))
    assert Allocation.of(report.model_copy(update={"gpus": ()})) is None
    assert Allocation.of(report.model_copy(update={"share_units": 0})) is None


def test_numbers_beyond_the_share_are_cut_to_it_and_a_gpu_counts_once() -> None:
    report = session(active("ann", "a", 40)).model_copy(
        update={"gpus": ("a", "b", "a"), "borrowed_units": 50, "effective_units": 60}
    )
    assert Allocation.of(report) == Allocation("ann", ("a", "b"), 40, borrowed_units=40, effective_units=40, user="ann")
    one = present(Allocation.of(report.model_copy(update={"gpus": ("a", "a"), "last_units": 10})))
    assert (one.gpus, one.last_units) == (("a",), 0)


def test_the_older_session_comes_first_and_the_name_decides_between_equals() -> None:
    old, young, other = (active(name, "a", 1, opened_at=at) for name, at in (("z", 1.0), ("a", 2.0), ("b", 2.0)))
    assert sorted([other, young, old], key=lambda held: held.age) == [old, young, other]


def test_a_forged_report_has_no_borrowed_units_beyond_its_share_and_none_for_gpus_that_it_does_not_name() -> None:
    pair = session(active("ann", ("a", "b"), 40, last_units=30))
    beyond = pair.model_copy(update={"borrowed_each": (100, 0)})
    assert [here.owned_units for here in present(Allocation.of(beyond)).each] == [0, 30]
    assert [here.borrowed_units for here in beyond.each] == [40, 0]
    for each in ((10,), (10, 10, 10)):
        other = pair.model_copy(update={"borrowed_each": each, "guaranteed_each": each})
        assert Allocation.of(other) == Allocation.of(pair)
        assert [here.borrowed_units for here in other.each] == [0, 0]
