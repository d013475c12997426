"""MetaGPU, nvshare and KubeShare."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.layers_file import LayerOptions, MetaGpuOptions
from gpushare_spawner.sharing import kubeshare
from gpushare_spawner.sharing.base import ClusterFacts, ClusterNode, ClusterPod, LayerCannot, LayerCapacity
from gpushare_spawner.spawner.kubernetes.cluster.layers import POD_LAYERS
from tests.sharing.requests import LOADED, POD, node, notebook, request

metagpu, nvshare = POD_LAYERS[LayerName.METAGPU], POD_LAYERS[LayerName.NVSHARE]
# pkg/scheduler/pod.go of KubeShare a862311, as its FindString reads it: the whole text must match
VALUE = re.compile(r"[0]+.[0-9]+|[1-9]+[0-9]*[.]+[0]+|[1-9]+")


def test_metagpu_share_is_so_many_parts_also_over_several_gpus() -> None:
    there = ClusterFacts(
        (ClusterNode("a", allocatable={"cnvrg.io/metagpu": 200}),),
        (ClusterPod("x", "hub", "a", requests={"cnvrg.io/metagpu": 30}),),
    )
    asked = request({"fraction": 0.25}, MetaGpuOptions(), there)
    assert notebook(metagpu.render(POD, asked))["resources"]["limits"]["cnvrg.io/metagpu"] == "25"
    assert metagpu.free(asked) == LayerCapacity(6, 8)
    two = request({"count": 2}, MetaGpuOptions(resource="cnvrg.io/metagpu-x", per_gpu=10), there)
    assert notebook(metagpu.render(POD, two))["resources"]["limits"]["cnvrg.io/metagpu-x"] == "20"
    coarse = request({"fraction": 0.25}, MetaGpuOptions(per_gpu=10), there)
    assert notebook(metagpu.render(POD, coarse))["resources"]["limits"]["cnvrg.io/metagpu"] == "3"


def test_mortalgpu_works_with_the_options_of_metagpu() -> None:
    there = ClusterFacts((ClusterNode("a", allocatable={"mortalgpu/v100": 40}),))
    asked = request({"fraction": 0.25}, MetaGpuOptions(resource="mortalgpu/v100", per_gpu=20), there)
    assert notebook(metagpu.render(POD, asked))["resources"]["limits"]["mortalgpu/v100"] == "5"
    assert metagpu.free(asked) == LayerCapacity(8, 8)


def test_metagpu_memory_that_is_more_than_the_share_takes_more_parts() -> None:
    def parts(guarantee: str, memory: str | None = "81920") -> str:
        labels = {"nvidia.com/gpu.memory": memory} if memory is not None else {}
        there = ClusterFacts((ClusterNode("a", labels, allocatable={"cnvrg.io/metagpu": 100}),))
        asked = request({"fraction": 0.25, "memory": {"guarantee": guarantee}}, MetaGpuOptions(), there)
        found: str = notebook(metagpu.render(POD, asked))["resources"]["limits"]["cnvrg.io/metagpu"]
        return found

    assert (parts("10%"), parts("50%"), parts("50%", None), parts("60Gi")) == ("25", "50", "50", "75")
    with pytest.raises(LayerCannot, match="more than a GPU of the nodes has"):
        parts("100Gi")
    with pytest.raises(LayerCannot, match="as a percentage"):
        parts("60Gi", None)


def test_nvshare_session_has_one_place_on_its_nodes_only_gpu() -> None:
    there = ClusterFacts(
        (ClusterNode("a", allocatable={"nvshare.com/gpu": 10}),),
        (ClusterPod("x", "hub", "a", requests={"nvshare.com/gpu": 1}),),
    )
    asked = request({"fraction": 0.25}, LayerOptions(), there)
    assert notebook(nvshare.render(POD, asked))["resources"]["limits"]["nvshare.com/gpu"] == "1"
    assert nvshare.free(asked) == LayerCapacity(9, 10)
    with pytest.raises(LayerCannot, match="2 GPUs"):
        nvshare.render(POD, request({"count": 2}, LayerOptions(), there))


@LOADED
@given(
    st.one_of(
        st.integers(1, 100).map(lambda units: {"fraction": units / 100}),
        st.integers(1, 9).map(lambda count: {"count": count}),
    )
)
def test_kubeshare_labels_are_what_its_scheduler_reads(gpu: dict[str, float]) -> None:
    pod = kubeshare.render(POD, request(gpu, LayerOptions()))
    labels = pod["metadata"]["labels"]
    for name in (kubeshare.REQUEST, kubeshare.LIMIT):
        found = VALUE.match(labels[name])
        assert found is not None
        assert found[0] == labels[name]
    asked, limit = float(labels[kubeshare.REQUEST]), float(labels[kubeshare.LIMIT])
    assert asked == gpu.get("fraction", gpu.get("count"))
    assert asked <= limit
    assert limit <= 1 or limit == asked
    assert 0 < int(labels[kubeshare.PRIORITY]) <= 100
    assert pod["spec"]["schedulerName"] == "kubeshare-scheduler"


def test_kubeshare_memory_is_in_bytes_of_the_largest_gpu() -> None:
    there = ClusterFacts((node("a", gpu_gib=40), node("b", gpu_gib=80)))

    def memory(guarantee: str, facts: ClusterFacts) -> str:
        asked = request({"fraction": 0.25, "memory": {"guarantee": guarantee}}, LayerOptions(), facts)
        return str(kubeshare.render(POD, asked)["metadata"]["labels"][kubeshare.MEMORY])

    assert memory("50%", there) == str(40 * 2**30)
    assert memory("12Gi", ClusterFacts()) == str(12 * 2**30)
    with pytest.raises(LayerCannot, match="in bytes"):
        memory("50%", ClusterFacts())


def test_kubeshare_free_is_counted_from_its_pods() -> None:
    pods = (
        ClusterPod("one", "hub", "a", {kubeshare.REQUEST: "0.5"}, {kubeshare.UUID: "GPU-1"}),
        ClusterPod("two", "hub", "a", {kubeshare.REQUEST: "0.3"}, {kubeshare.UUID: "GPU-1"}),
        ClusterPod("big", "hub", "a", {kubeshare.REQUEST: "2.0"}, {kubeshare.UUID: "GPU-2,GPU-3,"}),
    )
    there = ClusterFacts((node("a", labels={"nvidia.com/gpu.count": "4"}),), pods)
    assert kubeshare.free(request({"fraction": 0.1}, LayerOptions(), there)) == LayerCapacity(2 + 10, 40)
    assert kubeshare.free(request({"count": 1}, LayerOptions(), there)) == LayerCapacity(1, 4)
    unreadable = ClusterFacts(there.nodes, (ClusterPod("x", "hub", "a", {}, {kubeshare.UUID: "GPU-1"}),))
    assert kubeshare.free(request({"fraction": 0.5}, LayerOptions(), unreadable)).servers == 6
    forged = {kubeshare.REQUEST: "1e999999999"}
    endless = ClusterFacts(there.nodes, (ClusterPod("x", "hub", "a", forged, {kubeshare.UUID: "GPU-1"}),))
    assert kubeshare.free(request({"fraction": 0.5}, LayerOptions(), endless)).servers == 6
