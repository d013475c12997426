"""What the scheduler says of a pod that it finds no node for: what is missing, and how long that can be waited for.

Whether the wait is over is decided in `admission`; the sentences are in `wording.scheduler`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gpushare_spawner.model.kubernetes import RESOURCE_PREFIX

UNSCHEDULABLE = "Unschedulable"
"""Kubernetes' word for a pod that the scheduler finds no node for."""

CLAIMS = "cannot allocate all claims"
"""What the scheduler says where a claim of the pod cannot be allocated (its plugin dynamicresources, 1.34 to 1.36)."""

SCHEDULER_ERROR = "SchedulerError"
"""Kubernetes' word for a pod at which the scheduler failed."""
GATE_OFF = "feature is disabled"
"""What the scheduler says where a claim needs a feature gate that is off there and on in the API server (kubernetes
dynamic-resource-allocation/structured, 1.34 to 1.36)."""

TRIGGERED_SCALE_UP = "TriggeredScaleUp"
"""Reason of the event by which the cluster autoscaler says that it adds a node for a pod."""


class Cause(Enum):
    """Kinds of reasons."""

    UNITS = "units"
    """The node's status, or its ResourceSlice, lacks units of a GPU."""
    NOT_READY = "not ready"
    """The node is being added, or its kubelet restarts."""
    CLAIM = "claim"
    """A volume claim is not bound. No other node helps."""
    GATE = "gate"
    """A feature gate of the scheduler is off. No other node helps."""
    NODE = "node"
    """Anything else about the node: CPU, memory, pods, taints, affinity, volumes."""


LASTS: dict[Cause, float] = {
    # units that idle neighbours have lent reach the status within 10 s (the kubelet's nodeStatusUpdateFrequency)
    Cause.UNITS: 15.0,
    # the node lifecycle controller waits 50 s for a kubelet (node-monitor-grace-period)
    Cause.NOT_READY: 60.0,
    # ours: a scheduler that is updated may be replaced just then
    Cause.GATE: 5.0,
    # ours: provisioners of cloud disks take 10 to 40 s
    Cause.CLAIM: 60.0,
    # ours: another pod of the node may just be ending
    Cause.NODE: 5.0,
}
"""Seconds for which a reason of each kind may last. Then the pod counts as not admitted."""


@dataclass(frozen=True)
class Unschedulable:
    """The scheduler's reasons that concern the pod's own node."""

    reasons: tuple[str, ...]
    said: str
    """All that the scheduler says."""

    @property
    def causes(self) -> frozenset[Cause]:
        """The kinds of the reasons."""
        return frozenset(_cause(reason) for reason in self.reasons)

    @property
    def concerns_node(self) -> bool:
        """Whether another node can help."""
        return not self.causes <= {Cause.CLAIM, Cause.GATE}


def unschedulable(pod: Mapping[str, Any]) -> Unschedulable | None:
    """Return what keeps a pod from its node; None where it is not unschedulable, or waits for pods that it preempts."""
    status = pod.get("status") or {}
    if status.get("nominatedNodeName"):
        # the scheduler has preempted pods there: the node is free once they have ended
        return None
    for condition in status.get("conditions") or []:
        if condition.get("type") != "PodScheduled" or condition.get("status") != "False":
            continue
        said = str(condition.get("message") or "")
        if condition.get("reason") == UNSCHEDULABLE:
            return Unschedulable(own_reasons(said), said)
        # most of its errors pass, as where the API server does not answer
        if condition.get("reason") == SCHEDULER_ERROR and GATE_OFF in said:
            return Unschedulable((said,), said)
    return None


def own_reasons(said: str) -> tuple[str, ...]:
    """Return the reasons in the scheduler's message, without those of nodes that the pod was not placed on.

    The message counts nodes by reason: "0/3 nodes are available: 1 Insufficient cpu, 2 node(s) didn't match Pod's node
    affinity/selector. preemption: ...". A pod is pinned to one node, so the others do not match it.
    """
    found = re.match(r"\d+/\d+ nodes are available: (.*?)\.(?:\s|$)", said, re.DOTALL)
    if found is None:
        return (said,) if said else (UNSCHEDULABLE,)
    parts = [re.sub(r"^\d+ ", "", part) for part in re.split(r", (?=\d+ )", found[1])]
    own = [part for part in parts if not _mismatch(part)]
    return tuple(own or parts)


def _mismatch(reason: str) -> bool:
    return reason.endswith(("affinity/selector", "didn't match node selector", "plugin(s) [NodeAffinity]"))


def _cause(reason: str) -> Cause:
    if GATE_OFF in reason:
        return Cause.GATE
    # of claims the scheduler says no more, whatever the cause is
    if RESOURCE_PREFIX in reason or CLAIMS in reason:
        return Cause.UNITS
    if "node.kubernetes.io/not-ready" in reason or "node.kubernetes.io/unreachable" in reason:
        return Cause.NOT_READY
    if "unbound immediate PersistentVolumeClaims" in reason or reason.startswith("persistentvolumeclaim "):
        return Cause.CLAIM
    return Cause.NODE
