"""``gpushare doctor`` on simulated GPUs, with a real agent and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gpushare_spawner.doctor.command import show
from gpushare_spawner.doctor.finding import note, ok, problem
from gpushare_spawner.shipped import shipped
from tests.libraries import simulated_driver

GPUSHARE = [sys.executable, "-m", "gpushare_spawner.cli"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    simulated = {"SIMGPU_DEVICES": "1", "SIMGPU_MEMORY": "1GiB", "SIMGPU_STATE": str(tmp_path / "simgpu")}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUSHARE_")}
    return {**kept, **simulated, "LD_LIBRARY_PATH": str(simulated_driver())}


@pytest.fixture
def agent(tmp_path: Path, environment: dict[str, str]) -> Iterator[Path]:
    """The control socket of an agent, in a folder that everybody may pass."""
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        os.chmod(folder, 0o711)
    command = [*GPUSHARE, "agent", "--state-dir", str(tmp_path / "a")]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        socket = tmp_path / "a" / "control.sock"
        deadline = time.monotonic() + 30
        while not socket.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        yield socket
        process.terminate()


def doctor(environment: dict[str, str], *options: object) -> tuple[int, dict[str, Any]]:
    """Exit status and what it says as JSON."""
    command = [*GPUSHARE, "doctor", "--json", "--config-dir", "/nowhere", *map(str, options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def levels(answer: dict[str, Any], group: str) -> set[str]:
    return {finding["level"] for finding in answer["findings"] if finding["group"] == group}


def test_a_good_machine_with_an_agent_and_a_program_on_its_gpu(environment: dict[str, str], agent: Path) -> None:
    options = ("--control-socket", agent, "--templates-dir", shipped("templates"))
    status, answer = doctor(environment, *options, "--gpu", "driver", "--gpu-memory", "64Mi")
    wrong = [
        finding for finding in answer["findings"] if finding["level"] == "problem" and finding["group"] != "library"
    ]
    assert not wrong
    for group in ("kernel", "agent", "templates", "GPU programs"):
        assert levels(answer, group) == {"ok"}, group
    said = " ".join(finding["what"] for finding in answer["findings"])
    assert "version 0.1.0, like the package" in said
    assert "memory unchanged after it was paged out and in" in said
    # what the program fills, and what it needs beside that
    assert "memory unchanged after the program was suspended and resumed; 66 MiB of GPU memory were free" in said
    assert "(simulated)" in said
    # the checkout of the tests may lie where other users cannot read it
    assert levels(answer, "library") <= {"ok", "note", "problem"}
    assert status == int(not answer["ok"])


def test_without_agent_and_templates_each_is_a_problem_and_the_status_1(
    environment: dict[str, str], tmp_path: Path
) -> None:
    status, answer = doctor(environment, "--control-socket", tmp_path / "none", "--templates-dir", tmp_path / "none")
    assert status == 1
    assert not answer["ok"]
    assert levels(answer, "driver") == {"ok", "skipped"}
    assert levels(answer, "agent") == levels(answer, "templates") == {"problem"}
    assert all(finding["remedy"] for finding in answer["findings"] if finding["level"] in ("note", "problem"))


def test_an_unknown_program_is_refused(environment: dict[str, str]) -> None:
    done = subprocess.run([*GPUSHARE, "doctor", "--gpu", "tensor"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "'tensor' is not one of 'driver', 'torch'" in done.stderr


def test_the_text_has_each_finding_with_what_to_do_and_a_closing_line(capsys: pytest.CaptureFixture[str]) -> None:
    groups = {
        "driver": [ok("NVML", "driver 580")],
        "agent": [problem("a.sock", "gone\x1b", "Start it."), note("b", "c", "d")],
    }
    show(groups, Console(width=100, highlight=False))
    assert capsys.readouterr().out.splitlines() == [
        "driver",
        "  ok       NVML: driver 580",
        "agent",
        r"  problem  a.sock: gone\x1b",
        "           -> Start it.",
        "  note     b: c",
        "           -> d",
        "1 problem, 1 note.",
    ]
