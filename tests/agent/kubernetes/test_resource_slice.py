"""The slice that the agent writes, and what it notices of what the API server keeps."""

from __future__ import annotations

import copy
from dataclasses import replace

from gpushare_spawner.agent.kubernetes.claims.slices import OfferedGpu, lost, resource_slice, says_the_same
from gpushare_spawner.model.kubernetes.objects import device_name, slice_name
from tests.agent.peers import FIRST, SECOND


def test_lent_units_raise_both_capacities_and_no_maximum_is_named() -> None:
    (device,) = resource_slice("node-a", [OfferedGpu(FIRST, 130)], 1, 7, taints=True)["spec"]["devices"]
    capacity = device["capacity"]
    assert (capacity["units"]["value"], capacity["memory"]["value"]) == ("130", f"{16 * 1024 * 130 // 100}Mi")
    assert "max" not in str(capacity)


def test_units_of_several_are_the_smallest_request_and_the_step() -> None:
    (device,) = resource_slice("node-a", [OfferedGpu(FIRST, 100)], 5, 1, taints=True)["spec"]["devices"]
    policy = device["capacity"]["units"]["requestPolicy"]
    assert policy == {"default": "5", "validRange": {"min": "5", "step": "5"}}


def test_a_gpu_with_a_trouble_has_a_taint_or_is_left_out() -> None:
    gpus = [OfferedGpu(FIRST, 100, "cordoned"), OfferedGpu(SECOND, 0), OfferedGpu(SECOND, 50)]
    first, second = resource_slice("node-a", gpus, 1, 1, taints=True)["spec"]["devices"]
    assert first["taints"] == [{"key": "gpushare-spawner.io/unusable", "value": "cordoned", "effect": "NoSchedule"}]
    assert "taints" not in second
    (only,) = resource_slice("node-a", gpus, 1, 1, taints=False)["spec"]["devices"]
    assert only == second


def test_names_are_those_that_kubernetes_takes() -> None:
    assert device_name(FIRST.uuid) == FIRST.uuid.lower()
    odd = [device_name(uuid) for uuid in ("GPU_1", "GPU-" + "9" * 80)]
    assert all(name.startswith("gpu-") and len(name) == 20 for name in odd)
    assert odd[0] != odd[1]
    assert slice_name("node-a") == "node-a-gpushare-spawner.io"
    long = [slice_name(f"{'n' * 250}{end}") for end in "ab"]
    assert long[0] != long[1]
    assert all(len(name) <= 253 for name in long)


def test_what_the_server_adds_or_writes_in_another_way_is_no_loss() -> None:
    wanted = resource_slice("node-a", [OfferedGpu(FIRST, 100, "unhealthy")], 1, 3, taints=True)
    kept = copy.deepcopy(wanted)
    kept["metadata"]["uid"] = "1"
    kept["spec"]["pool"]["generation"] = 2
    device = kept["spec"]["devices"][0]
    device["capacity"]["memory"]["value"] = "16Gi"
    device["taints"][0]["timeAdded"] = "2026-01-01T00:00:00Z"
    assert says_the_same(wanted, kept)
    assert not list(lost(wanted["spec"]["devices"], kept["spec"]["devices"]))
    healthy = resource_slice("node-a", [OfferedGpu(FIRST, 100)], 1, 3, taints=True)
    assert not says_the_same(healthy, kept)
    assert not says_the_same(resource_slice("node-a", [OfferedGpu(FIRST, 99)], 1, 3, taints=True), healthy)
    assert not says_the_same(resource_slice("node-a", [], 1, 3, taints=True), healthy)


def test_each_field_that_is_gone_is_named() -> None:
    wanted = resource_slice("node-a", [OfferedGpu(FIRST, 100, "unhealthy")], 1, 1, taints=True)
    kept = copy.deepcopy(wanted)
    device = kept["spec"]["devices"][0]
    del device["taints"], device["capacity"]["units"]["requestPolicy"], device["allowMultipleAllocations"]
    device["capacity"]["memory"]["value"] = "8Gi"
    assert sorted(lost(wanted["spec"], kept["spec"])) == [
        "devices[0].allowMultipleAllocations",
        "devices[0].capacity.memory.value",
        "devices[0].capacity.units.requestPolicy",
        "devices[0].taints",
    ]


def test_an_empty_list_that_the_server_leaves_out_is_the_same() -> None:
    wanted = resource_slice("node-a", [], 1, 1, taints=True)
    kept = copy.deepcopy(wanted)
    del kept["spec"]["devices"]
    assert says_the_same(wanted, kept)
    assert not says_the_same(resource_slice("node-a", [OfferedGpu(replace(FIRST, index=1), 100)], 1, 1, True), kept)
