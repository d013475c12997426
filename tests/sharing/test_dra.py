"""DRA with NVIDIA's driver: claim templates, and what ResourceSlices and claims leave free."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpushare_spawner.model.layers_file import DraOptions, LayerRule
from gpushare_spawner.sharing import dra
from gpushare_spawner.sharing.base import (
    ClaimedDevice,
    ClusterClaim,
    ClusterDevice,
    ClusterFacts,
    ClusterNode,
    ClusterSlice,
    LayerCannot,
    LayerCapacity,
    LayerRequest,
)
from gpushare_spawner.sharing.mig import profile
from tests.present import present
from tests.sharing.requests import GIB, LOADED, POD, notebook, request, required

DRIVER = "gpu.nvidia.com"
MODEL = "NVIDIA A100-SXM4-80GB"
NODE = ClusterNode("a")
PLAIN, SHARING = DraOptions(), DraOptions(consumable=True)


def gpu(name: str, gib: int = 80, model: str = MODEL, shares: int = 0, **more: Any) -> ClusterDevice:
    """A GPU as the driver publishes it; with ``shares`` as with --consumable-shares."""
    capacity = {"memory": gib * GIB, **({"shares": shares} if shares else {})}
    return ClusterDevice(
        name,
        {"type": "gpu", "uuid": f"GPU-{name}", "productName": model},
        capacity,
        shared=bool(shares),
        defaults={"memory": 0, "shares": 1} if shares else {},
        **more,
    )


def mig(name: str, of: str, mib: int, parent: str = "gpu-0", **more: Any) -> ClusterDevice:
    attributes = {"type": "mig", "profile": of, "parentUUID": f"GPU-{parent}", "productName": MODEL}
    return ClusterDevice(name, attributes, {"memory": mib * 2**20}, **more)


def facts(*devices: ClusterDevice, claims: tuple[ClusterClaim, ...] = (), **more: Any) -> ClusterFacts:
    return ClusterFacts((NODE,), slices=(ClusterSlice(DRIVER, "a", "a", devices, **more),), claims=claims)


def claim(device: str, **consumed: int) -> ClusterClaim:
    return ClusterClaim(f"claim-{device}", "hub", (ClaimedDevice(DRIVER, "a", device, consumed),))


def exactly(asked: LayerRequest) -> dict[str, Any]:
    (template,) = dra.objects(asked)
    assert template["apiVersion"] == "resource.k8s.io/v1"
    assert template["kind"] == "ResourceClaimTemplate"
    (one,) = template["spec"]["spec"]["devices"]["requests"]
    assert one["name"] == "gpu"
    found: dict[str, Any] = one["exactly"]
    return found


def test_whole_gpus_are_asked_for_by_the_drivers_device_class() -> None:
    there = facts(gpu("gpu-0"), gpu("gpu-1"), claims=(claim("gpu-1"),))
    assert exactly(request({"count": 2}, PLAIN, there)) == {"deviceClassName": "gpu.nvidia.com", "count": 2}
    assert exactly(request({"fraction": 1}, PLAIN, there)) == {"deviceClassName": "gpu.nvidia.com"}
    assert dra.free(request({"fraction": 1}, PLAIN, there)) == LayerCapacity(1, 2)
    assert dra.free(request({"count": 2}, PLAIN, there)) == LayerCapacity(0, 1)


def test_pod_names_the_template_in_its_spec_and_in_the_notebooks_container() -> None:
    asked = request({"count": 1}, PLAIN, facts(gpu("gpu-0")))
    (template,) = dra.objects(asked)
    pod = dra.render(POD, asked)
    name = template["metadata"]["name"]
    assert pod["spec"]["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": name}]
    assert notebook(pod)["resources"]["claims"] == [{"name": "gpu"}]
    assert re.fullmatch(r"gpushare-quarter-gpu-[0-9a-f]{8}", name)


def test_template_is_named_by_its_content_because_it_cannot_be_changed() -> None:
    there = facts(gpu("gpu-0"))
    names = [
        dra.objects(request(asked, PLAIN, there))[0]["metadata"]["name"]
        for asked in ({"count": 1}, {"fraction": 1}, {"count": 2})
    ]
    assert names[0] == names[1] != names[2]


def of_profile(servers: int, at_most: int, name: str, mebibytes: int) -> LayerCapacity:
    """The capacity of MIG devices of one profile of an A100."""
    return LayerCapacity(servers, at_most, profile=profile(name, MODEL, 80 * GIB, mebibytes * 2**20))


def test_fraction_is_the_smallest_mig_device_that_holds_it() -> None:
    there = facts(
        gpu("gpu-0"), mig("m1", "1g.10gb", 9728), mig("m2", "2g.20gb", 19968), mig("m3", "1g.10gb+me", 9728),
        claims=(claim("m2"),),
    )  # fmt: skip
    asked = exactly(request({"fraction": 0.25}, PLAIN, there))
    assert asked["deviceClassName"] == "mig.nvidia.com"
    assert asked["selectors"] == [{"cel": {"expression": "device.attributes['gpu.nvidia.com'].profile == '2g.20gb'"}}]
    assert dra.free(request({"fraction": 0.25}, PLAIN, there)) == of_profile(0, 1, "2g.20gb", 19968)
    assert dra.free(request({"fraction": 0.10}, PLAIN, there)) == of_profile(1, 1, "1g.10gb", 9728)


def test_compute_slices_of_a_gpu_are_those_of_the_profile_with_all_its_memory() -> None:
    new = "NVIDIA RTX 9000"
    parts = {"1g.6gb": 5836, "2g.12gb": 11808, "4g.24gb": 23808}
    devices = [mig(name, name, mib) for name, mib in parts.items()]
    whole = gpu("gpu-0", 24, model=new)
    asked = request({"fraction": 0.25}, PLAIN, facts(whole, *devices))
    assert present(dra.free(asked).profile).name == "1g.6gb"
    assert present(dra.free(asked).profile).compute_slices == 4
    # without that profile, or the GPU, a profile is taken for no more than it is
    for there in (facts(whole, *devices[:2]), facts(*devices)):
        assert present(dra.free(request({"fraction": 0.25}, PLAIN, there)).profile).name == "2g.12gb"


def test_mig_devices_that_are_not_made_yet_share_the_counters_of_their_gpu() -> None:
    def part(place: int) -> ClusterDevice:
        counters = {("gpu-0", "memory"): 20, ("gpu-0", f"slice{place}"): 1}
        return mig(f"m{place}", "2g.20gb", 19968, counters=counters)

    slices = {("gpu-0", f"slice{place}"): 1 for place in range(4)}
    devices = [part(place) for place in range(4)]
    whole = gpu("gpu-0", counters={("gpu-0", "memory"): 80, **slices})
    there = facts(whole, *devices, counters={("gpu-0", "memory"): 80, **slices})
    assert dra.free(request({"fraction": 0.25}, PLAIN, there)) == of_profile(4, 4, "2g.20gb", 19968)
    used = ClusterFacts(there.nodes, slices=there.slices, claims=(claim("m1"),))
    assert dra.free(request({"fraction": 0.25}, PLAIN, used)) == of_profile(3, 4, "2g.20gb", 19968)
    assert dra.free(request({"count": 1}, PLAIN, used)) == LayerCapacity(0, 1)


def test_fraction_with_consumable_capacity_asks_for_shares_and_memory() -> None:
    there = facts(gpu("gpu-0", shares=100), claims=(claim("gpu-0", shares=60, memory=40 * GIB),))
    asked = request({"fraction": 0.25}, SHARING, there)
    assert exactly(asked)["capacity"] == {"requests": {"shares": "25", "memory": "20480Mi"}}
    assert dra.free(asked) == LayerCapacity(1, 4)


def test_few_shares_are_rounded_up() -> None:
    asked = request({"fraction": 0.3}, SHARING, facts(gpu("gpu-0", shares=4)))
    assert exactly(asked)["capacity"]["requests"]["shares"] == "2"
    assert dra.free(asked) == LayerCapacity(2, 2)


def test_whole_gpu_of_a_driver_with_shares_is_all_of_them() -> None:
    there = facts(gpu("gpu-0", shares=100), gpu("gpu-1", 40, shares=100), claims=(claim("gpu-0", shares=1),))
    for options in (PLAIN, SHARING):
        asked = request({"count": 1}, options, there)
        assert exactly(asked)["capacity"]["requests"]["shares"] == "100"
        assert dra.free(asked) == LayerCapacity(1, 2)


def test_devices_that_no_claim_can_share_are_refused_where_shares_are_asked_for() -> None:
    with pytest.raises(LayerCannot, match="--consumable-shares"):
        dra.objects(request({"fraction": 0.25}, SHARING, facts(gpu("gpu-0"))))
    with pytest.raises(LayerCannot, match=r"0\.25 GPU"):
        dra.objects(request({"fraction": 0.25}, PLAIN, facts(gpu("gpu-0"), mig("m1", "1g.10gb", 9728))))


def test_tainted_devices_other_drivers_and_old_generations_are_not_free() -> None:
    old = ClusterSlice(DRIVER, "a", "a", (gpu("gpu-8"), gpu("gpu-9")), generation=1)
    new = ClusterSlice(DRIVER, "a", "a", (gpu("gpu-0"), gpu("gpu-1", tainted=True)), generation=2)
    other = ClusterSlice("other.example.com", "a", "a", (gpu("gpu-7"),))
    there = ClusterFacts((NODE,), slices=(old, new, other))
    assert dra.free(request({"count": 1}, PLAIN, there)).servers == 1


def test_rule_and_models_become_node_labels_and_an_expression() -> None:
    rule = LayerRule.model_validate({"nodes": {"pool": "dra"}, "models": ["*A100*"], "layer": "dra"})
    there = facts(gpu("gpu-0"), gpu("gpu-1", model="Tesla T4"))
    asked = request({"count": 1}, PLAIN, there, rule=rule)
    assert required(dra.render(POD, asked)) == {"pool": ["dra"]}
    assert exactly(asked)["selectors"] == [
        {"cel": {"expression": "device.attributes['gpu.nvidia.com'].productName.matches('(?i)^(.*A100.*)$')"}}
    ]
    assert dra.free(asked) == LayerCapacity(1, 1)


@LOADED
@example("[']", "'")
@example("[!a']b", "1b")
@example("[a-z]1", "b1")
@given(st.text("aB1*? -[].'\\", max_size=8), st.text("aB1 -].'\\", max_size=8))
def test_expression_matches_what_the_pattern_matches(pattern: str, name: str) -> None:
    # RE2 and Python read this part of the language alike
    written = dra._regular_expression([pattern])
    assert "'" not in written
    assert "\\" not in written
    if fnmatchcase(name.lower(), pattern.lower()):
        assert re.match(written, name)
