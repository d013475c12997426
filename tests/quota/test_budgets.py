"""The use of budgets: sums within windows, what is left, and when use leaves its window."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.model.quota import BudgetState, HoursBudget, Quotas
from gpushare_spawner.quota.accounts import QuotaAccounts
from gpushare_spawner.quota.budgets import BudgetUse, GpuTimeUse, Grant, WindowUse

HOUR, DAY = 3600.0, 86400.0
BEGIN = 20_000 * DAY
"""A midnight."""


def budget(hours: float = 4, window: Any = "day", **more: Any) -> HoursBudget:
    return HoursBudget(**{"hours": hours, "window": window} | more)


def use(at: float, held: float, account: str = "group:optics", user: str = "ann", **more: Any) -> GpuTimeUse:
    """GPU time of an hour; times in hours after BEGIN, and in GPU-hours."""
    return GpuTimeUse(account, user, BEGIN + at * HOUR, HOUR, held * HOUR, more.get("delivered", 0.0) * HOUR)


def counted(quotas: dict[str, Any], *uses: GpuTimeUse) -> BudgetUse:
    result = BudgetUse(QuotaAccounts(Quotas.model_validate(quotas)))
    result.add(uses)
    return result


def states(of: BudgetUse, key: str, user: str, at: float, *grants: Grant) -> dict[tuple[str, str], BudgetState]:
    found = of.states(of.accounts.find(key, user), user, BEGIN + at * HOUR, grants)
    return {(state.account, state.user): state for state in found}


DEPARTMENT = {
    "groups": {
        "physics": {
            "budget": {"hours": 10, "window": "week"},
            "teams": {
                "optics": {
                    "budget": {"hours": 6, "window": "day"},
                    "per_user": {"budget": {"hours": 4, "window": "day"}},
                },
                "theory": {"users": {"eve": {"budget": {"hours": 1, "window": "day"}}}},
            },
        }
    },
    "default": {"budget": {"hours": 2, "window": "day"}},
}  # fmt: skip


def test_use_counts_for_user_team_and_department() -> None:
    of = counted(DEPARTMENT, use(1, 2), use(2, 1, user="bob"), use(2, 3, "user:eve", "eve"))
    now = states(of, "group:optics", "ann", 5)
    assert {owner: state.used for owner, state in now.items()} == pytest.approx(
        {("group:optics", ""): 3, ("group:optics", "ann"): 2, ("group:physics", ""): 6}
    )
    assert [state.left for state in now.values()] == pytest.approx([3, 2, 4])
    assert states(of, "user:eve", "eve", 5)["user:eve", ""].used_up


def test_each_user_without_a_quota_has_the_default_budget() -> None:
    of = counted(DEPARTMENT, use(1, 2, "", "zoe"), use(1, 1, "default:yan", "yan"))
    assert states(of, "", "zoe", 3)["default:zoe", ""].used_up
    assert states(of, "default:yan", "yan", 3)["default:yan", ""].left == pytest.approx(1)


def test_use_leaves_a_rolling_window_hour_by_hour() -> None:
    of = counted(DEPARTMENT, use(1, 2), use(3, 2))
    assert states(of, "group:optics", "ann", 24)["group:optics", "ann"].used == pytest.approx(4)
    assert states(of, "group:optics", "ann", 25.5)["group:optics", "ann"].used == pytest.approx(3)
    assert states(of, "group:optics", "ann", 26)["group:optics", "ann"].used == pytest.approx(2)
    assert states(of, "group:optics", "ann", 28)["group:optics", "ann"].used == pytest.approx(0)


def test_a_used_up_budget_says_when_something_is_left_again() -> None:
    of = counted(DEPARTMENT, use(1, 3), use(3, 2))
    mine = states(of, "group:optics", "ann", 5)["group:optics", "ann"]
    assert mine.used_up
    assert mine.more_at is not None
    # one of the three GPU-hours beyond four leaves after a third of the hour
    assert mine.more_at == pytest.approx(BEGIN + (25 + 1 / 3) * HOUR, abs=1)
    assert states(of, "group:optics", "ann", 25.5)["group:optics", "ann"].left > 0


def test_delivered_time_counts_where_the_budget_says_so() -> None:
    quotas = {"users": {"ann": {"budget": {"hours": 4, "window": "day", "counted": "delivered"}}}}
    of = counted(quotas, use(1, 3, "user:ann", delivered=0.5))
    assert states(of, "user:ann", "ann", 2)["user:ann", ""].used == pytest.approx(0.5)


def test_several_budgets_apply_together() -> None:
    quotas = {"users": {"ann": {"budget": [{"hours": 4, "window": "day"}, {"hours": 5, "window": "week"}]}}}
    of = counted(quotas, use(1, 3, "user:ann"), use(30, 2, "user:ann"))
    account = of.accounts.find("user:ann", "ann")
    day, week = of.states(account, "ann", BEGIN + 31 * HOUR)
    assert [day.used, week.used] == pytest.approx([2, 5])
    assert (day.used_up, week.used_up) == (False, True)
    owners = [("user:ann", "ann"), ("default:bob", "bob")]
    assert of.used_up(owners, BEGIN + 31 * HOUR) == {("user:ann", "ann"): [("user:ann", "")]}
    accounts = [("user:ann", ""), ("user:bob", ""), ("user:eve", "")]
    assert of.still_used_up(accounts, BEGIN + 31 * HOUR) == [("user:ann", "")]


def test_a_term_counts_its_days_and_ends_with_them() -> None:
    term = {"from": "2024-10-04", "to": "2024-10-05"}
    quotas = {"users": {"ann": {"budget": {"hours": 1, "term": term}}}}
    of = counted(quotas, use(-1, 5, "user:ann"), use(1, 2, "user:ann"))
    assert HoursBudget(hours=1, term=term).bounds(0)[0] == BEGIN
    now = states(of, "user:ann", "ann", 47)["user:ann", ""]
    assert [now.used, now.more_at] == pytest.approx([2, BEGIN + 2 * DAY])
    assert states(of, "user:ann", "ann", 48) == {}


def test_a_grant_adds_hours_for_its_time() -> None:
    of = counted(DEPARTMENT, use(1, 5))
    grant = Grant("group:optics", "ann", 3, BEGIN, BEGIN + 6 * HOUR)
    assert states(of, "group:optics", "ann", 5)["group:optics", "ann"].used_up
    granted = states(of, "group:optics", "ann", 5, grant)
    assert granted["group:optics", "ann"].left == pytest.approx(2)
    assert granted["group:optics", ""].granted == 0
    assert states(of, "group:optics", "ann", 6, grant)["group:optics", "ann"].used_up


def test_a_budget_of_zero_hours_is_always_used_up() -> None:
    of = counted({"default": {"budget": {"hours": 0, "window": "day"}}})
    assert states(of, "", "ann", 1)["default:ann", ""].used_up
    assert of.used_up([("", "ann")], BEGIN) == {("", "ann"): [("default:ann", "")]}


def test_accounts_in_the_file_are_listed_without_use_and_users_with_it() -> None:
    of = counted(DEPARTMENT, use(1, 1))
    listed = {(state.account, state.user) for state in of.all_states(BEGIN + 2 * HOUR)}
    assert listed == {("group:physics", ""), ("group:optics", ""), ("group:optics", "ann"), ("user:eve", "")}


@given(
    st.lists(st.tuples(st.integers(0, 400), st.floats(0, 2)), max_size=60),
    st.sampled_from([HOUR, 5 * HOUR, DAY, 3 * DAY]),
    st.floats(0, 400),
)
def test_the_window_sum_equals_a_plain_sum(hours: list[tuple[int, float]], window: float, at: float) -> None:
    counting = WindowUse(budget(window=window))
    now, expected = BEGIN + at * HOUR, 0.0
    for hour, amount in sorted(hours):
        start = BEGIN + hour * HOUR
        if start >= now:
            continue
        counting.add(start, HOUR, amount * HOUR)
        expected += amount * HOUR * max(0.0, min(1.0, (start + HOUR - (now - window)) / HOUR))
    assert counting.used(now) == pytest.approx(expected, abs=1e-6)
    leaves = counting.leaves(now, counting.used(now) / 2)
    if leaves is not None and counting.used(now) > 1e-3:
        assert counting.used(leaves + 1e-3) <= expected / 2 + 1e-2


def test_days_of_a_long_history_keep_their_sum() -> None:
    counting = WindowUse(budget(window="month"))
    counting.add(BEGIN, DAY, 24 * HOUR)
    assert counting.used(BEGIN + 2 * DAY) == pytest.approx(24 * HOUR)


def test_old_use_without_a_users_name_counts_once_for_its_groups() -> None:
    of = counted(DEPARTMENT, use(1, 2, user=""), use(2, 1))
    now = states(of, "group:optics", "ann", 5)
    assert {owner: state.used for owner, state in now.items()} == pytest.approx(
        {("group:optics", ""): 3, ("group:optics", "ann"): 1, ("group:physics", ""): 3}
    )
