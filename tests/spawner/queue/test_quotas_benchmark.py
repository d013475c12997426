"""The simulation of quotas: what it counts is right, and a short run keeps the guarantees."""

from __future__ import annotations

import pytest

from benchmarks.quotas import entitled, simulate


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"a": 90, "b": 90}, {"a": 60, "b": 40}),
        ({"a": 20, "b": 90}, {"a": 20, "b": 80}),
        ({"a": 20, "b": 30}, {"a": 20, "b": 30}),
        ({"a": 90, "b": 0}, {"a": 90, "b": 0}),
    ],
)
def test_a_group_is_entitled_to_its_guarantee_and_its_part_of_the_rest(
    asked: dict[str, int], expected: dict[str, float]
) -> None:
    assert entitled(asked, {"a": 60, "b": 40}, 100) == expected


def test_what_two_groups_leave_is_divided_evenly() -> None:
    found = entitled({"a": 10, "b": 90, "c": 90}, {"a": 50, "b": 30, "c": 20}, 100)
    assert found == {"a": 10, "b": 50, "c": 40}


@pytest.mark.slow
async def test_all_groups_over_their_guarantees_receive_them_and_no_gpu_is_idle() -> None:
    run = await simulate(gpus=20, hours=0.6, seed=1, shares=[0.25])
    assert max(run.phases[0].errors.values()) < 0.02
    assert run.phases[0].seconds > 1800
    assert run.idle_while_waiting == 0
