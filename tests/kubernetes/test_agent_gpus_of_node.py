"""Which devices stand for a GPU, how a container gets it, and whose it is."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as some

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.kubernetes.devices.cdi import cdi_names
from gpushare_spawner.agent.kubernetes.devices.container import lists_own_pod, named_by, withheld
from gpushare_spawner.agent.kubernetes.devices.owners import MAX_DEVICES, DeviceIds, devices_for, offered, preferred
from gpushare_spawner.agent.kubernetes.devices.pod_resources import KubeletAssignments
from gpushare_spawner.agent.kubernetes.options import ClusterOptions
from gpushare_spawner.agent.kubernetes.settings import ClusterSettings
from gpushare_spawner.agent.sessions.attribution import _pod_uid

GPUS = tuple(Gpu(index, f"GPU-{index}{index}{index}", "A100", 1, minor=index + 4) for index in range(3))
ZERO, ONE, TWO = GPUS


@given(some.text(min_size=1, max_size=120), some.integers(0, 9999))
def test_ids_and_back(gpu: str, number: int) -> None:
    ids = DeviceIds(gpu, 3)
    assert len(ids.id(number)) <= 63
    assert ids.number(ids.id(number)) == number
    assert ids.has(ids.id(number))
    for other in (DeviceIds(gpu + "x", 3), DeviceIds(gpu + "-3", 3)):
        assert other.number(ids.id(number)) is None
        assert not other.has(ids.id(number))
    # the same GPU, numbered anew
    assert DeviceIds(gpu, 4).number(ids.id(number)) is None
    assert DeviceIds(gpu, 4).has(ids.id(number))


def test_real_uuids_stay_readable() -> None:
    assert (
        DeviceIds("GPU-8a5ce2b1-1c2d-4e3f-8a9b-0c1d2e3f4a5b", 1).id(7)
        == "GPU-8a5ce2b1-1c2d-4e3f-8a9b-0c1d2e3f4a5b-1-0007"
    )


@given(some.integers(1, 200), some.sets(some.integers(0, 300)), some.data())
def test_what_is_held_stays_and_as_much_is_free_as_is_not_in_use(
    capacity: int, held: set[int], data: some.DataObject
) -> None:
    in_use = data.draw(some.integers(0, len(held)))
    numbers = offered(capacity, held, in_use)
    assert held <= set(numbers)
    assert numbers == sorted(set(numbers))
    assert len(numbers) - len(held) == max(0, capacity - in_use)
    # the free ones are the lowest there are
    free = [number for number in numbers if number not in held]
    assert free == [number for number in range(max(free, default=-1) + 1) if number not in held]


def test_devices_for_shares() -> None:
    assert [devices_for(units, 5) for units in (0, 1, 5, 6, 100)] == [0, 1, 1, 2, 20]


def test_a_part_of_a_device_is_no_capacity() -> None:
    """What the report says is there has to be there at the kubelet as well."""
    here = Path("/")
    options = ClusterOptions(ClusterSettings("hub", unit_size=50), here, cdi="auto", preload_file=False)
    assert [options.whole_devices(units) for units in (100, 125, 149, 150)] == [100, 100, 100, 150]


def test_there_is_an_end_to_the_devices_of_a_gpu() -> None:
    """However many sessions have lent everything: what is offered is a list that a kubelet takes."""
    held = range(MAX_DEVICES - 50)
    assert offered(100, held, in_use=0) == list(range(MAX_DEVICES))
    assert DeviceIds("GPU-1", 0).id(MAX_DEVICES - 1).endswith("-9999")


def test_low_ids_are_preferred() -> None:
    assert preferred(["d", "b", "c", "a"], ["c"], 3) == ["c", "a", "b"]


def test_claimed_gpus_are_those_that_the_variable_names() -> None:
    assert named_by(None, GPUS) == named_by("all", GPUS) == named_by("void", GPUS) == GPUS
    assert named_by("GPU-111,GPU-222", GPUS) == (ONE, TWO)
    assert named_by("0", GPUS) == (ZERO,)
    assert named_by("GPU-elsewhere", GPUS) == ()
    # the second, sixth and seventh GPU of the node are all that this container sees
    assert named_by("1,5,6", GPUS) == GPUS
    assert named_by("5,6", GPUS) == ()


def assigned(offers: dict[str, set[str]], mine: dict[str, set[str]] | None = None) -> KubeletAssignments:
    by_pod = {} if mine is None else {("hub", "agent"): {name: (frozenset(ids),) for name, ids in mine.items()}}
    return KubeletAssignments(by_pod, {name: frozenset(ids) for name, ids in offers.items()})


def test_a_gpu_of_nvidias_plugin_is_shared_only_by_who_holds_it() -> None:
    own = ("hub", "agent")
    everything = {"nvidia.com/gpu": {"GPU-000", "GPU-111", "GPU-222"}}
    assert set(withheld(GPUS, assigned(everything), None)) == {"GPU-000", "GPU-111", "GPU-222"}
    assert set(withheld(GPUS, assigned(everything, {"nvidia.com/gpu": {"GPU-111"}}), own)) == {"GPU-000", "GPU-222"}
    assert withheld(GPUS, assigned({}), own) == {}
    assert withheld(GPUS, assigned({"gpushare-spawner.io/gpu-0": {"GPU-000-0001"}}), own) == {}
    # one replica of a time-sliced GPU is not the GPU
    sliced = {"nvidia.com/gpu.shared": {"GPU-000::0", "GPU-000::1"}}
    assert set(withheld(GPUS, assigned(sliced, {"nvidia.com/gpu.shared": {"GPU-000::0"}}), own)) == {"GPU-000"}
    assert withheld(GPUS, assigned(sliced, {"nvidia.com/gpu.shared": {"GPU-000::0", "GPU-000::1"}}), own) == {}
    # by index on the node, which a container numbers anew
    assert set(withheld(GPUS, assigned({"nvidia.com/gpu": {"0", "1"}}), None)) == {"GPU-000", "GPU-111"}
    assert withheld(GPUS, assigned({"nvidia.com/gpu": {"0", "1", "7"}}, {"nvidia.com/gpu": {"7"}}), own) == {}


def test_a_gpu_that_a_pod_still_holds_is_not_shared_when_the_plugin_has_gone() -> None:
    theirs, mine = ("team", "training"), ("hub", "agent")
    held = {"nvidia.com/gpu": (frozenset({"GPU-111"}), frozenset({"GPU-222"}))}
    found = withheld(GPUS, KubeletAssignments({theirs: held}, {}), mine)
    assert set(found) == {"GPU-111", "GPU-222"}
    assert "another pod" in found["GPU-111"]
    assert withheld(GPUS, KubeletAssignments({mine: held}, {}), mine) == {}
    # one replica is the agent's, the other one a pod's
    sliced = {
        mine: {"nvidia.com/gpu": (frozenset({"GPU-000::0"}),)},
        theirs: {"nvidia.com/gpu": (frozenset({"GPU-000::1"}),)},
    }
    assert set(withheld(GPUS, KubeletAssignments(sliced, {}), mine)) == {"GPU-000"}
    assert withheld(GPUS, KubeletAssignments({theirs: {"example.org/gpu": (frozenset({"GPU-000"}),)}}, {}), mine) == {}


def test_a_list_without_our_own_pod_is_not_believed() -> None:
    assert not lists_own_pod(assigned({}), ("hub", "agent"))
    assert lists_own_pod(assigned({}, {}), ("hub", "agent"))
    assert lists_own_pod(assigned({}), None)


def spec(folder: Path, name: str, kind: str, devices: dict[str, list[str]]) -> None:
    folder.mkdir(exist_ok=True)
    content = {
        "cdiVersion": "0.6.0",
        "kind": kind,
        "devices": [
            {"name": device, "containerEdits": {"deviceNodes": [{"path": path} for path in paths]}}
            for device, paths in devices.items()
        ],
    }
    (folder / name).write_text(json.dumps(content))


def test_cdi_names(tmp_path: Path) -> None:
    etc, run = tmp_path / "etc", tmp_path / "run"
    assert cdi_names(GPUS, folders=(etc, run)) == {}
    # by number: a device is known by the file that it brings; "all" brings several
    spec(etc, "nvidia.yaml", "nvidia.com/gpu", {
        "0": ["/dev/nvidia4", "/dev/nvidiactl"], "1": ["/dev/nvidia5"], "all": ["/dev/nvidia4", "/dev/nvidia5"],
    })  # fmt: skip
    assert cdi_names(GPUS, folders=(etc, run)) == {"GPU-000": "nvidia.com/gpu=0", "GPU-111": "nvidia.com/gpu=1"}
    # by UUID, in the folder that has precedence
    spec(run, "plugin.json", "k8s.device-plugin.nvidia.com/gpu", {"GPU-111": ["/dev/nvidia5"]})
    found = cdi_names(GPUS, folders=(etc, run))
    assert found == {"GPU-000": "nvidia.com/gpu=0", "GPU-111": "k8s.device-plugin.nvidia.com/gpu=GPU-111"}
    assert cdi_names(GPUS, "nvidia.com/gpu", (etc, run))["GPU-111"] == "nvidia.com/gpu=1"
    assert cdi_names(GPUS, "off", (etc, run)) == {}


def test_other_specifications_and_broken_ones_are_left_out(tmp_path: Path) -> None:
    spec(tmp_path, "net.json", "example.org/nic", {"GPU-000": []})
    (tmp_path / "broken.yaml").write_text("devices: [")
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "README").write_text("none of ours")
    assert cdi_names(GPUS, folders=(tmp_path,)) == {}


def test_pods_of_cgroups() -> None:
    uid = "0f3a5c7e-1b2d-4c6f-8a9b-1234567890ab"
    slice_name = f"kubepods-burstable-pod{uid.replace('-', '_')}.slice"
    assert _pod_uid(f"/../../{slice_name}/cri-containerd-ffee.scope") == uid
    assert _pod_uid(f"/kubepods/besteffort/pod{uid}/ffee") == uid
    assert _pod_uid("/user.slice/podman-12.scope") == ""
