"""What a user reads of a quota that stands in the way: the quota, what is lacking, and what would be right."""

from __future__ import annotations

import pytest

from gpushare_spawner.model.quota import Quota, Resource, ResourceAmounts
from gpushare_spawner.quota.accounts import Account
from gpushare_spawner.quota.order import Admission, Limit, LimitExceeded
from gpushare_spawner.wording.service import exceeded, on_card, over_quota_waits

SCIENCE = Account("group:science", Quota())
OPTICS = Account("group:optics", Quota(), SCIENCE)
NEEDS = ResourceAmounts(50, 1500, 2**32)
GIB = 2**30


@pytest.mark.parametrize(
    ("resource", "most", "used", "expected"),
    [
        (
            Resource.GPU,
            100,
            75,
            "This needs 0.50 GPU, and the quota of group science is limited to 1 GPU, of which 0.75 GPU is in use. "
            "Choose a smaller share, or try again when a server of this quota has stopped.",
        ),
        (
            Resource.CPU,
            2000,
            1000,
            "This needs 1.5 CPU cores, and the quota of group science is limited to 2 CPU cores, of which 1 CPU core "
            "is in use. Choose a template with at most 1 CPU core, or try again when a server of this quota has "
            "stopped.",
        ),
        (
            Resource.MEMORY,
            6 * GIB,
            7 * GIB,
            "This needs 4 GiB of memory, and the quota of group science is limited to 6 GiB of memory, of which 7 GiB "
            "of memory is in use. Try again when a server of this quota has stopped.",
        ),
    ],
)
def test_a_refusal_names_the_level_the_resource_and_what_is_left(
    resource: Resource, most: int, used: int, expected: str
) -> None:
    assert exceeded(LimitExceeded(SCIENCE, Limit.MAXIMUM, most, used, resource), NEEDS) == expected


@pytest.mark.parametrize(
    ("admission", "expected"),
    [
        (Admission(OPTICS, left=ResourceAmounts(75, 4000), needs=NEEDS), "in quota, 0.75 GPU and 4 CPU cores left"),
        (
            Admission(OPTICS, left=ResourceAmounts(75, 4000), needs=ResourceAmounts(0, 1000)),
            "in quota, 4 CPU cores left",
        ),
        (Admission(OPTICS, needs=ResourceAmounts(0, 1000)), "in quota"),
        (Admission(OPTICS, [Resource.GPU], needs=NEEDS), "over quota: spawns in quota come first"),
        (
            Admission(OPTICS, [Resource.CPU, Resource.MEMORY], ResourceAmounts(75, 500, 2 * GIB), needs=NEEDS),
            "over quota: spawns in quota come first (in quota: at most 0.5 CPU cores and 2 GiB of memory)",
        ),
        (
            Admission(OPTICS, refused=LimitExceeded(SCIENCE, Limit.MAXIMUM, 8000, 7000, Resource.CPU), needs=NEEDS),
            "you cannot start now: science: 7 CPU cores of at most 8 CPU cores in use",
        ),
        (
            Admission(OPTICS, refused=LimitExceeded(OPTICS, Limit.SERVERS, 3, 3), needs=NEEDS),
            "you cannot start now: 3 of at most 3 servers in use",
        ),
    ],
)
def test_a_card_says_what_a_spawn_would_be(admission: Admission, expected: str) -> None:
    assert on_card(admission) == expected


def test_a_spawn_that_waits_is_told_what_would_be_in_quota() -> None:
    waiting = Admission(OPTICS, [Resource.GPU], ResourceAmounts(25), needs=NEEDS)
    assert over_quota_waits(waiting) == (
        "Your spawn is over quota: spawns in quota come first (in quota: at most 0.25 GPU)."
    )
