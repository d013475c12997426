"""What a spawner's settings say of its pod: the node that they pin it to, the nodes that can take it, its requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from kubernetes_asyncio.client.models import V1NodeSelectorTerm, V1Toleration

from gpushare_spawner.model.kubernetes.objects import HOSTNAME_LABEL, NodeFacts, PodConstraints
from gpushare_spawner.placement.node import Requested
from gpushare_spawner.spawner.kubernetes.pod import CONSTRAINING, pinned_node, pod_constraints, requested

PLAIN: Mapping[str, Any] = {
    "node_selector": {}, "node_affinity_required": [], "tolerations": [], "extra_pod_config": {},
    "modify_pod_hook": None,
}  # fmt: skip
SMALL: Mapping[str, Any] = {
    "cpu_guarantee": 1, "mem_guarantee": 2**30, "extra_resource_guarantees": {}, "cpu_limit": None, "mem_limit": None,
    "extra_resource_limits": {}, "extra_containers": [], "init_containers": [],
}  # fmt: skip


def constraints(**settings: Any) -> PodConstraints | None:
    return pod_constraints({**PLAIN, **settings}, list)


def test_the_settings_are_those_that_are_read() -> None:
    assert set(CONSTRAINING) == set(PLAIN)


def test_what_settings_demand_of_nodes_is_the_same_for_models_and_dicts() -> None:
    toleration: dict[str, Any] = {"key": "gpu", "operator": "Exists", "toleration_seconds": 5}
    term: dict[str, Any] = {"match_expressions": [{"key": "a", "operator": "In", "values": ["b"]}]}
    zone = {"zone": "x"}
    by_dict = constraints(node_selector=zone, node_affinity_required=[term], tolerations=[toleration])
    assert by_dict == constraints(
        node_selector=zone,
        node_affinity_required=[V1NodeSelectorTerm(match_expressions=term["match_expressions"])],
        tolerations=[V1Toleration(**toleration)],
    )
    assert by_dict is not None
    assert by_dict.accept(NodeFacts("n", {"zone": "x", "a": "b"}, (("gpu", "", "NoSchedule"),)))
    assert not by_dict.accept(NodeFacts("n", {"zone": "x"}))


@pytest.mark.parametrize("key", ["nodeSelector", "node_selector", "tolerations", "affinity"])
def test_nothing_is_ruled_out_where_extra_pod_config_may_change_what_is_demanded(key: str) -> None:
    assert constraints(extra_pod_config={key: {}}) is None


def test_nothing_is_ruled_out_where_a_hook_may_change_what_is_demanded() -> None:
    assert constraints(node_selector={"zone": "x"}, modify_pod_hook=lambda spawner, pod: pod) is None


@pytest.mark.parametrize(
    ("selector", "extra", "node"),
    [
        ({}, {}, ""),
        ({HOSTNAME_LABEL: "a"}, {}, "a"),
        ({HOSTNAME_LABEL: "a"}, {"nodeSelector": {HOSTNAME_LABEL: "b"}}, "b"),
        ({}, {"node_selector": {HOSTNAME_LABEL: "c"}}, "c"),
        ({"zone": "x"}, {"node_selector": None}, ""),
    ],
)
def test_the_node_that_settings_pin_a_server_to(selector: dict[str, str], extra: dict[str, Any], node: str) -> None:
    assert pinned_node({**PLAIN, "node_selector": selector, "extra_pod_config": extra}) == node


def test_a_limit_without_a_guarantee_is_requested_as_kubernetes_does() -> None:
    assert requested(SMALL) == Requested(1000, 2**30, pods=1)
    assert requested({**SMALL, "cpu_guarantee": None, "cpu_limit": 2}) == Requested(2000, 2**30, pods=1)
    side = [{"name": "side", "resources": {"requests": {"cpu": "500m"}}}]
    assert requested({**SMALL, "extra_containers": side}) == Requested(1500, 2**30, pods=1)
