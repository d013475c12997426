"""The order of spawns that wait: in quota first, the others by fair share."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.model.quota import Quotas, ResourceAmounts
from gpushare_spawner.quota.accounts import Charge, QuotaAccounts, QuotaUsage
from gpushare_spawner.quota.order import Asking, FairShare, ordered

ACCOUNTS = QuotaAccounts(
    Quotas.model_validate(
        {
            "groups": {
                "a": {"guarantee": 1},
                "b": {"weight": 1},
                "c": {"weight": 3},
                "idle": {"weight": 0},
                "physics": {"guarantee": 1, "teams": {"optics": {}, "theory": {}}},
            }
        }
    )
)
CAPACITY = ResourceAmounts(800)


def asking(*spawns: tuple[str, int]) -> list[Asking[int]]:
    return [
        Asking(n, ACCOUNTS.find(f"group:{group}", ""), ResourceAmounts(units))
        for n, (group, units) in enumerate(spawns)
    ]


def served(*spawns: tuple[str, int], usage: QuotaUsage | None = None, fair: FairShare | None = None) -> list[int]:
    return ordered(asking(*spawns), usage or QuotaUsage(ACCOUNTS), fair or FairShare(86400.0), CAPACITY)


def test_spawns_in_quota_come_first_and_each_counts_for_the_next() -> None:
    assert served(("b", 50), ("a", 75), ("a", 50), ("a", 25)) == [1, 3, 0, 2]


def test_what_runs_counts() -> None:
    usage = QuotaUsage(ACCOUNTS)
    usage.put(Charge("s", "eve", ACCOUNTS.find("group:a", ""), ResourceAmounts(100), 0.0))
    assert served(("b", 50), ("a", 50), usage=usage) == [0, 1]
    assert served(("b", 50), ("a", 50)) == [1, 0]


def test_teams_share_what_is_left_of_their_department() -> None:
    assert served(("b", 1), ("optics", 60), ("theory", 60), ("theory", 40)) == [1, 3, 0, 2]


def test_the_account_that_used_less_of_late_is_served_first() -> None:
    fair = FairShare(86400.0)
    fair.admitted("group:b", ResourceAmounts(400), CAPACITY)
    assert served(("b", 50), ("b", 50), ("c", 50), fair=fair) == [2, 0, 1]


def test_accounts_take_turns_by_their_weights() -> None:
    spawns = [("b", 50)] * 8 + [("c", 50)] * 8
    first = served(*spawns)[:8]
    assert Counter(spawns[number][0] for number in first) == {"b": 2, "c": 6}


def test_weight_0_is_served_when_no_other_asks() -> None:
    assert served(("idle", 50), ("b", 50), ("c", 50))[-1] == 0


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c", "idle", "optics", "theory"]), st.integers(1, 200)), max_size=12)
)
def test_every_spawn_is_served_once_and_equal_ones_of_an_account_in_the_order_in_which_they_came(
    spawns: list[tuple[str, int]],
) -> None:
    order = served(*spawns)
    assert sorted(order) == list(range(len(spawns)))
    for group in {group for group, _ in spawns}:
        for units in {units for _, units in spawns}:
            same = [number for number in order if spawns[number] == (group, units)]
            assert same == sorted(same)


@given(st.lists(st.tuples(st.sampled_from(["b", "c"]), st.just(50)), max_size=16))
def test_the_order_changes_no_usage(spawns: list[tuple[str, int]]) -> None:
    usage, fair = QuotaUsage(ACCOUNTS), FairShare(86400.0)
    served(*spawns, usage=usage, fair=fair)
    assert len(usage) == 0
    assert all(fair.used(one.account.key) == 0 for one in asking(*spawns))


def served_with_excess(excess: dict[str, float], *spawns: tuple[str, int]) -> list[int]:
    all_of_them = {f"group:{group}": 0.0 for group, _ in spawns} | excess
    return ordered(asking(*spawns), QuotaUsage(ACCOUNTS), FairShare(86400.0), CAPACITY, lambda: all_of_them)


def test_accounts_that_lack_half_of_a_spawn_come_before_the_others_and_each_spawn_counts() -> None:
    assert served_with_excess({"group:c": -60.0}, ("b", 50), ("c", 50), ("c", 50)) == [1, 0, 2]
    assert served_with_excess({"group:c": -75.0}, ("b", 50), ("c", 50), ("c", 50)) == [1, 2, 0]
    assert served_with_excess({"group:c": -24.0}, ("b", 50), ("c", 50)) == [0, 1]
    # what a gets in quota counts too
    assert served_with_excess({"group:a": -120.0}, ("b", 50), ("a", 100), ("a", 50)) == [1, 0, 2]
    assert served_with_excess({"group:a": -125.0}, ("b", 50), ("a", 100), ("a", 50)) == [1, 2, 0]


TREE = QuotaAccounts(
    Quotas.model_validate(
        {
            "groups": {
                "science": {
                    "weight": 3,
                    "teams": {
                        "physics": {"weight": 1, "teams": {"optics": {"weight": 1}, "theory": {"weight": 3}}},
                        "biology": {"weight": 2, "users": {"ada": {"weight": 1}}},
                    },
                },
                "course": {},
            }
        }
    )
)


def served_in_tree(*keys: str, fair: FairShare | None = None) -> list[str]:
    asked = [Asking(key, TREE.find(key, ""), ResourceAmounts(50)) for key in keys]
    return ordered(asked, QuotaUsage(TREE), fair or FairShare(86400.0), CAPACITY)


def test_at_each_level_siblings_share_by_their_weights() -> None:
    keys = ["group:course", "group:optics", "group:theory", "group:biology", "user:ada"]
    counted = Counter(served_in_tree(*(key for key in keys for _ in range(48)))[:48])
    inside = 48 * 3 // 4
    assert counted["group:course"] == 48 - inside
    assert counted["group:optics"] + counted["group:theory"] == inside // 3
    assert counted["group:theory"] == 3 * counted["group:optics"]
    assert counted["group:biology"] == counted["user:ada"] == inside // 3


def test_recent_use_counts_for_every_group_around_it() -> None:
    fair = FairShare(86400.0)
    fair.admitted("group:optics", ResourceAmounts(400), CAPACITY)
    assert served_in_tree("group:theory", "group:biology", "group:course", fair=fair) == [
        "group:course",
        "group:biology",
        "group:theory",
    ]


@given(st.lists(st.sampled_from(["group:optics", "group:theory", "group:biology", "user:ada", "group:course"])))
def test_in_a_tree_every_spawn_is_served_once_and_those_of_an_account_in_the_order_in_which_they_came(
    keys: list[str],
) -> None:
    asked = [Asking(n, TREE.find(key, ""), ResourceAmounts(50)) for n, key in enumerate(keys)]
    order = ordered(asked, QuotaUsage(TREE), FairShare(86400.0), CAPACITY)
    assert sorted(order) == list(range(len(keys)))
    for key in set(keys):
        same = [number for number in order if keys[number] == key]
        assert same == sorted(same)
