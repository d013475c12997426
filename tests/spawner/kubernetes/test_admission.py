"""Whether a node takes a pod: what is asked of the watch, and when the pod is given up."""

from __future__ import annotations

from typing import Any

import pytest

from gpushare_spawner.spawner.kubernetes.attempt import LASTS, Cause, NotAdmitted, PodAdmission

from .parts import not_admitted, pod


def refused(reasons: str, nominated: str = "") -> dict[str, Any]:
    """A pod that the scheduler finds no node for."""
    message = f"0/1 nodes are available: {reasons}."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return pod(conditions=[condition], **({"nominatedNodeName": nominated} if nominated else {}))


UNITS, CPU = "1 Insufficient gpushare-spawner.io/gpu-3", "1 Insufficient cpu"
NOT_READY = "1 node(s) had untolerated taint {node.kubernetes.io/not-ready: }"
CLAIM = "pod has unbound immediate PersistentVolumeClaims"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def admission(clock: Clock) -> PodAdmission:
    return PodAdmission("token-1", "node-a", clock)


def never(pod: Any) -> bool:
    return False


def test_a_pod_that_runs_is_admitted(admission: PodAdmission) -> None:
    assert not admission.runs(None, never)
    assert admission.runs(pod("Running"), lambda seen: seen["status"]["phase"] == "Running")


def test_a_pod_that_its_node_refused_is_not_admitted(admission: PodAdmission) -> None:
    with pytest.raises(NotAdmitted, match=r"Node node-a could not give the server its GPU.*no healthy devices"):
        admission.runs(not_admitted(), never)


def test_another_pod_of_that_name_says_nothing_of_this_one(admission: PodAdmission) -> None:
    old = not_admitted()
    old["metadata"]["annotations"]["gpushare-spawner.io/reservation"] = "token-0"
    assert not admission.runs(old, never)


def test_the_same_pod_is_looked_at_once(admission: PodAdmission) -> None:
    asked = []
    seen = pod()
    for _ in range(3):
        assert not admission.runs(seen, lambda pod: bool(asked.append(pod)))  # type: ignore[func-returns-value]
    assert asked == [seen]


@pytest.mark.parametrize(
    ("reasons", "cause", "said"),
    [
        (UNITS, Cause.UNITS, "Node node-a cannot take the server: it does not offer the units of the GPU"),
        (CPU, Cause.NODE, "Node node-a cannot take the server: it has too little free CPU"),
        (NOT_READY, Cause.NOT_READY, "Node node-a cannot take the server: it is not ready"),
        (CLAIM, Cause.CLAIM, "The server cannot start: a persistent volume claim of the server is not bound"),
    ],
)
def test_what_stays_missing_is_a_refusal_after_a_while(
    admission: PodAdmission, clock: Clock, reasons: str, cause: Cause, said: str
) -> None:
    assert not admission.runs(refused(reasons), never)
    clock.now += LASTS[cause] - 0.1
    # another version of the pod: it is missing since the first one
    seen = refused(reasons)
    assert not admission.runs(seen, never)
    clock.now += 0.2
    with pytest.raises(NotAdmitted, match=said) as error:
        admission.runs(seen, never)
    assert error.value.distrust == (cause is Cause.UNITS)
    assert error.value.elsewhere == (cause is not Cause.CLAIM)
    assert reasons in error.value.detail


def test_what_comes_back_in_time_is_no_refusal(admission: PodAdmission, clock: Clock) -> None:
    assert not admission.runs(refused(UNITS), never)
    assert not admission.runs(pod(), never)
    clock.now += 2 * LASTS[Cause.UNITS]
    assert not admission.runs(pod(), never)


def test_a_reason_of_another_kind_has_its_own_time(admission: PodAdmission, clock: Clock) -> None:
    assert not admission.runs(refused(NOT_READY), never)
    clock.now += 2 * LASTS[Cause.NODE]
    assert not admission.runs(refused(CPU), never)
    clock.now += LASTS[Cause.NODE]
    with pytest.raises(NotAdmitted, match="too little free CPU"):
        admission.runs(refused(CPU), never)


def test_a_pod_that_waits_for_preempted_pods_is_not_refused(admission: PodAdmission, clock: Clock) -> None:
    for _ in range(10):
        assert not admission.runs(refused(CPU, nominated="node-a"), never)
        clock.now += LASTS[Cause.NODE]


def test_a_pod_for_which_a_node_is_added_is_not_refused(clock: Clock) -> None:
    scaling = True
    added = {"reason": "TriggeredScaleUp"}
    admission = PodAdmission("token-1", "node-a", clock, events=lambda: [added] if scaling else [])
    seen = refused(CPU)
    for _ in range(10):
        assert not admission.runs(seen, never)
        clock.now += LASTS[Cause.NODE] / 2
    scaling = False
    clock.now += LASTS[Cause.NODE]
    with pytest.raises(NotAdmitted):
        admission.runs(seen, never)


def not_prepared(message: str, uid: str = "u-1", reason: str = "FailedPrepareDynamicResources") -> dict[str, Any]:
    """An event about a pod with a claim."""
    return {"reason": reason, "message": message, "involvedObject": {"name": "jupyter-ada", "uid": uid}}


def claiming() -> dict[str, Any]:
    waiting = pod()
    waiting["spec"]["resourceClaims"] = [{"name": "gpushare", "resourceClaimName": "jupyter-ada-1"}]
    return waiting


def test_a_claim_that_the_agent_cannot_prepare_is_not_admitted() -> None:
    said = "Failed to prepare dynamic resources: prepare failed for claim ada-1: gpushare: GPU 0 has 0 free units"
    admission = PodAdmission("token-1", "node-a", events=lambda: [not_prepared(said)])
    waiting = claiming()
    assert not admission.runs(waiting, never)
    with pytest.raises(NotAdmitted, match=r"could not give the server its GPU share.*GPU 0 has 0 free units") as error:
        admission.runs(waiting, never)
    assert error.value.distrust
    assert error.value.elsewhere


@pytest.mark.parametrize(
    "event",
    [
        # the agent starts anew: the kubelet asks again by itself
        not_prepared("Failed to prepare dynamic resources: DRA driver gpushare-spawner.io is not registered"),
        not_prepared("gpushare: of an earlier pod", uid="u-0"),
        not_prepared("gpushare: something else", reason="Scheduled"),
    ],
)
def test_other_events_keep_no_pod_from_its_node(event: dict[str, Any]) -> None:
    admission = PodAdmission("token-1", "node-a", events=lambda: [event])
    waiting = claiming()
    assert not any(admission.runs(waiting, never) for _ in range(3))


def test_what_the_scheduler_says_of_claims_is_waited_for_as_for_units(admission: PodAdmission, clock: Clock) -> None:
    assert not admission.runs(refused("1 cannot allocate all claims"), never)
    clock.now += LASTS[Cause.UNITS] - 1
    assert not admission.runs(refused("1 cannot allocate all claims"), never)
    clock.now += 2
    with pytest.raises(NotAdmitted, match="does not offer the share of the GPU that its agent reports"):
        admission.runs(refused("1 cannot allocate all claims"), never)
