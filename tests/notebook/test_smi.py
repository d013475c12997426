"""``gpushare smi``: the share as if it were a GPU, with the numbers that CUDA and NVML report to programs."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from rich.console import Console

from gpushare_spawner.cli import main
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.share_status import ProcessMemory, ShareStatus
from gpushare_spawner.notebook.smi import DriverFigures, GpuFigures, draw, driver_figures, shown_share
from gpushare_spawner.sharing.native import merged
from tests.agent.agent_process import AgentProcess
from tests.agent.conftest import request_for
from tests.notebook.scripted_agent import GIB, GPU, OTHER_GPU, Script, ScriptedAgent

DRIVER = DriverFigures("575.51", "12.9", {GPU: GpuFigures("NVIDIA A100", 0.97, 61.0, 287.4)})


def of(**changes: Any) -> ShareStatus:
    """A status with two processes of the session."""
    processes = tuple(ProcessMemory(pid, GPU, size) for pid, size in ((41, GIB), (42, 2 * GIB)))
    return replace(Script(**changes).status(), processes=processes)


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)


def test_the_share_is_shown_as_a_gpu_with_its_limit_as_total_and_its_own_processes() -> None:
    share = shown_share(of(memory=3 * GIB, resident=GIB), DRIVER)
    (gpu,) = share.gpus
    assert (share.share_units, share.tier, share.driver_version) == (25, "active", "575.51")
    assert (gpu.memory_total_bytes, gpu.memory_used_bytes, gpu.memory_free_bytes) == (16 * GIB, 3 * GIB, 13 * GIB)
    assert gpu.memory_on_gpu_bytes == GIB
    assert gpu.driver.name == "NVIDIA A100"
    assert [(one.pid, one.memory_bytes) for one in gpu.processes] == [(42, 2 * GIB), (41, GIB)]


def test_neighbours_are_totals_without_this_session() -> None:
    resting = shown_share(replace(of(), gpus=(replace(of().gpus[0], sessions=4, sessions_with_work=2),)), DRIVER)
    assert (resting.gpus[0].other_sessions, resting.gpus[0].other_sessions_with_work) == (3, 2)
    holding = of(lease="held")
    working = shown_share(replace(holding, gpus=(replace(holding.gpus[0], sessions=4, sessions_with_work=2),)), DRIVER)
    assert working.gpus[0].other_sessions_with_work == 1


def test_beside_another_layer_no_lease_is_shown_and_the_layer_stands_for_the_tier() -> None:
    text = io.StringIO()
    draw(shown_share(of(layer="mps", quiet=0.0, sessions=3, with_work=2), DRIVER), Console(file=text, width=100))
    said = text.getvalue()
    assert said.startswith("0.25 GPU (NVIDIA MPS), driver")
    assert "On GPU 0: 2 other sessions, 1 with work now." in said
    assert "lease" not in said


def test_more_memory_than_the_limit_leaves_nothing_free() -> None:
    assert shown_share(of(memory=17 * GIB), DRIVER).gpus[0].memory_free_bytes == 0


def test_each_gpu_of_a_share_has_its_own_processes() -> None:
    both = replace(Script(gpus=[GPU, OTHER_GPU]).status(), processes=(ProcessMemory(41, OTHER_GPU, GIB),))
    assert [len(gpu.processes) for gpu in shown_share(both, DRIVER).gpus] == [0, 1]


def test_the_table_shows_a_question_mark_for_what_the_driver_does_not_say(
    agent: ScriptedAgent, no_driver: None, capsys: pytest.CaptureFixture[str]
) -> None:
    agent.script.tier, agent.script.effective = Tier.DOWNGRADED, 10
    assert main(["smi"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("0.25 GPU (downgraded, 0.10 GPU now)\n")
    assert "16 GiB" in said
    assert "?" in said
    assert "no process with GPU memory" in said
    assert "On GPU 0: this session has no GPU work; 1 other session, " in said


def test_the_table_fits_a_terminal_of_80_columns_with_each_figure_on_one_line() -> None:
    out = Console(file=io.StringIO(), width=80, highlight=False)
    draw(shown_share(of(memory=3 * GIB, lease="waiting"), DRIVER), out)
    assert isinstance(out.file, io.StringIO)
    said = out.file.getvalue()
    for figure in ("NVIDIA A100", "3 GiB", "16 GiB", "97 %", "61 °C", "287 W", "process of this session", "2 GiB"):
        assert figure in said, figure
    assert "this session waits for the lease" in said
    assert said.startswith("0.25 GPU (active), driver 575.51, CUDA 12.9\n")


def test_json_has_the_same_for_programs(
    agent: ScriptedAgent, no_driver: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["smi", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["shared"], shown["problem"], shown["tier"]) == (True, "", "active")
    assert shown["gpus"][0]["driver"] == {
        "name": "", "utilisation": None, "temperature_celsius": None, "power_watts": None,
    }  # fmt: skip


def test_without_a_share_and_without_an_agent_a_sentence_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GPUSHARE_SOCKET", raising=False)
    assert main(["smi"]) == 0
    assert "This server has no GPU share" in capsys.readouterr().out
    assert main(["smi", "--json", f"--socket={tmp_path}/nothing"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert "No such file or directory" in shown["problem"]
    assert "gpus" not in shown


def test_a_driver_that_refuses_single_figures_leaves_only_these_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    functions: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "575.51",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 12090,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetName": lambda handle: "NVIDIA A100",
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=97),
        "nvmlDeviceGetTemperature": refuses,
        "nvmlDeviceGetPowerUsage": refuses,
    }
    for name, function in functions.items():
        monkeypatch.setattr(pynvml, name, function)
    figures = GpuFigures("NVIDIA A100", 0.97)
    assert driver_figures([GPU]) == DriverFigures("575.51", "12.9", {GPU: figures})


# -- with the library, CUDA and NVML ----------------------------------------------------------------------------------

PROGRAM = """
import json, os, sys
import pynvml
from cuda.bindings import driver as cuda

