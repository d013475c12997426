"""What is read of the cluster's objects for foreign sharing layers."""

from __future__ import annotations

import pytest

from gpushare_spawner.sharing.base import (
    ClaimedDevice,
    ClusterClaim,
    ClusterFacts,
    ClusterNode,
    ClusterPod,
    ClusterQueue,
    ClusterSlice,
)


def test_node_has_its_amounts_as_integers_and_its_model_without_suffixes() -> None:
    node = ClusterNode.of(
        {
            "metadata": {
                "name": "a",
                "labels": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-SHARED", "nvidia.com/gpu.memory": "81920"},
            },
            "spec": {"unschedulable": True},
            "status": {"allocatable": {"cpu": "7910m", "memory": "16Gi", "nvidia.com/gpu": "4"}},
        }
    )
    assert dict(node.allocatable) == {"cpu": 7910, "memory": 16 * 2**30, "nvidia.com/gpu": 4}
    assert (node.model, node.gpu_memory_bytes, node.unschedulable) == ("NVIDIA-A100-SXM4-80GB", 80 * 2**30, True)
    single = ClusterNode("b", {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"})
    assert (single.model, single.gpu_memory_bytes) == ("NVIDIA-A100-SXM4-80GB", None)


def test_free_is_what_pods_on_the_node_leave_and_never_less_than_nothing() -> None:
    node = ClusterNode("a", allocatable={"nvidia.com/gpu": 4})
    pods = tuple(
        ClusterPod.of(
            {"metadata": {"name": name, "namespace": "hub"}, "spec": {"nodeName": on}, "status": {"phase": "Running"}},
            {"nvidia.com/gpu": amount},
        )
        for name, on, amount in (("one", "a", "1"), ("two", "a", "2"), ("other", "b", "1"), ("waiting", "", "1"))
    )
    facts = ClusterFacts((node,), pods)
    assert facts.free(node, "nvidia.com/gpu") == 1
    assert facts.requested("a", "nvidia.com/gpu") == 3
    assert [pod.name for pod in facts.pods_on("a")] == ["one", "two"]
    assert ClusterFacts((node,), (ClusterPod("x", "hub", "a", requests={"nvidia.com/gpu": 9}),)).free(node, "cpu") == 0


def test_queue_of_minus_one_has_no_bound_and_one_without_a_limit_allows_nothing() -> None:
    queue = ClusterQueue.of(
        {
            "metadata": {"name": "notebooks"},
            "spec": {"parentQueue": "all", "resources": {"gpu": {"quota": 2, "limit": -1}}},
            "status": {"allocated": {"nvidia.com/gpu": "1500m"}, "allocatedNonPreemptible": {"nvidia.com/gpu": "0.5"}},
        }
    )
    assert queue == ClusterQueue("notebooks", "all", 2.0, None, 1.5, 0.5)
    assert ClusterQueue.of({"metadata": {"name": "bare"}}) == ClusterQueue("bare", "", 0.0, 0.0, 0.0, 0.0)


def test_slice_has_devices_with_plain_attributes_capacities_and_counters() -> None:
    found = ClusterSlice.of(
        {
            "spec": {
                "driver": "gpu.nvidia.com",
                "nodeName": "a",
                "pool": {"name": "a", "generation": 3},
                "sharedCounters": [{"name": "gpu-0", "counters": {"memory": {"value": "80Gi"}}}],
                "devices": [
                    {
                        "name": "gpu-0",
                        "attributes": {"type": {"string": "gpu"}, "minor": {"int": 0}},
                        "allowMultipleAllocations": True,
                        "capacity": {
                            "memory": {"value": "80Gi", "requestPolicy": {"default": "1Mi"}},
                            "shares": {"value": "100"},
                        },
                        "consumesCounters": [{"counterSet": "gpu-0", "counters": {"memory": {"value": "80Gi"}}}],
                        "taints": [{"key": "x", "effect": "NoSchedule"}],
                    }
                ],
            }
        }
    )
    (device,) = found.devices
    assert (found.driver, found.pool, found.node, found.generation) == ("gpu.nvidia.com", "a", "a", 3)
    assert dict(device.attributes) == {"type": "gpu", "minor": 0}
    assert dict(device.capacity) == {"memory": 80 * 2**30, "shares": 100}
    assert dict(device.defaults) == {"memory": 2**20}
    assert device.shared
    assert device.tainted
    assert dict(device.counters) == dict(found.counters) == {("gpu-0", "memory"): 80 * 2**30}


def test_claim_has_what_is_allocated_and_not_what_only_monitors() -> None:
    results = [
        {"driver": "d", "pool": "a", "device": "gpu-0", "consumedCapacity": {"shares": "25"}},
        {"driver": "d", "pool": "a", "device": "gpu-1", "adminAccess": True},
    ]
    claim = ClusterClaim.of(
        {"metadata": {"name": "c", "namespace": "hub"}, "status": {"allocation": {"devices": {"results": results}}}}
    )
    assert claim.devices == (ClaimedDevice("d", "a", "gpu-0", {"shares": 25}),)
    assert ClusterClaim.of({"metadata": {"name": "c", "namespace": "hub"}}).devices == ()


def test_malformed_object_raises() -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        ClusterNode.of({"metadata": {"name": "a"}, "status": {"allocatable": {"nvidia.com/gpu": "four"}}})
