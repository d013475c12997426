"""Which sessions are in quota, and what is left of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.model.quota import Quotas, ResourceAmounts
from gpushare_spawner.quota.accounts import Account, Charge, QuotaAccounts, QuotaUsage

QUOTAS = Quotas.model_validate(
    {
        "groups": {
            "physics": {"guarantee": 4, "teams": {"optics": {"guarantee": 2}, "theory": {"guarantee": 1}}},
            "small": {"guarantee": 1, "teams": {"left": {"guarantee": 0.75}, "right": {}}},
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
    return Charge(session, "eve", account(group), ResourceAmounts(units), at)


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
        assert not gone.configured
        assert (gone.quota.guarantee, gone.quota.maximum) == (0, None)


def test_the_oldest_sessions_are_in_quota() -> None:
    found = usage(charge("b", "course", 50, 2), charge("a", "course", 50, 1), charge("c", "course", 1, 3))
    assert in_quota(found, "a", "b", "c") == [True, True, False]
    assert found.over_quota() == {"group:course": (1, 0, 0)}
    found.drop("a")
    assert in_quota(found, "b", "c") == [True, True]
    assert found.over_quota() == {}


def test_a_smaller_session_is_in_quota_beside_an_older_one_that_the_rest_does_not_hold() -> None:
    found = usage(charge("a", "course", 75, 1), charge("b", "course", 50, 2), charge("c", "course", 25, 3))
    assert in_quota(found, "a", "b", "c") == [True, False, True]


def test_what_a_department_is_guaranteed_beyond_its_teams_is_for_any_of_them() -> None:
    found = usage(charge("a", "theory", 100, 1), charge("b", "theory", 100, 2), charge("c", "theory", 25, 3))
    assert in_quota(found, "a", "b", "c") == [True, True, False]
    assert found.left(account("optics")).of(account("optics")).units == 200, "that is the other team's own"
    assert found.used(account("physics")).units == 225


def test_a_session_whose_share_changed_is_charged_once() -> None:
    found = usage(charge("a", "course", 75), charge("a", "course", 25))
    assert found.used(account("course")).units == 25
    assert len(found) == 1
    assert (found.servers(account("course")), found.servers(account("course"), "eve")) == (1, 1)


def test_dropping_an_unknown_session_changes_nothing() -> None:
    found = usage(charge("a", "course", 75))
    found.drop("b")
    assert found.used(account("course")).units == 75
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
    expected = units <= found.left(account(group)).of(account(group)).units
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


def test_quotas_are_equal_whatever_was_computed_of_them() -> None:
    again = Quotas.model_validate(QUOTAS.model_dump(exclude_unset=True))
    assert QUOTAS.groups["physics"].unshared == (100, None, None)
    assert not QUOTAS.count_resources
    assert again == QUOTAS


def test_accounts_without_sessions_use_nothing() -> None:
    for group in ("optics", "course"):
        assert usage().used(account(group)) == (0, 0, 0)
        assert usage().left(account(group)).of(account(group)) == (account(group).quota.guarantee * 100, 0, 0)


def test_without_a_guarantee_nothing_is_left() -> None:
    assert usage().left(account("gone")).of(account("gone")) == (0, 0, 0)


def test_an_account_says_whether_the_file_has_it() -> None:
    assert account("optics").configured
    assert not account("gone").configured
    assert ACCOUNTS.find("user:ada", "ada").configured
    assert not ACCOUNTS.find("user:ben", "ben").configured
    assert ACCOUNTS.find("", "ben").configured


DEEP = QuotaAccounts(
    Quotas.model_validate(
        {
            "groups": {
                "science": {
                    "guarantee": 8,
                    "cpu": {"guarantee": 32},
                    "teams": {
                        "physics": {
                            "guarantee": 4,
                            "teams": {
                                "optics": {"guarantee": 2, "users": {"ada": {"guarantee": 1, "cpu": {"guarantee": 8}}}},
                                "theory": {},
                            },
                        },
                        "biology": {"guarantee": 2, "memory": {"guarantee": "64Gi"}},
                    },
                }
            },
            "default": {"cpu": {"guarantee": 2}},
        }
    )
)


def deep(key: str) -> Account:
    return DEEP.find(key, "eve")


def needed(session: str, key: str, units: int = 0, cores: int = 0, at: float = 0.0) -> Charge:
    return Charge(session, "eve", deep(key), ResourceAmounts(units, cores * 1000), at)


def test_groups_contain_groups_and_users_at_any_depth() -> None:
    ada = deep("user:ada")
    assert [one.key for one in ada.path] == ["user:ada", "group:optics", "group:physics", "group:science"]
    assert ada.department == "science / physics / optics"
    assert DEEP.within(deep("group:physics")) == ["group:optics", "group:theory", "user:ada"]
    assert [one.key for one in DEEP.of_user("ada", {"optics", "science", "theory"})] == ["user:ada", "group:theory"]
    assert [one.key for one in DEEP.of_user("bob", {"optics", "science"})] == ["group:optics"]
    assert [one.key for one in DEEP.of_user("bob", {"physics"})] == ["default:bob"], "its teams have the servers"


def test_what_is_left_of_each_group_is_for_those_within_it() -> None:
    found = QuotaUsage(DEEP)
    for charge in (
        needed("a", "group:theory", 200, at=1),
        needed("b", "group:theory", 200, at=2),
        needed("c", "group:theory", 100, at=3),
        needed("d", "group:optics", 100, at=4),
        needed("e", "group:optics", 100, at=5),
        needed("f", "user:ada", 100, at=6),
    ):
        found.put(charge)
    assert in_quota(found, *"abcdef") == [True, True, False, True, False, True]
    assert found.used(deep("group:physics")).units == found.used(deep("group:science")).units == 800
    assert found.used(deep("group:optics")).units == 300
    assert found.over_quota(with_groups=True)["group:physics"].units == 200
    assert "group:physics" not in found.over_quota()


def test_a_server_is_in_quota_if_all_that_is_guaranteed_holds_it() -> None:
    found = QuotaUsage(DEEP)
    found.put(needed("a", "user:ada", 50, 6, at=1))
    found.put(needed("b", "user:ada", 50, 6, at=2))  # the CPU comes from science
    found.put(needed("c", "user:ada", 0, 20, at=3))
    assert in_quota(found, *"abc") == [True, True, False]
    assert found.left(deep("user:ada")).of(deep("user:ada")) == (200, 18_000, 0)
    assert found.left(deep("user:ada")).lacking(deep("user:ada"), ResourceAmounts(1, 19_000, 2**40)) == ["cpu"]
    found.put(Charge("d", "eve", deep("group:biology"), ResourceAmounts(100, 0, 2**37), 4))
    assert not found.in_quota("d"), "128 GiB exceed the guaranteed 64 GiB"


def test_a_guarantee_of_cpu_counts_for_its_own_group_only() -> None:
    accounts = QuotaAccounts(
        Quotas.model_validate({"groups": {"a": {"teams": {"b": {"cpu": {"guarantee": 2}}, "c": {"guarantee": 1}}}}})
    )
    assert accounts.find("group:a", "").quota.guaranteed == (100, None, None)
    found = QuotaUsage(accounts)
    found.put(Charge("s", "eve", accounts.find("group:c", ""), ResourceAmounts(100, 1000), 0))
    assert found.in_quota("s"), "no guarantee of CPU stands in its way"


KEYS = st.sampled_from(["user:ada", "group:optics", "group:theory", "group:biology", "default:eve", "group:gone"])
DEEP_SESSIONS = st.lists(st.tuples(KEYS, st.integers(0, 300), st.integers(0, 12), st.integers(0, 9)), max_size=14)


@given(DEEP_SESSIONS, st.data())
def test_at_every_level_what_is_in_quota_never_exceeds_the_guarantee_however_it_came_about(
    sessions: list[tuple[str, int, int, int]], data: st.DataObject
) -> None:
    charges = [needed(str(n), key, units, cores, at) for n, (key, units, cores, at) in enumerate(sessions)]
    found, fresh = QuotaUsage(DEEP), QuotaUsage(DEEP)
    for charge in charges + data.draw(st.permutations(charges)):
        found.drop(charge.session)
        found.put(charge)
    for charge in charges:
        fresh.put(charge)
    held = {charge.session for charge in charges if found.in_quota(charge.session)}
    assert held == {charge.session for charge in charges if fresh.in_quota(charge.session)}
    for account in DEEP.named():
        assert found.used(account) == fresh.used(account)
        inside = [charge.needs for charge in charges if charge.session in held and charge.account.is_within(account)]
        outermost = account.key == "group:science"
        if outermost:
            assert sum(needs.units for needs in inside) <= 800
            assert sum(needs.cpu for needs in inside) <= 32_000


@given(DEEP_SESSIONS, KEYS, st.integers(0, 400), st.integers(0, 20))
def test_a_new_server_is_in_quota_if_nothing_is_lacking_and_changes_no_other(
    sessions: list[tuple[str, int, int, int]], key: str, units: int, cores: int
) -> None:
    found = QuotaUsage(DEEP)
    for n, (one, its_units, its_cores, at) in enumerate(sessions):
        found.put(needed(str(n), one, its_units, its_cores, at))
    before = {str(n): found.in_quota(str(n)) for n in range(len(sessions))}
    new = needed("new", key, units, cores, 10)
    expected = not found.left(new.account).lacking(new.account, new.needs)
    found.put(new)
    assert found.in_quota("new") == expected
    assert {session: found.in_quota(session) for session in before} == before
