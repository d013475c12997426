"""Limits of a quota: the maximum, servers, and servers of one user."""

from __future__ import annotations

import pytest

from gpushare_spawner.model.quota import Quotas
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
        made.put(Charge(str(number), user, ACCOUNTS.find(f"group:{group}", user), units, number))
    return made


@pytest.mark.parametrize(
    ("running", "group", "units", "expected"),
    [
        ([], "course", 50, (True, None)),
        ([], "course", 51, (False, None)),
        ([("course", "bob", 50)], "course", 50, (False, None)),
        ([("course", "bob", 50)], "course", 51, (False, LimitExceeded(Limit.MAXIMUM, 100, 50))),
        ([("course", "eve", 1)] * 2, "course", 1, (True, LimitExceeded(Limit.USER_SERVERS, 2, 2))),
        ([("course", "bob", 1)] * 3, "course", 1, (True, LimitExceeded(Limit.SERVERS, 3, 3))),
        ([("optics", "bob", 60)], "theory", 40, (False, None)),
        ([("optics", "bob", 60)], "theory", 41, (False, LimitExceeded(Limit.DEPARTMENT, 100, 60))),
        ([("optics", "bob", 100)], "course", 50, (True, None)),
    ],
)
def test_a_limit_refuses_the_server_that_would_exceed_it(
    running: list[tuple[str, str, int]], group: str, units: int, expected: tuple[bool, LimitExceeded | None]
) -> None:
    account = ACCOUNTS.find(f"group:{group}", "eve")
    found = admit(usage(*running), account, "eve", units)
    assert (found.in_quota, found.refused) == expected
    assert found.account is account
