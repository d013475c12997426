"""Who can be on the GPU together."""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter.memory import VramBudget
from gpushare_spawner.arbiter.session import ArbitratedSession, Client


def clients(**working_sets: int) -> list[Client]:
    """Each of a session of its own, except that names with the same first letter share one."""
    sessions: dict[str, ArbitratedSession] = {}
    return [
        Client(name, sessions.setdefault(name[0], ArbitratedSession(name[0], 1)), allocated=size, working_set=size)
        for name, size in working_sets.items()
    ]


def test_what_cannot_leave_is_not_there_for_others() -> None:
    assert VramBudget(100, 30, exclusive=False).for_managed == 70
    assert VramBudget(100, 100, exclusive=False).for_managed == 0
    assert VramBudget(100, 130, exclusive=False).for_managed == 0


@pytest.mark.parametrize(("third", "fits"), [(10, True), (11, False)])
def test_a_group_fits_up_to_the_last_byte(third: int, fits: bool) -> None:
    budget = VramBudget(100, 30, exclusive=False)
    assert budget.fits(clients(a=20, b=40, c=third)) is fits


def test_one_alone_always_fits_and_two_never_where_what_cannot_leave_is_too_much() -> None:
    full, over = VramBudget(100, 100, exclusive=False), VramBudget(100, 101, exclusive=False)
    assert full.fits(clients(a=500))
    assert over.fits(clients(a=500))
    assert over.fits([])
    assert full.fits(clients(a=0, b=0))
    assert not over.fits(clients(a=0, b=0))


def test_unconfirmed_memory_counts_beside_the_working_set() -> None:
    budget, (a, b) = VramBudget(100, 0, exclusive=False), clients(a=50, b=50)
    assert budget.fits([a, b])
    b.unconfirmed = 1
    assert not budget.fits([a, b])
    assert budget.fill([a, b]) == [a]


def test_where_one_session_runs_at_a_time_its_own_clients_run_together() -> None:
    budget = VramBudget(100, 0, exclusive=True)
    a1, a2, b = clients(a1=10, a2=10, b=10)
    assert budget.fits([a1, a2])
    assert not budget.fits([a1, b])
    assert not budget.fits([a1, a2, b])
    assert budget.fill([a1, b, a2]) == [a1, a2]
    assert budget.fill([b, a1], [a2]) == [a2, a1]


def test_the_room_is_filled_in_order_and_who_does_not_fit_is_passed_over() -> None:
    budget = VramBudget(100, 0, exclusive=False)
    a, b, c, d = clients(a=60, b=50, c=30, d=10)
    assert budget.fill([a, b, c, d]) == [a, c, d]
    assert budget.fill([b, a, c, d]) == [b, c, d]
    assert budget.fill([a, c, d], [b]) == [b, c, d]
    assert budget.fill([b, b, c], [b]) == [b, c]
    assert budget.fill(clients(a=60, b=30, c=11, d=10))[2].id == "d"  # what is taken adds up
    assert budget.fill([]) == []


def test_the_first_one_is_let_in_however_large_and_nobody_beside_it() -> None:
    budget = VramBudget(100, 0, exclusive=False)
    big, small = clients(a=500, b=1)
    assert budget.fill([big, small]) == [big]
    assert VramBudget(100, 101, exclusive=False).fill(clients(a=1, b=1)) != []
    assert len(VramBudget(100, 101, exclusive=False).fill(clients(a=1, b=1))) == 1


def test_nobody_stands_in_the_way_of_one_that_fits() -> None:
    budget = VramBudget(100, 0, exclusive=False)
    a, b, waiter = clients(a=40, b=30, w=30)
    assert budget.blockers(waiter, [a, b]) == []
    assert budget.blockers(waiter, []) == []
    (huge,) = clients(h=500)
    assert budget.blockers(huge, []) == []


def test_those_without_whom_the_waiter_would_fit_stand_in_its_way() -> None:
    budget = VramBudget(100, 0, exclusive=False)
    a, b, c, waiter = clients(a=40, b=30, c=20, w=40)
    assert budget.blockers(waiter, [a, b, c]) == [a, b]  # 30 too much
    b.working_set = 29
    a.working_set = 41
    assert budget.blockers(waiter, [a, b, c]) == [a]


def test_all_stand_in_the_way_where_no_single_one_does() -> None:
    budget = VramBudget(100, 0, exclusive=False)
    a, b, c, waiter = clients(a=30, b=30, c=30, w=60)
    assert budget.blockers(waiter, [a, b, c]) == [a, b, c]


def test_one_beside_whom_the_waiter_never_fits_stands_in_its_way() -> None:
    budget = VramBudget(100, 0, exclusive=False)
    a, b, waiter = clients(a=51, b=49, w=50)
    assert budget.blockers(waiter, [a, b]) == [a]
    a.working_set, b.working_set = 60, 60
    assert budget.blockers(waiter, [a, b]) == [a, b]
    (c,) = clients(c=10)
    assert budget.blockers(waiter, [a, b, c]) == [a, b]
    # beside one of exactly the other half it does fit: no single one stands in the way
    a.working_set, b.working_set, c.working_set = 50, 30, 40
    assert budget.blockers(waiter, [a, b, c]) == [a, b, c]


def test_one_byte_too_much_is_too_much() -> None:
    budget = VramBudget(100, 0, exclusive=False)
    a, b, waiter = clients(a=60, b=11, w=30)
    assert budget.blockers(waiter, [a, b]) == [a, b]
    b.working_set = 10
    assert budget.blockers(waiter, [a, b]) == []


def test_of_other_sessions_all_stand_in_the_way_where_one_runs_at_a_time() -> None:
    budget = VramBudget(100, 0, exclusive=True)
    a, w1, waiter = clients(a=1, w1=1, w2=1)
    assert budget.blockers(waiter, [a, w1]) == [a]
    assert budget.blockers(waiter, [w1]) == []


def test_all_stand_in_the_way_where_what_cannot_leave_is_too_much() -> None:
    budget = VramBudget(100, 101, exclusive=False)
    a, b, waiter = clients(a=1, b=1, w=1)
    assert budget.blockers(waiter, [a, b]) == [a, b]