def value(result):
    assert result[0] == cuda.CUresult.CUDA_SUCCESS, result
    return result[1:] if len(result) > 2 else result[-1]

value(cuda.cuInit(0))
value(cuda.cuCtxSetCurrent(value(cuda.cuDevicePrimaryCtxRetain(value(cuda.cuDeviceGet(0))))))
value(cuda.cuMemAlloc(256 * 2**20))
free, total = value(cuda.cuMemGetInfo())
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByUUID(os.environ["CUDA_VISIBLE_DEVICES"])
memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
print(json.dumps({"pid": os.getpid(), "name": pynvml.nvmlDeviceGetName(handle), "cuda": [total, free],
                  "nvml": [memory.total, memory.free, memory.used]}), flush=True)
sys.stdin.read()
"""


@pytest.fixture
async def real_agent() -> AsyncIterator[AgentProcess]:
    # pytest's own folders are too long for the path of a socket
    with tempfile.TemporaryDirectory(prefix="smi") as folder:
        agent = AgentProcess(Path(folder), gpus=1)
        await agent.start()
        yield agent
        agent.end(signal.SIGKILL)


async def test_smi_has_the_numbers_that_cuda_and_nvml_report_under_the_library(real_agent: AgentProcess) -> None:
    gpu = (await real_agent.client.report()).gpus[0].uuid
    for name in ("neighbour", "ada"):
        opened = await real_agent.client.open(request_for(name, gpus=(gpu,)))
    environment = merged(os.environ, opened.environment)
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert program.stdout is not None
        seen = json.loads(program.stdout.readline())
        smi = [sys.executable, "-m", "gpushare_spawner.cli", "smi", "--json"]
        (shown,) = json.loads(subprocess.check_output(smi, env=environment, timeout=60))["gpus"]
    finally:
        program.communicate(timeout=20)
    total, used, free = (shown[f"memory_{name}_bytes"] for name in ("total", "used", "free"))
    assert [total, free] == seen["cuda"]
    assert [total, free, used] == seen["nvml"]
    assert used >= 256 * 2**20
    assert [(one["pid"], one["memory_bytes"]) for one in shown["processes"]] == [(seen["pid"], used)]
    assert shown["driver"]["name"] == seen["name"]
    assert "Simulated" in seen["name"]
    assert shown["driver"]["utilisation"] is not None
    assert (shown["other_sessions"], shown["other_sessions_with_work"]) == (1, 0)
