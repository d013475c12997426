"""How a pod is pinned to a node: by the node's name, in every term of the required node affinity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

HOSTNAME_LABEL = "kubernetes.io/hostname"
"""A node label that admins pin servers with. Its value can differ from the node's name, so sessions are not pinned with
it; pods of earlier releases are."""

NAME_FIELD = "metadata.name"
"""The only field of a node that an affinity term can match (kubernetes pkg/apis/core/validation)."""

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def pinned(affinity: Mapping[str, Any] | None, node: str) -> dict[str, Any]:
    """Return a pod's affinity with one node as the only one that will do."""
    return required_of_node(affinity, "matchFields", [_field("In", node)])


def kept_off(affinity: Mapping[str, Any] | None, nodes: Iterable[str]) -> dict[str, Any]:
    """Return a pod's affinity with some nodes, at least one, as ones that will not do."""
    # the API server takes one value in each (kubernetes pkg/apis/core/validation)
    return required_of_node(affinity, "matchFields", [_field("NotIn", node) for node in sorted(nodes)])


def node_of(spec: Mapping[str, Any]) -> str:
    """Return the node that a pod is on, or is pinned to; empty where it can still be on several."""
    if spec.get("nodeName"):
        return str(spec["nodeName"])
    node_affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    named = {
        value
        for term in (node_affinity.get(_REQUIRED) or {}).get("nodeSelectorTerms") or []
        for field in term.get("matchFields") or []
        if field.get("key") == NAME_FIELD and field.get("operator") == "In"
        for value in field.get("values") or []
    }
    if len(named) == 1:
        return str(named.pop())
    return str((spec.get("nodeSelector") or {}).get(HOSTNAME_LABEL) or "")


def _field(operator: str, node: str) -> dict[str, Any]:
    return {"key": NAME_FIELD, "operator": operator, "values": [node]}


def required_of_node(
    affinity: Mapping[str, Any] | None, what: str, conditions: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a pod's affinity that also requires this of its node. ``what``: matchFields or matchExpressions.

    Terms are alternatives of each other, hence the conditions go into each of them.
    """
    affinity = affinity or {}
    node_affinity = affinity.get("nodeAffinity") or {}
    required = node_affinity.get(_REQUIRED) or {}
    terms = [
        {**term, what: [*(term.get(what) or []), *conditions]} for term in required.get("nodeSelectorTerms") or [{}]
    ]
    return {**affinity, "nodeAffinity": {**node_affinity, _REQUIRED: {**required, "nodeSelectorTerms": terms}}}
