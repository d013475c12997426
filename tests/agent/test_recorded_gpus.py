"""A GPU that is lost is unhealthy and not forgotten, also when the agent starts anew."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest

from gpushare_spawner.agent.gpus import nvml as gpus_module
from gpushare_spawner.agent.gpus.nvml import Gpu, NoGpu, Nvml, RecordedGpus, all_gpus
from gpushare_spawner.model.control import ControlRefused
from tests.agent.agent_process import AgentProcess
from tests.agent.conftest import request_for
from tests.agent.peers import GIB
from tests.agent.test_nvml import fails, fake_nvml

FIRST = Gpu(0, "GPU-0", "NVIDIA A100", 16 * GIB, minor=3)
SECOND = Gpu(1, "GPU-1", "NVIDIA A100", 16 * GIB)


def none_found() -> tuple[Gpu, ...]:
    raise NoGpu("NVML lists no GPU")


def is_lost(_: str) -> bool:
    return False


@pytest.fixture
def path(tmp_path: Path) -> Path:
    RecordedGpus(tmp_path / "gpus.json").save([FIRST, SECOND])
    return tmp_path / "gpus.json"


def test_lost_gpus_are_taken_from_the_record(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert all_gpus(none_found, RecordedGpus(path), is_lost) == (FIRST, SECOND)
    assert all_gpus(lambda: (SECOND,), RecordedGpus(path), is_lost) == (FIRST, SECOND)
    assert all_gpus(lambda: (FIRST, SECOND), RecordedGpus(path), is_lost) == (FIRST, SECOND)
    assert "GPU 0 (GPU-0) is lost" in caplog.text
    assert RecordedGpus(path)


def test_gpu_that_answers_and_is_not_listed_is_not_lost(path: Path) -> None:
    """One in MIG mode."""
    assert all_gpus(lambda: (SECOND,), RecordedGpus(path), lambda gpu: True) == (SECOND,)


def test_gpu_that_was_taken_out_is_forgotten_with_a_reboot(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpushare_spawner.agent.processes.boot_id", lambda: "the next one")
    assert all_gpus(none_found, RecordedGpus(path), is_lost) == (FIRST, SECOND)
    RecordedGpus(path).save([FIRST, SECOND])
    monkeypatch.undo()
    assert all_gpus(lambda: (SECOND,), RecordedGpus(path), is_lost) == (SECOND,)


def test_another_gpu_in_its_place_is_the_one(path: Path) -> None:
    other = replace(FIRST, uuid="GPU-7")
    assert all_gpus(lambda: (other, SECOND), RecordedGpus(path), is_lost) == (other, SECOND)


@pytest.mark.parametrize("content", ["", "[]", '{"boot": "x", "gpus": [{"index": "a"}]}', None])
def test_record_that_cannot_be_read_counts_as_empty(path: Path, content: str | None) -> None:
    path.unlink()
    if content is None:
        os.mkfifo(path)
    else:
        path.write_text(content)
    recorded = RecordedGpus(path)
    assert not recorded
    with pytest.raises(NoGpu):
        all_gpus(none_found, recorded, is_lost)
    assert all_gpus(lambda: (FIRST,), recorded, is_lost) == (FIRST,)
    assert RecordedGpus(path)


def test_nvml_is_opened_anew_until_the_gpu_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, nvmlInit=fails(pynvml.NVML_ERROR_DRIVER_NOT_LOADED))
    with pytest.raises(NoGpu):
        Nvml()
    nvml = Nvml(patient=True)
    with pytest.raises(NoGpu, match="not loaded"):
        nvml.gpus()
    monkeypatch.setattr(gpus_module, "OPEN_AGAIN_EVERY", 0.0)
    state = nvml.state(FIRST)
    assert not state.healthy
    assert "not loaded" in state.trouble
    fake_nvml(monkeypatch, nvmlDeviceGetHandleByUUID=fails(pynvml.NVML_ERROR_GPU_IS_LOST))
    assert not nvml.state(FIRST).healthy
    assert not nvml.answers(FIRST.uuid)
    fake_nvml(monkeypatch)
    assert nvml.state(FIRST).healthy
    assert nvml.answers(FIRST.uuid)


async def test_agent_whose_only_gpu_is_lost_starts_and_keeps_its_sessions(
    short_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    agent = AgentProcess(short_folder, gpus=1)
    await agent.start()
    gpu = (await agent.client.report()).gpus[0].uuid
    await agent.client.open(request_for("ada", gpus=(gpu,), confirm_within=600))
    agent.end(signal.SIGKILL)
    driver = agent.environment.pop("LD_LIBRARY_PATH")
    try:
        await agent.start()
        report = await agent.client.report()
        assert [(one.uuid, one.healthy) for one in report.gpus] == [(gpu, False)]
        assert report.session("ada") is not None
        with pytest.raises(ControlRefused) as refused:
            await agent.client.open(request_for("bob", gpus=(gpu,)))
        assert refused.value.code == "unhealthy-gpu"
        agent.end()
        agent.environment["LD_LIBRARY_PATH"] = driver
        await agent.start()
        report = await agent.client.report()
        assert [(one.uuid, one.healthy) for one in report.gpus] == [(gpu, True)]
        assert report.session("ada") is not None
    finally:
        if agent.process is not None and agent.process.poll() is None:
            agent.end(signal.SIGKILL)
    assert "Traceback" not in agent.log.read_text()
