"""What a layer says is free is what its scheduler can place: servers are placed one by one until none fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare_spawner.model.layers_file import DraOptions, HamiOptions, KaiOptions, LayerOptions
from gpushare_spawner.sharing import dra, hami, kai
from gpushare_spawner.sharing.base import (
    ClaimedDevice,
    ClusterClaim,
    ClusterDevice,
    ClusterFacts,
    ClusterNode,
    ClusterPod,
    ClusterSlice,
    LayerCapacity,
    LayerRequest,
)
from tests.sharing.requests import GIB, LOADED, node, request

UNITS = st.sampled_from([4, 5, 10, 20, 25, 30, 33, 34, 50, 70, 100])
SHARES = st.lists(UNITS, max_size=8)
Place = Callable[[LayerRequest, int], ClusterFacts | None]


def placed(
    first: ClusterFacts, options: LayerOptions, units: int, place: Place, free: Callable[[LayerRequest], LayerCapacity]
) -> None:
    """Place servers until none fits, and hold the count against what was said to be free each time."""
    asked = request({"fraction": units / 100}, options, first)
    said = free(asked).servers
    for left in range(said, 0, -1):
        facts = place(asked, said - left)
        assert facts is not None, f"{left} were said to be free"
        asked = replace(asked, facts=facts)
        assert free(asked).servers == left - 1
    assert place(asked, said) is None


# -- HAMi: one GPU after the other, by pkg/device/nvidia/device.go, Fit ------------------------------------------------

GPUS = 2


def hami_cluster(held: list[int]) -> ClusterFacts:
    registered = ",".join(
        f'{{"id": "GPU-{index}", "count": 10, "devmem": 81920, "devcore": 100, "type": "NVIDIA-A100", "health": true}}'
        for index in range(GPUS)
    )
    facts = ClusterFacts((ClusterNode("a", annotations={hami.REGISTER: f"[{registered}]"}),))
    for number, units in enumerate(held):
        facts = hami_place(request({"fraction": units / 100}, HamiOptions(), facts), 100 + number) or facts
    return facts


def hami_place(asked: LayerRequest, number: int) -> ClusterFacts | None:
    units = asked.gpu.share.units
    mib = 81920 * units // 100
    for index in range(GPUS):
        uuid = f"GPU-{index}"
        there = [one for pod in asked.facts.pods for one in hami.devices(pod) if one[0] == uuid]
        cores, memory = sum(one[2] for one in there), sum(one[1] for one in there)
        full = len(there) >= 10 or memory + mib > 81920 or cores + units > 100 or (units == 100 and there)
        if not full:
            pod = ClusterPod(f"p{number}", "hub", "a", annotations={hami.ALLOCATED: f"{uuid},NVIDIA,{mib},{units}:;"})
            return replace(asked.facts, pods=(*asked.facts.pods, pod))
    return None


@settings(LOADED, max_examples=40)
@given(SHARES, UNITS)
def test_hami(held: list[int], units: int) -> None:
    placed(hami_cluster(held), HamiOptions(), units, hami_place, hami.free)


# -- KAI Scheduler: a shared GPU where there is room, else a new group with a reservation pod -------------------------


def kai_cluster(held: list[int]) -> ClusterFacts:
    facts = ClusterFacts((node("a", allocatable={"nvidia.com/gpu": GPUS}),))
    for number, units in enumerate(held):
        facts = kai_place(request({"fraction": units / 100}, KaiOptions(), facts), 100 + number) or facts
    return facts


def kai_place(asked: LayerRequest, number: int) -> ClusterFacts | None:
    units, pods = asked.gpu.share.units, asked.facts.pods
    groups: dict[str, int] = {}
    for pod in pods:
        if kai.FRACTION in pod.annotations:
            group = pod.labels[kai.GROUP]
            groups[group] = groups.get(group, 0) + round(float(pod.annotations[kai.FRACTION]) * 100)
    whole = GPUS - sum(pod.requests.get("nvidia.com/gpu", 0) for pod in pods)
    if units == 100:
        exclusive = ClusterPod(f"p{number}", "hub", "a", requests={"nvidia.com/gpu": 1})
        return replace(asked.facts, pods=(*pods, exclusive)) if whole else None
    group = next((name for name, used in groups.items() if used + units <= 100), "")
    new: tuple[ClusterPod, ...] = ()
    if not group:
        if not whole:
            return None
        group = f"g{number}"
        reservation = ClusterPod(
            f"gpu-reservation-{group}", "kai-resource-reservation", "a", {kai.GROUP: group},
            requests={"nvidia.com/gpu": 1},
        )  # fmt: skip
        new = (reservation,)
    pod = ClusterPod(
        f"p{number}", "hub", "a", {kai.GROUP: group}, {kai.FRACTION: f"{units / 100:.2f}", kai.RECEIVED: kai.A_FRACTION}
    )
    return replace(asked.facts, pods=(*pods, *new, pod))


@settings(LOADED, max_examples=40)
@given(SHARES, UNITS)
def test_kai(held: list[int], units: int) -> None:
    placed(kai_cluster(held), KaiOptions(), units, kai_place, kai.free)


# -- DRA with consumable capacity: each capacity of a device is held to its own sum ------------------------------------

DRIVER = "gpu.nvidia.com"
SHARING = DraOptions(consumable=True)


def dra_cluster(held: list[int]) -> ClusterFacts:
    devices = tuple(
        ClusterDevice(
            f"gpu-{index}", {"type": "gpu", "uuid": f"GPU-{index}"}, {"memory": 80 * GIB, "shares": 100}, shared=True,
            defaults={"memory": 0, "shares": 1},
        )
        for index in range(GPUS)
    )  # fmt: skip
    facts = ClusterFacts((ClusterNode("a"),), slices=(ClusterSlice(DRIVER, "a", "a", devices),))
    for number, units in enumerate(held):
        facts = dra_place(request({"fraction": units / 100}, SHARING, facts), 100 + number) or facts
    return facts


def dra_place(asked: LayerRequest, number: int) -> ClusterFacts | None:
    (template,) = dra.objects(asked)
    wanted = template["spec"]["spec"]["devices"]["requests"][0]["exactly"]["capacity"]["requests"]
    needs = {"shares": int(wanted["shares"]), "memory": int(wanted["memory"].removesuffix("Mi")) * 2**20}
    for index in range(GPUS):
        name = f"gpu-{index}"
        used = [one.consumed for claim in asked.facts.claims for one in claim.devices if one.device == name]
        if all(
            sum(one[capacity] for one in used) + amount <= {"shares": 100, "memory": 80 * GIB}[capacity]
            for capacity, amount in needs.items()
        ):
            claim = ClusterClaim(f"c{number}", "hub", (ClaimedDevice(DRIVER, "a", name, needs),))
            return replace(asked.facts, claims=(*asked.facts.claims, claim))
    return None


@settings(LOADED, max_examples=40)
@given(SHARES, UNITS)
def test_dra(held: list[int], units: int) -> None:
    placed(dra_cluster(held), SHARING, units, dra_place, dra.free)
