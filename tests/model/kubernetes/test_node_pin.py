"""Pods that are pinned to a node by its name."""

from __future__ import annotations

from typing import Any

import pytest

from gpushare_spawner.model.kubernetes.objects import HOSTNAME_LABEL, excluding, node_of, pinned

NAMED = {"key": "metadata.name", "operator": "In", "values": ["node-a"]}
ZONE = {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}


def required(*terms: dict[str, Any]) -> dict[str, Any]:
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, required({"matchFields": [NAMED]})),
        (required(ZONE, {}), required({**ZONE, "matchFields": [NAMED]}, {"matchFields": [NAMED]})),
        ({"podAffinity": {"x": 1}}, {"podAffinity": {"x": 1}, **required({"matchFields": [NAMED]})}),
    ],
)
def test_the_name_goes_into_every_term(before: Any, after: Any) -> None:
    assert pinned(before, "node-a") == after
    assert node_of({"affinity": after}) == "node-a"


def test_pods_are_kept_off_nodes_by_one_field_for_each() -> None:
    off = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in ("node-a", "node-b")]
    assert excluding(None, {"node-b", "node-a"}) == required({"matchFields": off})
    affinity = excluding(pinned(required(ZONE), "node-c"), {"node-a", "node-b"})
    assert affinity == required({**ZONE, "matchFields": [{**NAMED, "values": ["node-c"]}, *off]})
    assert node_of({"affinity": affinity}) == "node-c"


@pytest.mark.parametrize(
    ("spec", "node"),
    [
        ({}, ""),
        ({"nodeName": "node-b", "affinity": pinned(None, "node-a")}, "node-b"),
        ({"nodeSelector": {HOSTNAME_LABEL: "node-c"}}, "node-c"),
        ({"affinity": required({"matchFields": [NAMED]}, {"matchFields": [{**NAMED, "values": ["node-b"]}]})}, ""),
    ],
)
def test_the_node_of_a_pod(spec: dict[str, Any], node: str) -> None:
    assert node_of(spec) == node
