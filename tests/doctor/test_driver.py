"""doctor/driver.py: what the facts of a driver mean."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.doctor.driver import DriverFacts, _device, findings
from gpushare_spawner.doctor.finding import Level
from gpushare_spawner.model.layers_file import MigInstance, MigProfile

A100 = Gpu(0, "GPU-5543a1f8-be84-51d9-b6ef-c988bafad2eb", "NVIDIA A100-SXM4-40GB", 40 * 2**30, minor=0)
MIG = MigInstance(A100.uuid, A100.model, MigProfile("1g.5gb", 1, 7, 1, 4864 * 2**20))
GOOD = {"/dev/nvidiactl": "", "/dev/nvidia-uvm": "", "/dev/nvidia0": ""}


def levels(facts: DriverFacts) -> dict[str, Level]:
    return {finding.where: finding.level for finding in findings(facts)}


def test_a_good_driver_has_nothing_to_do() -> None:
    facts = DriverFacts(version="580.65", gpus=(A100,), devices=GOOD, cuda_version=13020, paging=(True,))
    assert set(levels(facts).values()) == {Level.OK}
    assert "CUDA 13.2" in findings(facts)[-2].what
    assert findings(facts)[-1].what == "the driver can suspend processes and resume them"


def test_a_driver_that_cannot_suspend_processes_is_a_note_with_the_reason() -> None:
    facts = DriverFacts(
        version="560", gpus=(A100,), devices=GOOD, cuda_version=12060, paging=(True,), no_suspend="It is too old."
    )
    found = findings(facts)[-1]
    assert (found.where, found.level, found.what) == ("engine suspend", Level.NOTE, "It is too old.")
    assert "gpu.memory.engine" in found.remedy


def test_a_missing_driver_is_a_problem_with_the_agents_sentence() -> None:
    (found,) = findings(DriverFacts(no_gpu="no NVIDIA driver was found here"))
    assert found.level is Level.PROBLEM
    assert found.what == "no NVIDIA driver was found here"
    assert "nvidia-smi" in found.remedy


def test_a_gpu_in_mig_mode_is_a_note() -> None:
    facts = DriverFacts(version="580", left_out=("GPU 1 is split by MIG",), no_gpu="NVML lists no GPU")
    assert [finding.level for finding in findings(facts)] == [Level.NOTE, Level.PROBLEM]


def test_instances_are_named_with_their_sizes() -> None:
    instance = replace(A100, uuid="MIG-1", model="A100 MIG 1g.5gb", memory_bytes=4864 * 2**20, mig=MIG)
    (found,) = (one for one in findings(DriverFacts(gpus=(instance,), paging=(True,))) if "MIG" in one.where)
    assert (found.level, found.where) == (Level.OK, "GPU 0, MIG 1g.5gb")
    assert found.what == "A100 MIG 1g.5gb, 4.8 GiB, 1/7 of one GPU's time, MIG-1"


def test_an_unhealthy_gpu_is_a_problem() -> None:
    facts = DriverFacts(
        version="580", gpus=(A100,), trouble={A100.uuid: "fell off the bus"}, devices=GOOD, paging=(True,)
    )
    (found,) = [finding for finding in findings(facts) if finding.level is Level.PROBLEM]
    assert found.where == "GPU 0"
    assert "it fell off the bus" in found.what


@pytest.mark.parametrize(
    ("wrong", "remedy"), [("is missing", "nvidia-modprobe"), ("cannot be opened: Permission denied", "0666")]
)
def test_device_files_that_do_not_work_each_have_their_remedy(wrong: str, remedy: str) -> None:
    facts = DriverFacts(version="580", gpus=(A100,), devices={**GOOD, "/dev/nvidia-uvm": wrong}, paging=(True,))
    (found,) = [finding for finding in findings(facts) if finding.level is Level.PROBLEM]
    assert (found.where, found.what) == ("/dev/nvidia-uvm", wrong)
    assert remedy in found.remedy


def test_a_gpu_that_cannot_page_is_a_note() -> None:
    facts = DriverFacts(version="580", gpus=(A100,), devices=GOOD, cuda_version=12080, paging=(False,))
    assert levels(facts)["libcuda.so.1"] is Level.NOTE
    assert "memory limits add up" in findings(facts)[-2].remedy


def test_a_cuda_error_is_a_problem() -> None:
    facts = DriverFacts(version="580", gpus=(A100,), devices=GOOD, cuda_error="cuInit fails with CUDA error 803")
    assert "803" in findings(facts)[-1].what
    assert levels(facts)["libcuda.so.1"] is Level.PROBLEM


def test_device_files_are_opened(tmp_path: Path) -> None:
    assert _device(tmp_path / "nvidia0") == "is missing"
    (tmp_path / "nvidia0").touch()
    assert _device(tmp_path / "nvidia0") == ""
    os.mkdir(tmp_path / "nvidiactl")
    assert _device(tmp_path / "nvidiactl") == "cannot be opened: Is a directory"
