"""KAI Scheduler: what is rendered passes its admission, and what is free is what its scheduler would place."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.model.layers_file import KaiOptions
from gpushare_spawner.sharing import kai
from gpushare_spawner.sharing.base import (
    ClusterFacts,
    ClusterNode,
    ClusterPod,
    ClusterQueue,
    LayerCannot,
    LayerCapacity,
    PodSpec,
)
from tests.sharing.requests import LOADED, POD, node, notebook, request

OPTIONS = KaiOptions()
BOUND = {kai.FRACTION: "0.5", kai.RECEIVED: kai.A_FRACTION}


def gpu_node(gpus: int = 2, name: str = "a") -> ClusterNode:
    return node(name, allocatable={"nvidia.com/gpu": gpus})


def reservation(group: str, on: str = "a") -> ClusterPod:
    return ClusterPod(
        f"gpu-reservation-{group}", "kai-resource-reservation", on, labels={kai.GROUP: group},
        requests={"nvidia.com/gpu": 1},
    )  # fmt: skip


def fraction(group: str, amount: str, key: str = kai.FRACTION, on: str = "a") -> ClusterPod:
    annotations = {key: amount, kai.RECEIVED: kai.A_FRACTION}
    return ClusterPod(f"{group}-{amount}", "hub", on, labels={kai.GROUP: group}, annotations=annotations)


def admission(pod: PodSpec) -> None:
    """The rules of gpu_request_validator.go and of common.GetFractionContainerRef, KAI Scheduler d5bc503."""
    annotations = pod["metadata"]["annotations"]
    containers: list[dict[str, Any]] = pod["spec"]["containers"]
    whole = [one for one in containers if "nvidia.com/gpu" in one.get("resources", {}).get("limits", {})]
    has_fraction, has_memory = kai.FRACTION in annotations, kai.MEMORY in annotations
    assert not (has_fraction and whole), "cannot have both GPU fraction request and whole GPU"
    assert not (has_memory and (has_fraction or whole)), "cannot request both GPU and GPU memory"
    assert "gpu-fraction-num-devices" not in annotations or has_fraction or has_memory
    if has_memory:
        assert annotations[kai.MEMORY].isdecimal()
        assert int(annotations[kai.MEMORY]) > 0
    if has_fraction:
        assert 0 < float(annotations[kai.FRACTION]) < 1
    if has_fraction or has_memory:
        assert annotations[kai.CONTAINER] in {one["name"] for one in containers}


@LOADED
@given(
    st.one_of(
        st.integers(1, 100).map(lambda units: {"fraction": units / 100}),
        st.integers(1, 8).map(lambda count: {"count": count}),
    ),
    st.sampled_from([None, "8Gi", "30%", "60Gi"]),
    st.booleans(),
)
def test_each_share_passes_admission_and_asks_for_no_less(
    gpu: dict[str, Any], guarantee: str | None, known: bool
) -> None:
    facts = ClusterFacts((gpu_node(),)) if known else ClusterFacts((ClusterNode("a"),))
    if guarantee is not None:
        gpu = {**gpu, "memory": {"guarantee": guarantee}}
    pod = kai.render(POD, request(gpu, OPTIONS, facts))
    admission(pod)
    annotations, limits = pod["metadata"]["annotations"], notebook(pod)["resources"]["limits"]
    if "count" in gpu or gpu["fraction"] == 1:
        assert limits["nvidia.com/gpu"] == str(gpu.get("count", 1))
        return
    if kai.MEMORY in annotations:
        assert not known
        return
    assert float(annotations[kai.FRACTION]) >= gpu["fraction"]
    needed = {None: 0.0, "8Gi": 0.1 if known else 0.0, "30%": 0.3, "60Gi": 0.75 if known else 0.0}[guarantee]
    assert float(annotations[kai.FRACTION]) >= needed


def test_pod_has_queue_scheduler_priority_class_and_the_notebooks_container() -> None:
    pod = kai.render(POD, request({"fraction": 0.25}, OPTIONS))
    assert pod["spec"]["schedulerName"] == "kai-scheduler"
    assert pod["spec"]["priorityClassName"] == "build"
    assert pod["metadata"]["labels"] == {"app": "hub", "kai.scheduler/queue": "default-queue"}
    annotations = pod["metadata"]["annotations"]
    assert annotations["gpu-fraction"] == "0.25"
    assert annotations["gpu-fraction-container-name"] == "notebook"


def test_queue_is_that_of_the_quota_or_of_its_group() -> None:
    options = KaiOptions(queues={"physics": "phys", "physics/lasers": "light"}, preemptible=False)
    queues = [
        kai.queue_of(request({"fraction": 0.25}, options, quota=quota))
        for quota in ("physics/lasers", "physics/optics", "physics", "art", "")
    ]
    assert queues == ["light", "phys", "phys", "default-queue", "default-queue"]
    labels = kai.render(POD, request({"count": 1}, options))["metadata"]["labels"]
    assert labels["kai.scheduler/preemptibility"] == "non-preemptible"


def test_memory_that_needs_a_whole_gpu_is_refused_for_a_fraction() -> None:
    asked = request({"fraction": 0.5, "memory": {"guarantee": "80Gi"}}, OPTIONS, ClusterFacts((gpu_node(),)))
    with pytest.raises(LayerCannot, match="count: 1"):
        kai.render(POD, asked)
    with pytest.raises(LayerCannot):
        kai.free(asked)


def test_shared_gpu_that_its_reservation_pod_takes_whole_is_free_but_for_its_fractions() -> None:
    pods = (reservation("g1"), fraction("g1", "0.3"), fraction("g1", "0.2"))
    facts = ClusterFacts((gpu_node(),), pods)
    assert kai.free(request({"fraction": 0.25}, OPTIONS, facts)) == LayerCapacity(2 + 4, 8)
    assert kai.free(request({"fraction": 0.5}, OPTIONS, facts)) == LayerCapacity(1 + 2, 4)
    assert kai.free(request({"count": 1}, OPTIONS, facts)) == LayerCapacity(1, 2)
    assert kai.free(request({"count": 2}, OPTIONS, facts)) == LayerCapacity(0, 1)


def test_fractions_add_up_exactly() -> None:
    pods = (reservation("g1"), *(fraction("g1", "0.1", on="a") for _ in range(7)))
    assert kai.free(request({"fraction": 0.1}, OPTIONS, ClusterFacts((gpu_node(1),), pods))).servers == 3


def test_memory_of_other_pods_counts_as_its_part_and_what_cannot_be_read_as_all() -> None:
    half = (reservation("g"), fraction("g", str(40 * 1024), kai.MEMORY))
    broken = (reservation("g"), fraction("g", "much"))
    asked = {"fraction": 0.25}
    assert kai.free(request(asked, OPTIONS, ClusterFacts((gpu_node(1),), half))).servers == 2
    assert kai.free(request(asked, OPTIONS, ClusterFacts((gpu_node(1),), broken))).servers == 0


@pytest.mark.parametrize("key", [kai.FRACTION, kai.MEMORY])
@pytest.mark.parametrize("amount", ["1e999999999", "1e-999999999", "-5", "nan", "9" * 5000], ids=lambda one: one[:12])
def test_amount_that_kai_would_not_admit_counts_as_a_gpu_and_costs_no_time(amount: str, key: str) -> None:
    facts = ClusterFacts((gpu_node(2),), (reservation("g"), fraction("g", amount, key)))
    assert kai.free(request({"fraction": 0.25}, OPTIONS, facts)).servers == 4


def test_group_without_its_reservation_pod_yet_takes_a_gpu() -> None:
    facts = ClusterFacts((gpu_node(1),), (fraction("g", "0.5"),))
    assert kai.free(request({"count": 1}, OPTIONS, facts)).servers == 0
    assert kai.free(request({"fraction": 0.25}, OPTIONS, facts)).servers == 2


def test_label_of_a_pod_to_which_kai_gave_nothing_takes_no_gpu() -> None:
    forged = (ClusterPod(f"forged-{number}", "mallory", "a", labels={kai.GROUP: f"g{number}"}) for number in range(2))
    whole = {kai.GROUP: "shared"}, {kai.FRACTION: "0.9", kai.RECEIVED: "Regular"}
    beside = ClusterPod("beside", "mallory", "a", *whole)
    facts = ClusterFacts((gpu_node(2),), (*forged, beside, reservation("shared"), fraction("shared", "0.5")))
    assert kai.free(request({"count": 1}, OPTIONS, facts)).servers == 1
    assert kai.free(request({"fraction": 0.5}, OPTIONS, facts)).servers == 3


def test_pod_with_fractions_of_several_gpus_counts_on_each() -> None:
    labels = {f"{kai.GROUP}/g1": "g1", f"{kai.GROUP}/g2": "g2"}
    two = ClusterPod("two", "hub", "a", labels=labels, annotations=BOUND | {"gpu-fraction-num-devices": "2"})
    facts = ClusterFacts((gpu_node(2),), (reservation("g1"), reservation("g2"), two))
    assert kai.free(request({"fraction": 0.5}, OPTIONS, facts)).servers == 2


def queue(quota: float | None, limit: float | None, used: float = 0, non_preemptible: float = 0) -> ClusterQueue:
    return ClusterQueue("default-queue", "", quota, limit, used, non_preemptible)


@pytest.mark.parametrize(
    ("one", "options", "servers"),
    [
        (queue(1, None), OPTIONS, 4),
        (queue(1, None, non_preemptible=0.5), OPTIONS, 2),
        (queue(1, None), KaiOptions(priority_class="train"), 8),
        (queue(1, None), KaiOptions(preemptible=True), 8),
        (queue(1, 1.5, used=1), KaiOptions(preemptible=True), 2),
        (queue(None, None), OPTIONS, 8),
        (queue(0, 0), OPTIONS, 0),
        (queue(1, None, non_preemptible=3), OPTIONS, 0),
    ],
)
def test_queue_bounds_what_is_free(one: ClusterQueue, options: KaiOptions, servers: int) -> None:
    found = kai.free(request({"fraction": 0.25}, options, ClusterFacts((gpu_node(),), queues=(one,))))
    assert found.servers == servers
    assert ("queue default-queue" in found.limited_by) is (servers < 8)


def test_queue_above_bounds_it_too_and_a_circle_of_queues_ends() -> None:
    leaf = ClusterQueue("default-queue", "all", None, None)
    above = ClusterQueue("all", "default-queue", 0.5, None, 0.25, 0.25)
    found = kai.free(request({"fraction": 0.25}, OPTIONS, ClusterFacts((gpu_node(),), queues=(leaf, above))))
    assert found == LayerCapacity(1, 2, "queue all of KAI Scheduler has 0.25 GPU left")
