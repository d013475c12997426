"""Limits of a quota: the maximum, servers, and servers of one user."""

from __future__ import annotations

import pytest

from gpushare_spawner.model.quota import Quotas, Resource, ResourceAmounts
from gpushare_spawner.quota.accounts import Charge, QuotaAccounts, QuotaUsage
from gpushare_spawner.quota.order import Limit, LimitExceeded, admit

ACCOUNTS = QuotaAccounts(
    Quotas.model_validate(
        {
            "groups": {
                "course": {"guarantee": 0.5, "maximum": 1, "servers": 3, "per_user": {"servers": 2}},
                "physics": {"maximum": 1, "teams": {"optics": {}, "theory": {}}},
            }
        }
    )
)


def usage(*charges: tuple[str, str, int]) -> QuotaUsage:
    made = QuotaUsage(ACCOUNTS)
    for number, (group, user, units) in enumerate(charges):
        made.put(Charge(str(number), user, ACCOUNTS.find(f"group:{group}", user), ResourceAmounts(units), number))
    return made


def exceeded(group: str, limit: Limit, most: int, used: int) -> LimitExceeded:
    return LimitExceeded(ACCOUNTS.find(f"group:{group}", ""), limit, most, used)


@pytest.mark.parametrize(
    ("running", "group", "units", "expected"),
    [
        ([], "course", 50, (True, None)),
        ([], "course", 51, (False, None)),
        ([("course", "bob", 50)], "course", 50, (False, None)),
        ([("course", "bob", 50)], "course", 51, (False, exceeded("course", Limit.MAXIMUM, 100, 50))),
        ([("course", "eve", 1)] * 2, "course", 1, (True, exceeded("course", Limit.USER_SERVERS, 2, 2))),
        ([("course", "bob", 1)] * 3, "course", 1, (True, exceeded("course", Limit.SERVERS, 3, 3))),
        ([("optics", "bob", 60)], "theory", 40, (False, None)),
        ([("optics", "bob", 60)], "theory", 41, (False, exceeded("physics", Limit.MAXIMUM, 100, 60))),
        ([("optics", "bob", 100)], "course", 50, (True, None)),
    ],
)
def test_a_limit_refuses_the_server_that_would_exceed_it(
    running: list[tuple[str, str, int]], group: str, units: int, expected: tuple[bool, LimitExceeded | None]
) -> None:
    account = ACCOUNTS.find(f"group:{group}", "eve")
    found = admit(usage(*running), account, "eve", ResourceAmounts(units))
    assert (found.in_quota, found.refused) == expected
    assert found.account is account


def test_a_server_is_admitted_only_if_every_level_and_every_resource_admits_it() -> None:
    accounts = QuotaAccounts(
        Quotas.model_validate(
            {
                "groups": {
                    "a": {
                        "cpu": {"maximum": 8},
                        "servers": 3,
                        "teams": {"b": {"teams": {"c": {"memory": {"maximum": "4Gi"}}, "d": {}}}},
                    }
                }
            }
        )
    )
    a, c, d = (accounts.find(f"group:{name}", "") for name in "acd")
    found = QuotaUsage(accounts)
    found.put(Charge("1", "eve", d, ResourceAmounts(0, 6000, 2**40), 0))
    assert admit(found, c, "ada", ResourceAmounts(10, 2000, 2**32)).refused is None
    refused = admit(found, c, "ada", ResourceAmounts(10, 2001)).refused
    assert refused == LimitExceeded(a, Limit.MAXIMUM, 8000, 6000, Resource.CPU)
    refused = admit(found, c, "ada", ResourceAmounts(0, 0, 2**32 + 1)).refused
    assert refused == LimitExceeded(c, Limit.MAXIMUM, 2**32, 0, Resource.MEMORY)
    for number in range(3):
        found.put(Charge(f"g{number}", "eve", d, ResourceAmounts(10), 0))
    assert admit(found, c, "ada", ResourceAmounts(10)).refused == LimitExceeded(a, Limit.SERVERS, 3, 3)
    assert admit(found, c, "ada", ResourceAmounts(0, 1)).refused is None, "a server without a GPU is not counted there"
