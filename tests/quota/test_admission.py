"""Limits of a quota: the maximum, servers, and servers of one user."""

from __future__ import annotations

import pytest

from gpushare_spawner.model.quota import Quotas, Resource, ResourceAmounts
from gpushare_spawner.model.template import Template
from gpushare_spawner.quota.accounts import Charge, QuotaAccounts, QuotaUsage, needs_of
from gpushare_spawner.quota.order import Asking, Limit, LimitExceeded, admit, divided
from gpushare_spawner.spawner.queue.snapshot import guaranteed_resources
from gpushare_spawner.wording.service import exceeded as exceeded_text

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


def made(**fields: object) -> Template:
    return Template.model_validate({"name": "t", "display_name": "T", "gpu": {"fraction": 0.5}, **fields})


def test_a_priority_that_the_quota_does_not_allow_is_refused() -> None:
    accounts = QuotaAccounts(Quotas.model_validate({"groups": {"course": {"priorities": ["low", "normal"]}}}))
    course = accounts.find("group:course", "")
    needs = ResourceAmounts(50)
    assert admit(QuotaUsage(accounts), course, "eve", needs, made()).refused is None
    refused = admit(QuotaUsage(accounts), course, "eve", needs, made(priority="high")).refused
    assert refused == LimitExceeded(course, Limit.PRIORITY, 0, 0)
    assert exceeded_text(refused, needs) == (
        "This template's priority is not allowed with the quota of group course: choose one with priority low or "
        "normal."
    )


def test_a_server_that_cannot_be_reclaimed_is_admitted_within_the_guarantee_only() -> None:
    accounts = QuotaAccounts(Quotas.model_validate({"groups": {"course": {"guarantee": 0.5}}}))
    course, needs, kept = accounts.find("group:course", ""), ResourceAmounts(50), made(reclaimable=False)
    # a server that can be reclaimed makes way for it
    used = QuotaUsage(accounts)
    used.put(Charge("0", "bob", course, needs, 0.0))
    admission = admit(used, course, "eve", needs, kept)
    assert (admission.refused, admission.in_quota) == (None, True)
    assert divided([Asking("eve", course, needs, reclaimable=False)], used)[0]
    used.put(Charge("kept", "eve", course, needs, 99.0, reclaimable=False))
    assert used.in_quota("kept")
    assert not used.in_quota("0")
    refused = admit(used, course, "ann", ResourceAmounts(10), kept).refused
    assert refused == LimitExceeded(course, Limit.GUARANTEE, 0, 0)
    assert "0 GPU of the quota of group course is left for such servers" in exceeded_text(refused, needs)
    assert admit(used, course, "ann", ResourceAmounts(10), made()).refused is None
    assert admit(QuotaUsage(ACCOUNTS), ACCOUNTS.find("", "eve"), "eve", needs, kept).refused is not None


def test_a_server_with_exactly_the_guaranteed_cpu_is_in_quota() -> None:
    for cores in (4.03, 16.12, 0.1, 2.3):
        quotas = Quotas.model_validate({"groups": {"course": {"cpu": {"guarantee": cores, "maximum": cores}}}})
        server = Template.model_validate({"name": "t", "display_name": "T", "resources": {"cpu": {"guarantee": cores}}})
        accounts = QuotaAccounts(quotas)
        admission = admit(QuotaUsage(accounts), accounts.find("group:course", ""), "eve", needs_of(server, quotas))
        assert (admission.refused, admission.in_quota) == (None, True)
        assert guaranteed_resources(server).cpu == round(cores * 1000)
