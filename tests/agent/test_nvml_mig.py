"""MIG instances as NVML tells of them: figures as an A100 and an A30 give them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from gpushare_spawner.agent.gpus.nvml import GONE, Gpu, NoGpu, Nvml, RecordedGpus, all_gpus
from gpushare_spawner.model.layers_file import MigInstance, MigProfile
from tests.agent.peers import FIRST
from tests.agent.test_nvml import fails, fake_nvml

MIB = 2**20
A100 = {0: (1, 9728), 1: (2, 19968), 2: (3, 40192), 3: (4, 40192), 4: (7, 80896), 9: (1, 19968)}
"""NVML's profiles of an A100 with 80 GB: compute slices and memory in MiB."""
A30 = {0: (1, 5836), 1: (2, 11808), 3: (4, 23808)}
Devices = dict[int, tuple[str, str, int, int, int]]
"""MIG devices by their index: UUID, name, slices of the GPU instance, slices of the compute instance, MiB."""

SMALL = ("MIG-1", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", 1, 1, 9728)
MEDIA = ("MIG-5", "NVIDIA A100-SXM4-80GB MIG 1g.20gb+me", 1, 1, 19968)
LARGE = ("MIG-3", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", 3, 3, 40192)
SPLIT = ("MIG-4", "NVIDIA A100-SXM4-80GB MIG 1c.3g.40gb", 3, 1, 40192)


def fake_mig(
    monkeypatch: pytest.MonkeyPatch, devices: Devices, profiles: dict[int, tuple[int, int]] | None = None, **more: Any
) -> None:
    """GPU 0 is whole, GPU 1 is in MIG mode."""
    known = A100 if profiles is None else profiles

    def device(_: object, index: int) -> str:
        if index not in devices:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return devices[index][0]

    def of(handle: Any) -> tuple[str, str, int, int, int]:
        return next(one for one in devices.values() if one[0] == handle)

    def memory(handle: Any) -> SimpleNamespace:
        whole = 81920 if not isinstance(handle, str) else of(handle)[4]
        return SimpleNamespace(total=whole * MIB, used=100 * MIB)

    def by_uuid(uuid: str) -> Any:
        if uuid.startswith("GPU-"):
            return int(uuid[-1])
        if not any(one[0] == uuid for one in devices.values()):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def mode(handle: Any) -> list[int]:
        if isinstance(handle, str):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [handle, handle]

    def profile(_: object, number: int) -> SimpleNamespace:
        if number not in known:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(sliceCount=known[number][0], memorySizeMB=known[number][1])

    def attributes(handle: str) -> SimpleNamespace:
        _, _, slices, compute, mebibytes = of(handle)
        return SimpleNamespace(gpuInstanceSliceCount=slices, computeInstanceSliceCount=compute, memorySizeMB=mebibytes)

    functions: dict[str, Any] = {
        "nvmlDeviceGetMigMode": mode,
        "nvmlDeviceGetMaxMigDeviceCount": lambda handle: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": device,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetUUID": lambda handle: handle if isinstance(handle, str) else f"GPU-{handle}",
        "nvmlDeviceGetName": lambda handle: of(handle)[1] if isinstance(handle, str) else "NVIDIA A100-SXM4-80GB",
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetAttributes": attributes,
        "nvmlDeviceGetGpuInstanceProfileInfo": profile,
        "nvmlDeviceGetUtilizationRates": fails(pynvml.NVML_ERROR_NOT_SUPPORTED),
    }
    fake_nvml(monkeypatch, **functions | more)


def test_instances_are_found_with_their_sizes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_mig(monkeypatch, {0: SMALL, 2: MEDIA, 3: LARGE, 6: SPLIT})
    whole, small, media, large = Nvml().gpus(mig=True)
    assert (whole.uuid, whole.mig) == ("GPU-0", None)
    assert (small.index, small.uuid, small.model, small.memory_bytes) == (
        1, "MIG-1", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9728 * MIB
    )  # fmt: skip
    profile = MigProfile("1g.10gb", 1, 7, 1, 9728 * MIB)
    assert small.mig == MigInstance("GPU-1", "NVIDIA A100-SXM4-80GB", profile)
    assert (small.label, small.whole, small.capacity(200)) == ("GPU 1, MIG 1g.10gb", "GPU-1", 14)
    assert (whole.label, whole.whole, whole.capacity(200)) == ("GPU 0", "GPU-0", 200)
    assert media.mig is not None
    assert (media.mig.profile.name, media.mig.profile.memory_slices) == ("1g.20gb.me", 2)
    assert large.mig is not None
    assert (large.mig.profile.slices, large.mig.profile.memory_slices) == (3, 4)
    assert "MIG-4 is skipped: it shares its GPU instance's memory with others" in caplog.text


def test_gpu_with_four_compute_slices_is_known_by_its_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mig(monkeypatch, {0: ("MIG-1", "NVIDIA A30 MIG 1g.6gb", 1, 1, 5836)}, A30)
    profile = Nvml().gpus(mig=True)[1].mig
    assert profile is not None
    assert profile.profile == MigProfile("1g.6gb", 1, 4, 2, 5836 * MIB)
    assert profile.profile.units == 25


def test_instance_without_profiles_is_taken_for_no_more_than_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mig(monkeypatch, {0: ("MIG-1", "some name", 1, 1, 5836)}, {})
    found = Nvml().gpus(mig=True)[1].mig
    assert found is not None
    assert found.profile == MigProfile("1g.6gb", 1, 7, 1, 5836 * MIB)


def test_gpu_in_mig_mode_without_instances_is_left_out_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_mig(monkeypatch, {})
    assert [gpu.uuid for gpu in Nvml().gpus(mig=True)] == ["GPU-0"]
    assert "GPU 1 is in MIG mode and has no instance" in caplog.text
    assert "nvidia-smi mig -i 1 -cgi" in caplog.text
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", lambda handle: [1, 1])
    with pytest.raises(NoGpu, match="GPU 0 is in MIG mode and has no instance"):
        Nvml().gpus(mig=True)


def test_agent_of_a_cluster_leaves_instances_to_nvidias_device_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mig(monkeypatch, {0: SMALL})
    assert [gpu.uuid for gpu in Nvml().gpus()] == ["GPU-0"]


def test_uuids_of_old_drivers_are_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fake_mig(monkeypatch, {0: ("MIG-GPU-9/1/0", *SMALL[1:])})
    assert len(Nvml().gpus(mig=True)) == 1
    assert "driver 470" in caplog.text


def test_instance_is_well_until_an_admin_destroys_it(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: Devices = {0: SMALL, 3: LARGE}
    fake_mig(monkeypatch, devices)
    nvml = Nvml()
    _, small, _ = nvml.gpus(mig=True)
    state = nvml.state(small)
    assert (state.healthy, state.memory_used_bytes, state.utilisation) == (True, 100 * MIB, None)
    del devices[0]
    assert nvml.state(small).trouble == GONE
    assert [gpu.uuid for gpu in nvml.instances() or ()] == ["MIG-3"]


def test_instance_of_a_gpu_that_is_lost_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mig(monkeypatch, {0: SMALL})
    nvml = Nvml()
    _, small = nvml.gpus(mig=True)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", fails(pynvml.NVML_ERROR_GPU_IS_LOST))
    assert "does not answer its driver" in nvml.state(small).trouble
    assert [gpu.uuid for gpu in nvml.instances() or ()] == []


def test_xid_of_a_gpu_concerns_its_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mig(monkeypatch, {0: SMALL})
    nvml = Nvml()
    whole, small = nvml.gpus(mig=True)
    assert nvml._xids is not None
    nvml._xids.last["GPU-1"] = 79
    assert "broke with Xid 79" in nvml.state(small).trouble
    assert nvml.state(whole).healthy


def test_instance_that_is_gone_when_the_agent_starts_is_kept_for_its_session(tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    whole = MigInstance("GPU-1", "A100", MigProfile("1g.10gb", 1, 7, 1, 9728 * MIB))
    a, b = (Gpu(1, f"MIG-{name}", "A100 MIG 1g.10gb", 9728 * MIB, mig=whole) for name in "ab")
    RecordedGpus(path).save([FIRST, a, b])
    assert all_gpus(lambda: (FIRST, b), RecordedGpus(path), lambda gpu: False) == (FIRST, b, a)
