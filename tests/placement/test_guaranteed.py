"""Who gets what if everybody wants the GPU, and who owns what after somebody left."""

from __future__ import annotations

import pytest

from gpushare_spawner.placement.node import convert_borrowed, guaranteed_units
from tests.placement.reports import active


def test_borrowers_share_what_owners_leave_and_the_oldest_comes_first() -> None:
    owner = active("owner", "a", 50)
    younger = active("ada", "a", 40, borrowed=40, opened_at=2.0)
    older = active("bob", "a", 40, borrowed=40, opened_at=1.0)
    assert guaranteed_units(100, [younger, owner, older]) == {"owner": 50, "bob": 40, "ada": 10}
    assert guaranteed_units(100, [younger, owner.with_effective(5), older]) == {"owner": 5, "bob": 40, "ada": 40}


def test_of_two_sessions_that_were_opened_at_the_same_instant_the_first_by_name_comes_first() -> None:
    guests = [active(name, "a", 60, borrowed=60) for name in ("bob", "ada")]
    assert guaranteed_units(100, guests) == {"ada": 60, "bob": 40}


def test_owned_units_beyond_the_capacity_leave_nothing_to_borrowers() -> None:
    sessions = [active("s", "a", 60), active("t", "a", 60), active("u", "a", 10, borrowed=10)]
    assert guaranteed_units(100, sessions) == {"s": 60, "t": 60, "u": 0}


@pytest.mark.parametrize(
    ("owned", "converted"),
    [
        ((20,), {"older": 0, "younger": 40}),  # 80 are free: 60 for the older one, 20 for the other
        ((20, 30), {"older": 10}),
        ((20, 79), {"older": 59}),  # a single unit counts
        ((20, 80), {}),
    ],
)
def test_the_oldest_borrower_comes_to_own_what_the_owners_on_its_gpu_leave(
    owned: tuple[int, ...], converted: dict[str, int]
) -> None:
    owners = [active(f"owner-{units}", "a", units) for units in owned]
    younger = active("younger", "a", 60, borrowed=60, opened_at=2.0)
    older = active("older", "a", 60, borrowed=60, opened_at=1.0)
    assert convert_borrowed({"a": 100}, [younger, *owners, older]) == converted


def test_a_borrower_on_several_gpus_gains_what_each_of_them_can_give() -> None:
    owner = active("owner", "b", 70)
    guest = active("guest", ("a", "b"), 100, borrowed=100, opened_at=1.0)
    assert convert_borrowed({"a": 100, "b": 100}, [owner, guest]) == {"guest": 70}


def test_a_borrower_on_a_gpu_that_no_report_names_gains_nothing() -> None:
    assert convert_borrowed({"a": 100}, [active("guest", "lost", 50, borrowed=50)]) == {}
