"""Which sessions are in quota, and what is left of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.quota.accounts import Account, Charge, QuotaAccounts, QuotaUsage

QUOTAS = Quotas.model_validate(
    {
        "groups": {
            "physics": {"guarantee": 4, "teams": {"optics": {"guarantee": 2}, "theory": {"guarantee": 1}}},
            "small": {"guarantee": 1, "teams": {"left": {"guarantee": 1}, "right": {"guarantee": 1}}},
            "course": {"guarantee": 1},
        },
        "users": {"ada": {"guarantee": 0.5}},
        "default": {"guarantee": 0.25},
    }
)
ACCOUNTS = QuotaAccounts(QUOTAS)


def account(group: str) -> Account:
    return ACCOUNTS.find(f"group:{group}", "")


def charge(session: str, group: str, units: int, at: float = 0.0) -> Charge:
    return Charge(session, "eve", account(group), units, at)


def usage(*charges: Charge) -> QuotaUsage:
    made = QuotaUsage(ACCOUNTS)
    for one in charges:
        made.put(one)
    return made


def in_quota(of: QuotaUsage, *sessions: str) -> list[bool]:
    return [of.in_quota(session) for session in sessions]


def test_a_user_uses_their_own_account_before_those_of_groups_in_the_order_of_the_file() -> None:
    keys = [one.key for one in ACCOUNTS.of_user("ada", {"course", "optics", "unknown"})]
    assert keys == ["user:ada", "group:optics", "group:course"]


def test_a_user_without_a_quota_has_the_default_one_alone() -> None:
    (mine,) = ACCOUNTS.of_user("bob", {"physics"})
    assert mine.key == "default:bob", "a department itself has no servers"
    assert mine.quota.guarantee == 0.25
    assert ACCOUNTS.of_user("eve", set()) != (mine,)


def test_a_session_from_before_there_were_quotas_is_charged_to_the_default_account_of_its_user() -> None:
    assert ACCOUNTS.find("", "bob").key == "default:bob"


def test_an_account_that_the_file_has_no_longer_has_no_guarantee_and_no_limit() -> None:
    for key in ("group:gone", "user:bob"):
        gone = ACCOUNTS.find(key, "bob")
        assert not gone.known
        assert (gone.quota.guarantee, gone.quota.maximum) == (0, None)


def test_the_oldest_sessions_are_in_quota() -> None:
    found = usage(charge("b", "course", 50, 2), charge("a", "course", 50, 1), charge("c", "course", 1, 3))
    assert in_quota(found, "a", "b", "c") == [True, True, False]
    assert found.over_quota() == {"group:course": 1}
    found.drop("a")
    assert in_quota(found, "b", "c") == [True, True]
    assert found.over_quota() == {}


def test_a_smaller_session_is_in_quota_beside_an_older_one_that_the_rest_does_not_hold() -> None:
    found = usage(charge("a", "course", 75, 1), charge("b", "course", 50, 2), charge("c", "course", 25, 3))
    assert in_quota(found, "a", "b", "c") == [True, False, True]


def test_what_a_department_is_guaranteed_beyond_its_teams_is_for_any_of_them() -> None:
    found = usage(charge("a", "theory", 100, 1), charge("b", "theory", 100, 2), charge("c", "theory", 25, 3))
    assert in_quota(found, "a", "b", "c") == [True, True, False]
    assert found.left(account("optics")).of(account("optics")) == 200, "that is the other team's own"
    assert found.used_by_department(account("optics")) == 225


def test_a_department_that_is_guaranteed_less_than_its_teams_limits_them_together() -> None:
    found = usage(charge("a", "left", 75, 1), charge("b", "right", 50, 2), charge("c", "right", 25, 3))
    assert in_quota(found, "a", "b", "c") == [True, False, True]
    assert found.left(account("left")).of(account("left")) == 0


def test_a_session_whose_share_changed_is_charged_once() -> None:
    found = usage(charge("a", "course", 75), charge("a", "course", 25))
    assert found.used(account("course")) == 25
    assert len(found) == 1
    assert [one.units for one in found.sessions(account("course"))] == [25]


def test_dropping_an_unknown_session_changes_nothing() -> None:
    found = usage(charge("a", "course", 75))
    found.drop("b")
    assert found.used(account("course")) == 75
    with pytest.raises(KeyError):
        found.in_quota("b")


GROUPS = st.sampled_from(["optics", "theory", "left", "right", "course"])
SESSIONS = st.lists(st.tuples(GROUPS, st.integers(1, 200), st.integers(0, 9)), max_size=12)


def filled(sessions: list[tuple[str, int, int]]) -> QuotaUsage:
    return usage(*(charge(str(n), group, units, at) for n, (group, units, at) in enumerate(sessions)))


@given(SESSIONS, GROUPS, st.integers(1, 400))
def test_a_new_session_is_in_quota_if_what_is_left_holds_it_and_changes_no_other(
    sessions: list[tuple[str, int, int]], group: str, units: int
) -> None:
    found = filled(sessions)
    before = {str(n): found.in_quota(str(n)) for n in range(len(sessions))}
    expected = units <= found.left(account(group)).of(account(group))
    found.put(charge("new", group, units, 10))
    assert found.in_quota("new") == expected
    assert {session: found.in_quota(session) for session in before} == before


@given(SESSIONS)
def test_sessions_in_quota_never_exceed_a_guarantee(sessions: list[tuple[str, int, int]]) -> None:
    found = filled(sessions)
    held = dict.fromkeys(("optics", "theory", "left", "right", "course"), 0)
    for number, (group, units, _) in enumerate(sessions):
        held[group] += units * found.in_quota(str(number))
    assert held["course"] <= 100
    assert held["optics"] + held["theory"] <= 400
    assert held["optics"] <= 300
    assert held["theory"] <= 200
    assert held["left"] + held["right"] <= 100


@given(SESSIONS, st.data())
def test_usage_is_the_same_however_it_came_about(sessions: list[tuple[str, int, int]], data: st.DataObject) -> None:
    found = filled(sessions)
    for number in data.draw(st.lists(st.integers(0, 11), max_size=6)):
        found.drop(str(number))
        if number < len(sessions):
            group, units, at = sessions[number]
            found.put(charge(str(number), group, units, at))
    fresh = filled(sessions)
    assert found.over_quota() == fresh.over_quota()
    assert all(found.used(account(group)) == fresh.used(account(group)) for group in ("optics", "course"))


def test_accounts_without_sessions_use_nothing() -> None:
    for group in ("optics", "course"):
        assert usage().used(account(group)) == 0
        assert usage().used_by_department(account(group)) == 0


def test_an_account_says_whether_the_file_has_it() -> None:
    assert account("optics").known
    assert not account("gone").known
    assert ACCOUNTS.find("user:ada", "ada").known
    assert not ACCOUNTS.find("user:ben", "ben").known
    assert ACCOUNTS.find("", "ben").known
