"""What the scheduler's messages say of the node that a pod is pinned to."""

from __future__ import annotations

import pytest

from gpushare_spawner.spawner.kubernetes.attempt import Cause, own_reasons, unschedulable
from gpushare_spawner.wording.spawn_failures import missing

from .parts import pod


@pytest.mark.parametrize(
    ("said", "reasons"),
    [
        ("0/1 nodes are available: 1 Insufficient cpu.", ("Insufficient cpu",)),
        (
            "0/3 nodes are available: 1 Insufficient cpu, 1 Insufficient memory, 2 node(s) didn't match Pod's node "
            "affinity/selector. preemption: 0/3 nodes are available: 1 No preemption victims found for incoming pod, "
            "2 Preemption is not helpful for scheduling.",
            ("Insufficient cpu", "Insufficient memory"),
        ),
        (
            "0/2 nodes are available: 1 node(s) had untolerated taint {node.kubernetes.io/not-ready: }, 1 node(s) "
            "didn't satisfy plugin(s) [NodeAffinity]. no new claims to deallocate, preemption: 0/2 nodes ...",
            ("node(s) had untolerated taint {node.kubernetes.io/not-ready: }",),
        ),
        (
            "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.",
            ("node(s) didn't match Pod's node affinity/selector",),
        ),
        (
            "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims. preemption: 0/1 nodes",
            ("pod has unbound immediate PersistentVolumeClaims",),
        ),
        ("no nodes available to schedule pods", ("no nodes available to schedule pods",)),
        ("", ("Unschedulable",)),
    ],
)
def test_reasons_of_nodes_that_the_pod_is_not_placed_on_are_left_out(said: str, reasons: tuple[str, ...]) -> None:
    assert own_reasons(said) == reasons


def test_a_feature_gate_that_is_off_in_the_scheduler_is_no_fault_of_the_node() -> None:
    said = (
        'running "DynamicResources" filter plugin: claim hub/ada, request gpu-0: has capacity requests, but the '
        "DRAConsumableCapacity feature is disabled"
    )
    condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulerError", "message": said}
    found = unschedulable(pod(conditions=[condition]))
    assert found is not None
    assert found.causes == {Cause.GATE}
    assert not found.concerns_node
    assert missing(found.reasons) == "the feature gate DRAConsumableCapacity is off in the cluster's scheduler"
    # other errors of the scheduler pass
    assert unschedulable(pod(conditions=[{**condition, "message": "the API server does not answer"}])) is None


def test_a_pod_that_is_scheduled_or_gated_is_not_unschedulable() -> None:
    scheduled = {"type": "PodScheduled", "status": "True"}
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "gates"}
    assert unschedulable(pod(conditions=[scheduled])) is None
    assert unschedulable(pod(conditions=[gated])) is None
    assert unschedulable(pod()) is None
