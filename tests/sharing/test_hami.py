"""HAMi: what is rendered passes its webhook, and what is free is what its scheduler would place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.model.layers_file import HamiOptions
from gpushare_spawner.sharing import hami
from gpushare_spawner.sharing.base import ClusterFacts, ClusterNode, ClusterPod, LayerCapacity, PodSpec
from tests.sharing.requests import LOADED, POD, notebook, request

# as HAMi 2.10 writes it: of GPU 0 "index" is left out, of GPU 1 "health", because it is unhealthy
JSON = json.dumps(
    [
        {"id": "GPU-0", "count": 10, "devmem": 81920, "devcore": 100, "type": "NVIDIA-NVIDIA A100-SXM4-80GB",
         "mode": "hami-core", "health": True},
        {"id": "GPU-1", "index": 1, "count": 10, "devmem": 81920, "devcore": 100, "type": "NVIDIA-Tesla T4"},
    ]
)  # fmt: skip
# as HAMi up to 2.5 wrote it, and 2.6 with two fields more
TEXT = "GPU-0,10,81920,100,NVIDIA-NVIDIA A100-SXM4-80GB,0,true:GPU-1,10,81920,100,NVIDIA-Tesla T4,0,false:"
LONGER = "GPU-0,10,81920,100,NVIDIA-NVIDIA A100-SXM4-80GB,0,true,0,hami-core:"


def registered(written: str = JSON, name: str = "a", **annotations: str) -> ClusterNode:
    return ClusterNode(name, annotations={hami.REGISTER: written, **annotations})


def with_gpu(name: str, devices: str, on: str = "a", key: str = hami.ALLOCATED, **annotations: str) -> ClusterPod:
    return ClusterPod(name, "hub", on, annotations={key: devices, **annotations})


def webhook(pod: PodSpec, scheduler: str = "hami-scheduler", factor: int = 1) -> tuple[int, int, int, int]:
    """What HAMi takes the notebook's container to ask for: GPUs, MiB, percent of memory, cores.

    The rules of pkg/scheduler/webhook.go and GenerateResourceRequests of pkg/device/nvidia/device.go, HAMi 4707fb0.
    """
    spec = pod["spec"]
    assert spec.get("schedulerName", "") in ("", "default-scheduler", scheduler), "the webhook skips the pod"
    assert not spec.get("nodeName"), "denied: pod has node assigned"
    limits: dict[str, Any] = notebook(pod)["resources"]["limits"]
    assert not notebook(pod).get("securityContext", {}).get("privileged"), "denied: privileged"
    amounts = {name: int(limits.get(f"nvidia.com/{name}", 0)) for name in ("gpu", "gpumem", "gpucores")}
    percent = int(limits.get("nvidia.com/gpumem-percentage", 101))
    assert 0 < percent <= 101
    assert 0 <= amounts["gpumem"] < 2**31
    assert amounts["gpumem"] <= (2**31 - 1) // factor, "rejected: beyond int32 once multiplied"
    return amounts["gpu"], amounts["gpumem"] * factor, percent, amounts["gpucores"]


def test_fraction_becomes_gpu_percentage_of_memory_and_cores_and_names_the_scheduler() -> None:
    pod = hami.render(POD, request({"fraction": 0.25}, HamiOptions()))
    assert pod["spec"]["schedulerName"] == "hami-scheduler"
    assert webhook(pod) == (1, 0, 25, 25)
    halves = hami.render(POD, request({"count": 2, "fraction": 0.5}, HamiOptions()))
    assert webhook(halves) == (2, 0, 50, 50), "of each GPU"
    whole = hami.render(POD, request({"count": 2}, HamiOptions(scheduler="s", resource="example.com/gpu")))
    assert whole["spec"]["schedulerName"] == "s"
    assert notebook(whole)["resources"]["limits"]["example.com/gpu"] == "2"


def test_guaranteed_memory_in_bytes_becomes_mebibytes_rounded_up() -> None:
    pod = hami.render(POD, request({"fraction": 0.25, "memory": {"guarantee": "12.5G"}}, HamiOptions()))
    assert webhook(pod) == (1, 11921, 101, 25)
    pod = hami.render(POD, request({"fraction": 0.25, "memory": {"guarantee": "33.5%"}}, HamiOptions()))
    assert webhook(pod) == (1, 0, 34, 25)


@LOADED
@given(st.integers(1, 100), st.none() | st.integers(1, 1000).map(lambda gib: f"{gib}Gi") | st.just("50%"))
def test_each_share_passes_the_webhook_and_asks_for_no_less(units: int, guarantee: str | None) -> None:
    gpu = {"fraction": units / 100, "memory": {"guarantee": guarantee} if guarantee else {}}
    gpus, mib, percent, cores = webhook(hami.render(POD, request(gpu, HamiOptions())))
    assert (gpus, cores) == (1, units)
    if guarantee is None:
        assert (mib, percent) == (0, units)
    elif guarantee.endswith("%"):
        assert (mib, percent) == (0, 50)
    else:
        assert (mib, percent) == (int(guarantee[:-2]) * 1024, 101)


@LOADED
@given(st.integers(1, 1024), st.integers(1, 200_000))
def test_guarantee_holds_whatever_hamis_memory_factor_is(factor: int, mib: int) -> None:
    gpu = {"fraction": 0.25, "memory": {"guarantee": f"{mib}Mi"}}
    options = HamiOptions(memory_factor=factor)
    asked = request(gpu, options, ClusterFacts((registered(),)))
    _, given_mib, percent, _ = webhook(hami.render(POD, asked), factor=factor)
    assert mib <= given_mib < mib + factor
    assert percent == 101
    # free servers are counted by the memory that HAMi gives out: GPU 0 has 81,920 MiB and 100 cores, 25 for each
    assert hami.free(asked).servers == min(4, 81920 // given_mib)


def test_percentage_of_memory_does_not_depend_on_hamis_memory_factor() -> None:
    gpu = {"fraction": 0.25, "memory": {"guarantee": "50%"}}
    assert webhook(hami.render(POD, request(gpu, HamiOptions(memory_factor=256))), factor=256) == (1, 0, 50, 25)


def test_models_become_types_as_the_nodes_registered_them() -> None:
    facts = ClusterFacts((registered(),))
    pod = hami.render(POD, request({"fraction": 0.25, "models": ["*a100*"]}, HamiOptions(), facts))
    assert pod["metadata"]["annotations"][hami.USE_TYPE] == "NVIDIA A100-SXM4-80GB"
    unknown = hami.render(POD, request({"fraction": 0.25, "models": ["*H100*"]}, HamiOptions(), facts))
    assert unknown["metadata"]["annotations"][hami.USE_TYPE] == "H100"


@pytest.mark.parametrize("written", [JSON, TEXT, LONGER])
def test_node_annotation_is_read_in_each_of_its_forms(written: str) -> None:
    first, *others = hami.gpus(registered(written))
    assert first == hami.HamiGpu("GPU-0", "NVIDIA A100-SXM4-80GB", 10, 81920, 100, True)
    assert [one.healthy for one in others] in ([False], [])


@pytest.mark.parametrize(
    "written",
    [
        "", "[", "[1]", '[{"count": 1}]', "GPU-0,10", "GPU-0,x,y,z,t,0,true:", "{}", "[" * 100_000,
        '[{"id": "GPU-0", "devmem": NaN}]', '[{"id": "GPU-0", "devmem": Infinity}]',
        '[{"id": "GPU-0", "count": 1e999}]',
    ],
    ids=lambda written: written[:40],
)  # fmt: skip
def test_node_annotation_that_cannot_be_read_has_no_gpus(written: str) -> None:
    assert hami.gpus(registered(written)) == ()


def test_free_counts_units_memory_and_the_split_count_of_healthy_gpus() -> None:
    pods = (with_gpu("one", "GPU-0,NVIDIA,20480,25:;"), with_gpu("two", ";GPU-0,NVIDIA,8192,10:;"))
    facts = ClusterFacts((registered(),), pods)
    # 65 cores and 53248 MiB are left on GPU-0; GPU-1 is unhealthy
    assert hami.free(request({"fraction": 0.25}, HamiOptions(), facts)) == LayerCapacity(2, 4)
    assert hami.free(request({"fraction": 0.05}, HamiOptions(), facts)) == LayerCapacity(8, 10)
    big = request({"fraction": 0.05, "memory": {"guarantee": "40Gi"}}, HamiOptions(), facts)
    assert hami.free(big) == LayerCapacity(1, 2)


@pytest.mark.parametrize("amount", ["9" * 5000, "-81920", "1e9", "\u0661", ""], ids=lambda amount: amount[:8])
def test_amounts_of_a_pod_that_hami_cannot_have_written_do_not_count(amount: str) -> None:
    facts = ClusterFacts((registered(),), (with_gpu("forged", f"GPU-0,NVIDIA,{amount},0:;"),))
    assert hami.free(request({"fraction": 0.25}, HamiOptions(), facts)) == LayerCapacity(4, 4)


def test_servers_with_a_part_of_each_of_two_gpus_have_different_gpus() -> None:
    gpus = ":".join(f"GPU-{number},10,81920,100,NVIDIA-Tesla T4,0,true" for number in range(3)) + ":"
    halves = {"count": 2, "fraction": 0.5}
    assert hami.free(request(halves, HamiOptions(), ClusterFacts(nodes=(registered(gpus),)))).servers == 3
    one_full = ClusterFacts(nodes=(registered(gpus),), pods=(with_gpu("p", "GPU-0,NVIDIA,81920,100:"),))
    assert hami.free(request(halves, HamiOptions(), one_full)).servers == 2
    two_full = ClusterFacts(nodes=one_full.nodes, pods=(*one_full.pods, with_gpu("q", "GPU-1,NVIDIA,81920,100:")))
    assert hami.free(request(halves, HamiOptions(), two_full)).servers == 0


def test_whole_gpu_is_free_only_where_no_pod_is() -> None:
    empty = ClusterFacts((registered(),))
    used = ClusterFacts((registered(),), (with_gpu("one", "GPU-0,NVIDIA,1,0:;"),))
    assert hami.free(request({"count": 1}, HamiOptions(), empty)) == LayerCapacity(1, 1)
    assert hami.free(request({"count": 1}, HamiOptions(), used)) == LayerCapacity(0, 1)
    assert hami.free(request({"count": 2}, HamiOptions(), empty)) == LayerCapacity(0, 0)


def test_pod_that_hami_bound_counts_before_its_node_shows_and_a_failed_one_does_not() -> None:
    about = {hami.NODE: "a", hami.BIND_PHASE: "allocating"}
    pending = with_gpu("p", "GPU-0,NVIDIA,81920,100:;", on="", key=hami.TO_ALLOCATE, **about)
    failed = with_gpu("f", "GPU-0,NVIDIA,81920,100:;", on="", key=hami.TO_ALLOCATE,
                      **{hami.NODE: "a", hami.BIND_PHASE: "failed"})  # fmt: skip
    asked = {"fraction": 0.25}
    assert hami.free(request(asked, HamiOptions(), ClusterFacts((registered(),), (pending,)))).servers == 0
    assert hami.free(request(asked, HamiOptions(), ClusterFacts((registered(),), (failed,)))).servers == 4


def test_node_that_hamis_plugin_has_left_has_nothing_free() -> None:
    asked = {"fraction": 0.25}
    deleted = registered(**{hami.HANDSHAKE: "Deleted_2026.08.21 10:00:00"})
    stopped = ClusterNode("a", annotations={hami.REGISTER: JSON}, allocatable={"nvidia.com/gpu": 0})
    there = ClusterNode("a", annotations={hami.REGISTER: JSON}, allocatable={"nvidia.com/gpu": 20})
    for node, servers in ((deleted, 0), (stopped, 0), (there, 4)):
        assert hami.free(request(asked, HamiOptions(), ClusterFacts((node,)))) == LayerCapacity(servers, 4)


def test_cordoned_gpu_and_other_models_are_not_free() -> None:
    cordoned = ClusterFacts((registered(**{hami.CORDON: "GPU-9, GPU-0"}),))
    assert hami.free(request({"fraction": 0.25}, HamiOptions(), cordoned)) == LayerCapacity(0, 0)
    other = request({"fraction": 0.25, "models": ["*H100*"]}, HamiOptions(), ClusterFacts((registered(),)))
    assert hami.free(other) == LayerCapacity(0, 0)
