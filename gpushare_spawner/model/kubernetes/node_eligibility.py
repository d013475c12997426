"""Whether a node's taints and labels accept a pod, by the rules of the cluster's scheduler."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gpushare_spawner.model.kubernetes.objects import NAME_FIELD

_KEEP_OUT = ("NoSchedule", "NoExecute")
"""Effects of taints that the scheduler obeys; PreferNoSchedule is a preference."""

_PASSING = (
    "node.kubernetes.io/",
    "node.cloudprovider.kubernetes.io/",
    "startup-taint.cluster-autoscaler.kubernetes.io/",
    "status-taint.cluster-autoscaler.kubernetes.io/",
    "ToBeDeletedByClusterAutoscaler",
    "karpenter.sh/",
    "node.cilium.io/agent-not-ready",
    "ebs.csi.aws.com/agent-not-ready",
    "efs.csi.aws.com/agent-not-ready",
    "cloud.google.com/impending-node-termination",
)
"""Prefixes of the keys of temporary taints, which Kubernetes, autoscalers (cluster-autoscaler, Karpenter), clouds, and
agents of networks and volumes set and remove: a node is not ready, is being drained, or is being added. Spawns wait for
such a node, or try another. Source: the documentation of each."""


@dataclass(frozen=True)
class NodeFacts:
    """The labels and lasting taints of a node, which decide whether it accepts a pod regardless of free capacity."""

    name: str
    labels: Mapping[str, str]
    taints: tuple[tuple[str, str, str], ...] = ()
    """Key, value and effect of each taint that keeps pods out for longer than a moment."""

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> NodeFacts:
        """Read a node from the API server's JSON."""
        metadata, taints = node["metadata"], (node.get("spec") or {}).get("taints") or []
        lasting = (
            (taint["key"], taint.get("value") or "", taint["effect"])
            for taint in taints
            if taint.get("effect") in _KEEP_OUT and not taint["key"].startswith(_PASSING)
        )
        return cls(metadata["name"], dict(metadata.get("labels") or {}), tuple(lasting))


@dataclass(frozen=True)
class PodConstraints:
    """A pod's conditions on labels of nodes, and its tolerations. Equal pods have equal constraints."""

    written: str
    """JSON: `nodeSelector`, `terms` (alternatives of required node affinity) and `tolerations` as in a pod's spec."""

    @classmethod
    def of(cls, node_selector: Mapping[str, str], terms: list[Any], tolerations: list[Any]) -> PodConstraints:
        """Build the constraints from three parts of a pod's spec, in the API server's form."""
        parts = {"nodeSelector": dict(node_selector), "terms": terms, "tolerations": tolerations}
        return cls(json.dumps(parts, sort_keys=True))

    @cached_property
    def _parts(self) -> Mapping[str, Any]:
        parts: Mapping[str, Any] = json.loads(self.written)
        return parts

    def accept(self, node: NodeFacts) -> bool:
        """Return whether the node accepts the pod, regardless of free capacity."""
        if any(node.labels.get(label) != value for label, value in self._parts["nodeSelector"].items()):
            return False
        terms = self._parts["terms"]
        if terms and not any(_matches(term, node) for term in terms):
            return False
        return all(any(_tolerates(each, taint) for each in self._parts["tolerations"]) for taint in node.taints)

    def rejected(self, nodes: Iterable[NodeFacts]) -> frozenset[str]:
        """Return the names of the nodes that `accept` refuses; nodes with equal relevant labels are checked once."""
        named = {each["key"] for term in self._parts["terms"] for each in term.get("matchExpressions") or []}
        keys = sorted({*self._parts["nodeSelector"], *named})
        by_name = any(term.get("matchFields") for term in self._parts["terms"])
        judged: dict[tuple[Any, ...], bool] = {}
        rejected = []
        for node in nodes:
            alike = (node.taints, *map(node.labels.get, keys), node.name if by_name else None)
            accepted = judged.get(alike)
            if accepted is None:
                accepted = judged[alike] = self.accept(node)
            if not accepted:
                rejected.append(node.name)
        return frozenset(rejected)


def _matches(term: Mapping[str, Any], node: NodeFacts) -> bool:
    expressions, fields = term.get("matchExpressions") or [], term.get("matchFields") or []
    # a term without a condition matches no node (kubernetes component-helpers/scheduling/corev1/nodeaffinity)
    return bool(expressions or fields) and (
        all(_holds(each, node.labels) for each in expressions)
        and all(_holds(each, {NAME_FIELD: node.name}) for each in fields)
    )


def _holds(condition: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, values = labels.get(condition["key"]), condition.get("values") or []
    match condition["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            with contextlib.suppress(ValueError, IndexError):
                difference = int(value or "") - int(values[0])
                return difference > 0 if operator == "Gt" else difference < 0
            return False
    # an operator of a later Kubernetes: the scheduler decides
    return True


def _tolerates(toleration: Mapping[str, Any], taint: tuple[str, str, str]) -> bool:
    key, value, effect = taint
    if toleration.get("effect") not in (None, "", effect):
        return False
    operator = toleration.get("operator") or "Equal"
    if operator == "Equal":
        return toleration.get("key") == key and (toleration.get("value") or "") == value
    # operators of later versions, like Gt, compare values: the scheduler decides
    return not toleration.get("key") or toleration["key"] == key
