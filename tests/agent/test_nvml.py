"""What NVML says, and what becomes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from gpushare_spawner.agent.gpus.nvml import NoGpu, Nvml, Utilisation


def fake_nvml(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """Two GPUs of 16 GiB; single functions may be replaced."""
    defaults: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": lambda uuid: int(uuid[-1]),
        "nvmlDeviceGetMigMode": lambda handle: [pynvml.NVML_DEVICE_MIG_DISABLE, pynvml.NVML_DEVICE_MIG_DISABLE],
        "nvmlDeviceGetName": lambda handle: "NVIDIA A100-SXM4-80GB",
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=16 * 2**30, used=2**30),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=9), SimpleNamespace(pid=7)],
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=37, memory=20),
        "nvmlDeviceGetTemperature": lambda handle, sensor: 61 + sensor,
        "nvmlDeviceGetPowerUsage": lambda handle: 233_461,
    }
    for name, function in (defaults | functions).items():
        monkeypatch.setattr(pynvml, name, function)


def fails(code: int) -> Any:
    def function(*_: Any) -> None:
        raise pynvml.NVMLError(code)

    return function


def test_gpus_and_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch)
    nvml = Nvml()
    first, second = nvml.gpus()
    assert (first.index, first.uuid, first.model, first.memory_bytes) == (
        0,
        "GPU-0",
        "NVIDIA A100-SXM4-80GB",
        16 * 2**30,
    )
    assert not first.simulated
    assert second.uuid == "GPU-1"
    state = nvml.state(first)
    assert (state.healthy, state.memory_used_bytes, state.pids) == (True, 2**30, (7, 9))
    assert state.utilisation == 0.37
    assert (state.temperature_celsius, state.power_watts) == (61, 233.5)


def test_a_gpu_whose_driver_does_not_say_how_busy_or_hot_it_is_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = fails(pynvml.NVML_ERROR_NOT_SUPPORTED)
    names = ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage")
    fake_nvml(monkeypatch, **dict.fromkeys(names, silent))
    nvml = Nvml()
    state = nvml.state(nvml.gpus()[0])
    assert (state.healthy, state.utilisation, state.temperature_celsius, state.power_watts) == (True, None, None, None)


def test_a_simulated_gpu_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, nvmlDeviceGetName=lambda handle: "Simulated GPU 16 GiB")
    assert all(gpu.simulated for gpu in Nvml().gpus())


def test_mig_is_skipped_with_a_sentence(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fake_nvml(monkeypatch, nvmlDeviceGetMigMode=lambda handle: [int(handle == 0), 0])
    assert [gpu.index for gpu in Nvml().gpus()] == [1]
    assert "GPU 0 is split by MIG" in caplog.text


def test_gpus_without_mig_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, nvmlDeviceGetMigMode=fails(pynvml.NVML_ERROR_NOT_SUPPORTED))
    assert len(Nvml().gpus()) == 2


def test_a_gpu_that_is_lost(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fake_nvml(monkeypatch)
    nvml = Nvml()
    first, _ = nvml.gpus()
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", fails(pynvml.NVML_ERROR_GPU_IS_LOST))
    assert not nvml.state(first).healthy
    with pytest.raises(NoGpu, match=r"GPU 0 does not answer.*GPU 1 does not answer"):
        nvml.gpus()


def test_a_driver_that_lists_no_processes_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, nvmlDeviceGetComputeRunningProcesses=fails(pynvml.NVML_ERROR_NOT_SUPPORTED))
    nvml = Nvml()
    state = nvml.state(nvml.gpus()[0])
    assert (state.healthy, state.pids) == (True, ())


def test_a_process_has_the_memory_that_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [
        SimpleNamespace(pid=7, usedGpuMemory=2**30),
        SimpleNamespace(pid=9, usedGpuMemory=None),
        SimpleNamespace(pid=7, usedGpuMemory=2**20),
    ]
    fake_nvml(monkeypatch, nvmlDeviceGetComputeRunningProcesses=lambda handle: listed)
    nvml = Nvml()
    state = nvml.state(nvml.gpus()[0])
    assert state.processes == {7: 2**30 + 2**20, 9: None}
    assert state.pids == (7, 9)


def sample(pid: int, at: int, sm: int) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, timeStamp=at, smUtil=sm)


def test_utilisation_is_in_seconds_and_shares_and_without_a_drivers_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(handle: int, since: int) -> list[SimpleNamespace]:
        asked.append(since)
        return [
            sample(7, 1_500_000_166_667, 40),
            sample(9, 1_500_000_333_333, 7),
            sample(0, 1_500_000_333_333, 3),  # the rest of a buffer that is larger than the answer
            sample(7, 1_499_999_000_000, 90),  # from before
            sample(8, 1_500_000_333_333, 4_294_967),
        ]

    fake_nvml(monkeypatch, nvmlDeviceGetProcessUtilization=answer)
    nvml = Nvml()
    found = nvml.utilisation(nvml.gpus()[0], 1_500_000.0)
    assert found == (Utilisation(7, 1_500_000.166667, 0.4), Utilisation(9, 1_500_000.333333, 0.07))
    assert asked == [1_500_000_000_000]


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (pynvml.NVML_ERROR_NOT_SUPPORTED, None),
        (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, None),
        (pynvml.NVML_ERROR_NO_PERMISSION, None),
        (pynvml.NVML_ERROR_NOT_FOUND, ()),
        (pynvml.NVML_ERROR_GPU_IS_LOST, ()),
        (pynvml.NVML_ERROR_INSUFFICIENT_SIZE, ()),
    ],
)
def test_a_driver_that_never_tells_utilisation_is_told_apart_from_one_with_no_samples(
    monkeypatch: pytest.MonkeyPatch, code: int, found: tuple[Utilisation, ...] | None
) -> None:
    fake_nvml(monkeypatch, nvmlDeviceGetProcessUtilization=fails(code))
    nvml = Nvml()
    assert nvml.utilisation(nvml.gpus()[0], 0) == found


def test_a_process_that_comes_between_nvmls_two_calls_makes_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [pynvml.NVML_ERROR_INSUFFICIENT_SIZE]

    def answer(handle: int, since: int) -> list[SimpleNamespace]:
        if errors:
            raise pynvml.NVMLError(errors.pop())
        return [sample(7, 1_000_000, 100)]

    fake_nvml(monkeypatch, nvmlDeviceGetProcessUtilization=answer)
    nvml = Nvml()
    assert nvml.utilisation(nvml.gpus()[0], 0) == (Utilisation(7, 1.0, 1.0),)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver was found"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "not loaded"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "NVML does not start"),
    ],
)
def test_no_driver(monkeypatch: pytest.MonkeyPatch, code: int, words: str) -> None:
    fake_nvml(monkeypatch, nvmlInit=fails(code))
    with pytest.raises(NoGpu, match=words):
        Nvml()
