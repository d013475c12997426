"""Time-slicing and MPS by NVIDIA's device plugin."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.layers_file import LayerRule, ReplicaOptions
from gpushare_spawner.sharing.base import ClusterFacts, ClusterNode, ClusterPod, LayerCannot, LayerCapacity
from gpushare_spawner.spawner.kubernetes.cluster.layers import POD_LAYERS
from tests.sharing.requests import A100, LOADED, POD, node, notebook, request, required

TIME_SLICING, MPS = POD_LAYERS[LayerName.TIME_SLICING], POD_LAYERS[LayerName.MPS]
STRATEGY, REPLICAS = "nvidia.com/gpu.sharing-strategy", "nvidia.com/gpu.replicas"
OPTIONS = ReplicaOptions()


def shared(
    name: str,
    replicas: int,
    gpus: int = 1,
    strategy: str = "time-slicing",
    *,
    resource: str = "nvidia.com/gpu.shared",
    product: str = A100,
) -> ClusterNode:
    labels = {STRATEGY: strategy, REPLICAS: str(replicas)}
    return node(name, product, labels=labels, allocatable={resource: replicas * gpus})


def test_fraction_becomes_one_replica_of_a_gpu_with_that_many() -> None:
    facts = ClusterFacts((shared("a", 4), shared("b", 10), shared("c", 2)))
    before = copy.deepcopy(POD)
    pod = TIME_SLICING.render(POD, request({"fraction": 0.25}, OPTIONS, facts))
    assert before == POD
    assert notebook(pod)["resources"] == {
        "limits": {"memory": "4Gi", "nvidia.com/gpu.shared": "1"},
        "requests": {"memory": "1Gi"},
    }
    assert required(pod) == {STRATEGY: ["time-slicing"], REPLICAS: ["4"]}
    assert pod["spec"]["containers"][0] == POD["spec"]["containers"][0]


def test_resource_is_the_plugins_own_where_it_is_not_renamed_or_what_the_admin_renamed_it_to() -> None:
    facts = ClusterFacts((shared("a", 4, resource="nvidia.com/gpu"),))
    pod = TIME_SLICING.render(POD, request({"fraction": 0.25}, OPTIONS, facts))
    assert notebook(pod)["resources"]["limits"]["nvidia.com/gpu"] == "1"
    named = TIME_SLICING.render(
        POD, request({"fraction": 0.25}, ReplicaOptions(resource="example.com/slice", replicas=4), facts)
    )
    assert notebook(named)["resources"]["limits"]["example.com/slice"] == "1"
    assert required(named) == {STRATEGY: ["time-slicing"]}


def test_whole_gpus_are_those_that_the_plugin_does_not_share() -> None:
    whole = node("w", labels={STRATEGY: "none", REPLICAS: "1"}, allocatable={"nvidia.com/gpu": 8})
    asked = request({"count": 2}, OPTIONS, ClusterFacts((whole, shared("a", 4))))
    pod = TIME_SLICING.render(POD, asked)
    assert notebook(pod)["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert required(pod) == {STRATEGY: ["none"]}
    assert TIME_SLICING.free(asked) == LayerCapacity(4, 4)


def test_replica_smaller_than_the_share_is_refused_with_what_there_is() -> None:
    facts = ClusterFacts((shared("a", 4), shared("b", 10)))
    with pytest.raises(LayerCannot, match=r"at most 2 replicas .*nodes have 4, 10"):
        TIME_SLICING.render(POD, request({"fraction": 0.5}, OPTIONS, facts))
    with pytest.raises(LayerCannot, match="there is no such node"):
        MPS.render(POD, request({"fraction": 0.5}, OPTIONS, facts))


def test_mps_replica_holds_the_guaranteed_memory_too() -> None:
    four, two = shared("a", 4, strategy="mps"), shared("b", 2, strategy="mps")
    asked = request({"fraction": 0.25, "memory": {"guarantee": "30Gi"}}, OPTIONS, ClusterFacts((four, two)))
    assert required(MPS.render(POD, asked))[REPLICAS] == ["2"]
    # with time-slicing a session can have all memory
    slicing = ClusterFacts((shared("a", 4), shared("b", 2)))
    asked = request({"fraction": 0.25, "memory": {"guarantee": "30Gi"}}, OPTIONS, slicing)
    assert required(TIME_SLICING.render(POD, asked))[REPLICAS] == ["4"]


def test_free_is_what_pods_leave_on_schedulable_nodes_and_what_cpu_has_room_for() -> None:
    nodes = (
        shared("a", 4, gpus=2),
        ClusterNode("b", shared("b", 4).labels, allocatable={"nvidia.com/gpu.shared": 4, "cpu": 3000, "pods": 110}),
        ClusterNode("c", shared("c", 4).labels, allocatable={"nvidia.com/gpu.shared": 4}, unschedulable=True),
    )
    pods = tuple(
        ClusterPod(f"pod-{place}", "other", on, requests={"nvidia.com/gpu.shared": 1, "cpu": 1000})
        for place, on in enumerate("aaab")
    )
    asked = request(
        {"fraction": 0.25}, OPTIONS, ClusterFacts(nodes, pods), resources={"cpu": {"guarantee": 1, "limit": 4}}
    )
    # a: 8 - 3; b: 3 replicas, but CPU for 2 more; c takes no pods now, and could
    assert TIME_SLICING.free(asked) == LayerCapacity(servers=5 + 2, at_most=8 + 3 + 4)


def test_rule_and_models_keep_the_pod_on_their_nodes() -> None:
    rule = LayerRule.model_validate({"nodes": {"pool": "teaching"}, "models": ["*T4*"], "layer": "time-slicing"})
    facts = ClusterFacts((shared("a", 4, product="Tesla-T4-SHARED"), shared("b", 4, product="Tesla-T4")))
    pod = TIME_SLICING.render(POD, request({"fraction": 0.25, "models": ["*t4*"]}, OPTIONS, facts, rule=rule))
    assert required(pod)["pool"] == ["teaching"]
    assert required(pod)["nvidia.com/gpu.product"] == ["Tesla-T4", "Tesla-T4-SHARED"]
    with pytest.raises(LayerCannot):
        TIME_SLICING.render(POD, request({"fraction": 0.25, "models": ["*A100*"]}, OPTIONS, facts))


@LOADED
@given(st.integers(1, 99), st.lists(st.sampled_from([2, 3, 4, 5, 7, 8, 10, 20, 48]), min_size=1, max_size=4).map(set))
def test_replica_is_never_less_than_the_share_and_no_larger_one_is_taken(units: int, offered: set[int]) -> None:
    facts = ClusterFacts(tuple(shared(f"n{replicas}", replicas) for replicas in offered))
    asked = request({"fraction": units / 100}, OPTIONS, facts)
    fit = [replicas for replicas in offered if replicas * units <= 100]
    if not fit:
        with pytest.raises(LayerCannot):
            TIME_SLICING.render(POD, asked)
    else:
        assert required(TIME_SLICING.render(POD, asked))[REPLICAS] == [str(max(fit))]
        assert TIME_SLICING.free(asked).servers == max(fit)
