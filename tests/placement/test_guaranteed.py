"""Who gets what if everybody wants the GPU, and who owns what after somebody left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    later = convert_borrowed({"a": 100}, [younger, *owners, older])
    assert {name: after.borrowed_units for name, after in later.items()} == converted


HELD = st.tuples(st.integers(1, 100), st.integers(0, 100), st.integers(0, 100), st.booleans(), st.integers(0, 3))


@given(st.lists(HELD, max_size=6))
def test_units_that_sessions_come_to_own_were_guaranteed_to_them_before(
    sessions: list[tuple[int, int, int, bool, int]],
) -> None:
    """So the exchange of units need not know who will own them."""
    held, left = [], 100
    for number, (share, owned, effective, yields, opened_at) in enumerate(sessions):
        owned = min(share, owned, left)
        left -= owned
        session = active(f"s{number}", "a", share, share - owned, float(opened_at))
        held.append(
            session.yielding(min(share, effective)) if yields else session.with_effective(min(share, effective))
        )
    later = convert_borrowed({"a": 100}, held)
    assert guaranteed_units(100, held) == guaranteed_units(100, [later.get(one.session, one) for one in held])


def test_a_borrower_on_several_gpus_gains_on_each_what_that_can_give() -> None:
    owner = active("owner", "b", 70)
    guest = active("guest", ("a", "b"), 100, borrowed=100, opened_at=1.0)
    later = convert_borrowed({"a": 100, "b": 100}, [owner, guest])["guest"]
    assert [here.owned_units for here in later.each] == [100, 30]
    assert (later.borrowed_units, later.borrowed_each) == (70, (0, 70)), "without borrowed_each the least counts"
    assert convert_borrowed({"a": 100, "b": 100}, [owner, later]) == {}
    assert convert_borrowed({"a": 100, "b": 100}, [later]) == {"guest": active("guest", ("a", "b"), 100, 0, 1.0)}


def test_one_and_a_half_gpus_own_the_whole_gpu_though_units_of_the_other_are_lent() -> None:
    owner = active("owner", "b", 80).with_effective(0)
    guest = active("guest", ("a", "b"), 100, borrowed=80, opened_at=1.0, last_units=50)
    later = convert_borrowed({"a": 100, "b": 100}, [owner, guest])["guest"]
    assert [(here.owned_units, here.borrowed_units) for here in later.each] == [(100, 0), (20, 30)]
    assert guaranteed_units(100, [active("owner", "b", 80), later.on("b")]) == {"owner": 80, "guest": 20}
    yielding = later.yielding(60)
    assert [(here.owned_units, here.effective_units) for here in yielding.each] == [(60, 60), (20, 50)]
    assert [here.owned_units for here in yielding.borrowing((0, 0)).each] == [100, 50]


def test_a_borrower_on_a_gpu_that_no_report_names_gains_nothing() -> None:
    assert convert_borrowed({"a": 100}, [active("guest", "lost", 50, borrowed=50)]) == {}
