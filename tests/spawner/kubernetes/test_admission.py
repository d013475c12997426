"""Whether a node takes a pod: what is asked of the watch, and when the pod is given up."""

from __future__ import annotations

from typing import Any

import pytest

from gpushare_spawner.spawner.kubernetes.admission import SCHEDULED_WITHIN, Admission, NotAdmitted

from .parts import not_admitted, pod

MISSING = {
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/1 nodes are available: 1 Insufficient gpushare-spawner.io/gpu-3.",
        }
    ]
}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def admission(clock: Clock) -> Admission:
    return Admission("token-1", "node-a", clock)


def never(pod: Any) -> bool:
    return False


def test_a_pod_that_runs_is_admitted(admission: Admission) -> None:
    assert not admission.runs(None, never)
    assert admission.runs(pod("Running"), lambda seen: seen["status"]["phase"] == "Running")


def test_a_pod_that_its_node_refused_is_not_admitted(admission: Admission) -> None:
    with pytest.raises(NotAdmitted, match=r"Node node-a could not give the server its GPU.*no healthy devices"):
        admission.runs(not_admitted(), never)


def test_another_pod_of_that_name_says_nothing_of_this_one(admission: Admission) -> None:
    old = not_admitted()
    old["metadata"]["annotations"]["gpushare-spawner.io/reservation"] = "token-0"
    assert not admission.runs(old, never)


def test_the_same_pod_is_looked_at_once(admission: Admission) -> None:
    asked = []
    seen = pod()
    for _ in range(3):
        assert not admission.runs(seen, lambda pod: bool(asked.append(pod)))
    assert asked == [seen]


def test_units_that_stay_missing_are_a_refusal_after_a_while(admission: Admission, clock: Clock) -> None:
    seen = pod(**MISSING)
    assert not admission.runs(seen, never)
    clock.now += SCHEDULED_WITHIN - 0.1
    # another version of the pod: they are missing since the first one
    assert not admission.runs(pod(**MISSING), never)
    clock.now += 0.2
    with pytest.raises(NotAdmitted, match="does not offer the units"):
        admission.runs(seen, never)


def test_units_that_come_back_in_time_are_no_refusal(admission: Admission, clock: Clock) -> None:
    assert not admission.runs(pod(**MISSING), never)
    assert not admission.runs(pod(), never)
    clock.now += 2 * SCHEDULED_WITHIN
    assert not admission.runs(pod(), never)
