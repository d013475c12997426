"""MIG by NVIDIA's device plugin, and profiles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.layers_file import MigOptions, MigProfile, smallest
from gpushare_spawner.sharing.base import ClusterFacts, ClusterNode, ClusterPod, LayerCannot, LayerCapacity
from gpushare_spawner.sharing.mig import profile
from gpushare_spawner.spawner.kubernetes.cluster.layers import POD_LAYERS
from tests.sharing.requests import A100, GIB, H100, LOADED, POD, node, notebook, request, required

mig = POD_LAYERS[LayerName.MIG]
STRATEGY = "nvidia.com/mig.strategy"
# NVIDIA MIG user guide, "Supported MIG Profiles": name, parts of the memory (in eighths) and of the SMs
GUIDE = {
    ("NVIDIA-A100-SXM4-80GB", 80): {
        "1g.10gb": (1, 1, 7), "1g.20gb": (2, 1, 7), "2g.20gb": (2, 2, 7), "3g.40gb": (4, 3, 7), "4g.40gb": (4, 4, 7),
        "7g.80gb": (8, 7, 7),
    },
    ("NVIDIA-A100-SXM4-40GB", 40): {
        "1g.5gb": (1, 1, 7), "1g.10gb": (2, 1, 7), "2g.10gb": (2, 2, 7), "3g.20gb": (4, 3, 7), "4g.20gb": (4, 4, 7),
        "7g.40gb": (8, 7, 7),
    },
    ("NVIDIA-A30", 24): {"1g.6gb": (2, 1, 4), "2g.12gb": (4, 2, 4), "4g.24gb": (8, 4, 4)},
    ("NVIDIA-RTX-PRO-4500-Blackwell-Server-Edition", 32): {"1g.16gb": (4, 1, 2), "2g.32gb": (8, 2, 2)},
    ("NVIDIA-H100-80GB-HBM3", 80): {
        "1g.10gb": (1, 1, 7), "1g.20gb": (2, 1, 7), "2g.20gb": (2, 2, 7), "3g.40gb": (4, 3, 7), "4g.40gb": (4, 4, 7),
        "7g.80gb": (8, 7, 7),
    },
    ("NVIDIA-H200", 141): {
        "1g.18gb": (1, 1, 7), "1g.35gb": (2, 1, 7), "2g.35gb": (2, 2, 7), "3g.71gb": (4, 3, 7), "4g.71gb": (4, 4, 7),
        "7g.141gb": (8, 7, 7),
    },
    ("NVIDIA-B200", 180): {
        "1g.23gb": (1, 1, 7), "1g.45gb": (2, 1, 7), "2g.45gb": (2, 2, 7), "3g.90gb": (4, 3, 7), "4g.90gb": (4, 4, 7),
        "7g.180gb": (8, 7, 7),
    },
}  # fmt: skip
MODELS = sorted(GUIDE)


def mixed(name: str, product: str = A100, gpu_gib: int = 80, *, devices: dict[str, int]) -> ClusterNode:
    """A node with so many MIG devices by profile."""
    allocatable = {f"nvidia.com/mig-{profile_name}": count for profile_name, count in devices.items()}
    return node(name, product, gpu_gib, labels={STRATEGY: "mixed"}, allocatable=allocatable)


def found(name: str, model: str, gib: int) -> MigProfile:
    one = profile(name, model, gib * GIB)
    assert one is not None
    return one


@pytest.mark.parametrize(("model", "gib"), MODELS)
def test_profiles_names_tell_their_parts_as_the_guide_has_them(model: str, gib: int) -> None:
    for name, (eighths, slices, of) in GUIDE[model, gib].items():
        one = found(name, model, gib)
        assert (one.memory_slices, one.slices, one.compute_slices) == (eighths, slices, of), name
        # without the GPU's size a profile is never taken for more than it is
        unknown = profile(name, model, None)
        assert unknown is not None
        assert unknown.memory_slices <= eighths


@LOADED
@given(st.sampled_from(MODELS), st.integers(1, 100), st.none() | st.integers(1, 180))
def test_profile_is_never_smaller_than_the_share_and_the_smallest_that_fits_is_taken(
    of: tuple[str, int], units: int, gib: int | None
) -> None:
    offered = [found(name, *of) for name in GUIDE[of]]
    best = smallest(offered, units, None if gib is None else gib * GIB)
    fit = [one for one in offered if one.covers(units, None if gib is None else gib * GIB)]
    if best is None:
        assert fit == []
        return
    eighths, slices, all_slices = GUIDE[of][best.name]
    assert slices / all_slices >= units / 100
    if gib is None:
        assert eighths / 8 >= units / 100
    else:
        assert best.memory_bytes >= gib * GIB
    assert not any(one.slices <= best.slices and one.memory_slices <= best.memory_slices and one != best for one in fit)


def test_fractions_on_an_a100_take_the_profiles_that_hold_them() -> None:
    offered = [found(name, A100, 80) for name in GUIDE[A100, 80]]
    chosen = {units: smallest(offered, units) for units in (10, 14, 25, 30, 50, 60, 100)}
    names = {units: one.name if one else None for units, one in chosen.items()}
    assert names == {
        10: "1g.10gb", 14: "1g.20gb", 25: "2g.20gb", 30: "3g.40gb", 50: "4g.40gb", 60: "7g.80gb", 100: "7g.80gb"
    }  # fmt: skip


def test_profile_with_media_extensions_is_taken_only_where_there_is_no_plain_one() -> None:
    plain, media = found("1g.10gb", A100, 80), found("1g.10gb.me", A100, 80)
    assert smallest([media, plain], 10) == plain
    assert smallest([media], 10) == media


@pytest.mark.parametrize("name", ["1c.3g.20gb", "gpu", "", "0g.10gb", "1g.0gb", "8g.80gb", "1g.10gb "])
def test_part_of_an_instance_and_other_names_are_no_profiles(name: str) -> None:
    assert profile(name, A100, 80 * GIB) is None


def test_mixed_strategy_asks_for_the_profiles_resource_on_nodes_with_such_gpus() -> None:
    nodes = (mixed("a", devices={"1g.10gb": 4, "2g.20gb": 1, "1c.3g.40gb": 2}), node("b", labels={STRATEGY: "mixed"}))
    asked = request({"fraction": 0.25}, MigOptions(), ClusterFacts(nodes))
    pod = mig.render(POD, asked)
    assert notebook(pod)["resources"]["limits"] == {"memory": "4Gi", "nvidia.com/mig-2g.20gb": "1"}
    assert required(pod) == {"nvidia.com/gpu.product": [A100]}
    assert mig.free(asked) == LayerCapacity(1, 1, profile=found("2g.20gb", A100, 80))


def test_suffix_of_a_resource_is_written_with_a_dot() -> None:
    asked = request({"fraction": 0.10}, MigOptions(), ClusterFacts((mixed("a", devices={"1g.10gb.me": 1}),)))
    assert notebook(mig.render(POD, asked))["resources"]["limits"]["nvidia.com/mig-1g.10gb.me"] == "1"


def test_single_strategy_asks_for_a_gpu_on_nodes_with_that_profile() -> None:
    labels = {STRATEGY: "single", "nvidia.com/gpu.memory": "19968"}
    single = node("a", f"{A100}-MIG-2g.20gb", labels=labels, allocatable={"nvidia.com/gpu": 3})
    small = node("b", f"{A100}-MIG-1g.10gb", labels={**labels, "nvidia.com/gpu.memory": "9728"},
                 allocatable={"nvidia.com/gpu": 7})  # fmt: skip
    pods = (ClusterPod("x", "hub", "a", requests={"nvidia.com/gpu": 1}),)
    asked = request({"fraction": 0.25}, MigOptions(), ClusterFacts((small, single), pods))
    pod = mig.render(POD, asked)
    assert notebook(pod)["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert required(pod) == {"nvidia.com/gpu.product": [f"{A100}-MIG-2g.20gb"]}
    assert mig.free(asked) == LayerCapacity(2, 3, profile=profile("2g.20gb", A100, None, 19968 * 2**20))


def test_of_two_models_the_one_with_a_free_device_counts() -> None:
    nodes = (mixed("a", A100, devices={"2g.20gb": 1}), mixed("h", H100, 80, devices={"3g.40gb": 1}))
    taken = (ClusterPod("x", "hub", "a", requests={"nvidia.com/mig-2g.20gb": 1}),)
    first = request({"fraction": 0.25}, MigOptions(), ClusterFacts(nodes))
    then = request({"fraction": 0.25}, MigOptions(), ClusterFacts(nodes, taken))
    assert required(mig.render(POD, first)) == {"nvidia.com/gpu.product": [A100]}
    assert "nvidia.com/mig-3g.40gb" in notebook(mig.render(POD, then))["resources"]["limits"]
    assert required(mig.render(POD, then)) == {"nvidia.com/gpu.product": [H100]}


def test_memory_in_bytes_is_compared_with_what_the_label_says_of_a_profile() -> None:
    labels = {STRATEGY: "mixed", "nvidia.com/mig-1g.10gb.memory": "9728", "nvidia.com/mig-1g.20gb.memory": "19968"}
    both = node("a", labels=labels, allocatable={"nvidia.com/mig-1g.10gb": 1, "nvidia.com/mig-1g.20gb": 1})

    def resource(guarantee: str) -> str:
        asked = request({"fraction": 0.1, "memory": {"guarantee": guarantee}}, MigOptions(), ClusterFacts((both,)))
        (name,) = set(notebook(mig.render(POD, asked))["resources"]["limits"]) - {"memory"}
        return str(name)

    assert resource("9.5Gi") == "nvidia.com/mig-1g.10gb"
    assert resource("9.6Gi") == "nvidia.com/mig-1g.20gb"
    # as a part of the GPU two of eight memory slices are a quarter, though they are less than 20 GiB
    assert resource("25%") == "nvidia.com/mig-1g.20gb"
    assert resource("12.5%") == "nvidia.com/mig-1g.10gb"


def test_several_gpus_are_whole_ones_because_cuda_uses_one_mig_device() -> None:
    nodes = (
        node("a", labels={STRATEGY: "mixed"}, allocatable={"nvidia.com/gpu": 2, "nvidia.com/mig-7g.80gb": 2}),
        node("s", f"{A100}-MIG-7g.80gb", labels={STRATEGY: "single"}, allocatable={"nvidia.com/gpu": 8}),
    )
    pod = mig.render(POD, request({"count": 2}, MigOptions(), ClusterFacts(nodes)))
    assert notebook(pod)["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert required(pod) == {"nvidia.com/gpu.product": [A100]}


def test_share_that_no_profile_holds_is_refused_with_the_profiles_that_there_are() -> None:
    asked = request({"fraction": 0.5}, MigOptions(), ClusterFacts((mixed("a", devices={"1g.10gb": 7, "3g.40gb": 1}),)))
    with pytest.raises(LayerCannot, match=r"0\.50 GPU.*there are 1g\.10gb, 3g\.40gb"):
        mig.render(POD, asked)
    with pytest.raises(LayerCannot, match="no node has MIG devices"):
        mig.free(request({"fraction": 0.5}, MigOptions(), ClusterFacts((node(),))))
