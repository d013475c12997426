"""On a cluster that others use too: a test's pods run on the test's own nodes, and nobody else's pods do.

The nodes have a taint and a label of the test; every pod that the test makes gets what goes with them.
"""

from __future__ import annotations

import copy
from typing import Any

LABEL = "gpushare-spawner.io/test"
"""Of nodes, namespaces and cluster roles that tests have made; its value tells the test."""


def taint(test: str) -> dict[str, str]:
    """Of the test's nodes."""
    return {"key": LABEL, "value": test, "effect": "NoSchedule"}


def kept_to(pod: dict[str, Any], test: str) -> dict[str, Any]:
    """A pod that is to be made, for the test's nodes only. Its node selector, which tests look at, stays as it is."""
    pod = copy.deepcopy(pod)
    spec = pod.setdefault("spec", {})
    tolerations = spec.get("tolerations") or []
    spec["tolerations"] = [*tolerations, {"key": LABEL, "operator": "Equal", "value": test, "effect": "NoSchedule"}]
    affinity = spec["affinity"] = spec.get("affinity") or {}
    on_nodes = affinity["nodeAffinity"] = affinity.get("nodeAffinity") or {}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = (on_nodes.get(required) or {}).get("nodeSelectorTerms") or [{}]
    # any of the terms is enough, so each of them gets it
    for term in terms:
        own = {"key": LABEL, "operator": "In", "values": [test]}
        term["matchExpressions"] = [*(term.get("matchExpressions") or []), own]
    on_nodes[required] = {"nodeSelectorTerms": terms}
    return pod
