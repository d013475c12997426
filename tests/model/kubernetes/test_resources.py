"""Resource names are those of GPUs' indices, and a limit never promises more than the scheduler sets aside."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from gpushare_spawner.model.kubernetes.objects import (
    UNITS_CAPACITY,
    claim_spec,
    gpu_index_of,
    resource_limits,
    resource_name,
)
from gpushare_spawner.model.share import Share


def test_limits_are_rounded_up_to_whole_devices() -> None:
    assert resource_limits(Share(25), [3]) == {"gpushare-spawner.io/gpu-3": "25"}
    assert resource_limits(Share(25), [0], unit_size=10) == {"gpushare-spawner.io/gpu-0": "3"}
    assert resource_limits(Share(100, 2), [0, 1], unit_size=5) == {
        "gpushare-spawner.io/gpu-0": "20",
        "gpushare-spawner.io/gpu-1": "20",
    }


def test_limits_and_claim_have_the_units_of_each_gpu() -> None:
    share = Share(100, 2, 50)
    assert resource_limits(share, [3, 1]) == {"gpushare-spawner.io/gpu-3": "100", "gpushare-spawner.io/gpu-1": "50"}
    requests = claim_spec("class", share, {"GPU-c": 2**30, "GPU-a": 2**30})["devices"]["requests"]
    capacities = [one["exactly"]["capacity"]["requests"] for one in requests]
    assert [capacity[UNITS_CAPACITY] for capacity in capacities] == ["100", "50"]


@given(some.integers(0, 999))
def test_resource_name_leads_back_to_the_index(index: int) -> None:
    assert gpu_index_of(resource_name(index)) == index


@pytest.mark.parametrize("other", ["nvidia.com/gpu", "gpushare-spawner.io/gpu-", "gpushare-spawner.io/gpu-01", "cpu"])
def test_other_resources_are_not_ours(other: str) -> None:
    assert gpu_index_of(other) is None
