"""``gpushare doctor`` on simulated GPUs, with a real agent and without."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
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
    return {**os.environ, **simulated, "LD_LIBRARY_PATH": str(simulated_driver())}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root folder of a machine that has cgroups, and nothing else."""
    root = tmp_path / "root"
    (root / "sys/fs/cgroup/memory").mkdir(parents=True)
    return root


@pytest.fixture
def agent(open_folder: Path, environment: dict[str, str]) -> Iterator[Path]:
    """The control socket of an agent, in a folder that everybody may pass."""
    command = [*GPUSHARE, "agent", "--state-dir", str(open_folder / "a")]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        socket = open_folder / "a" / "control.sock"
        deadline = time.monotonic() + 30
        while not socket.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        yield socket
        process.terminate()


def doctor(
    environment: dict[str, str], root: Path, *options: object, within: Sequence[str] = ()
) -> tuple[int, dict[str, Any]]:
    """Return the exit status and the JSON. ``within``: a command that runs the doctor's command."""
    command = [*within, *GPUSHARE, "doctor", "--json", "--root", str(root), *map(str, options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def levels(answer: dict[str, Any], group: str) -> set[str]:
    return {finding["level"] for finding in answer["findings"] if finding["group"] == group}


def test_a_good_machine_with_an_agent_and_a_program_on_its_gpu(
    environment: dict[str, str], root: Path, agent: Path
) -> None:
    options = ("--control-socket", agent, "--templates-dir", shipped("templates"))
    status, answer = doctor(environment, root, *options, "--gpu", "driver", "--gpu-memory", "64Mi")
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
    environment: dict[str, str], root: Path
) -> None:
    status, answer = doctor(environment, root)
    assert status == 1
    assert not answer["ok"]
    assert levels(answer, "driver") == {"ok", "skipped"}
    assert levels(answer, "agent") == levels(answer, "templates") == {"problem"}
    assert all(finding["remedy"] for finding in answer["findings"] if finding["level"] in ("note", "problem"))


def test_what_the_machine_has_outside_of_the_root_changes_nothing(environment: dict[str, str], root: Path) -> None:
    """A kubelet, a container engine, an agent's socket, templates and a unit file appear, for the doctor alone."""
    places = [Path("/var/lib"), Path("/etc"), Path("/opt")]
    for own in (Path(sys.prefix), Path(sys.base_prefix), root, Path(__file__), Path(simulated_driver())):
        places = [place for place in places if not own.resolve().is_relative_to(place)]
    mounts = "\n".join(f"mount -t tmpfs tmpfs {place}" for place in places)
    files = " ".join(
        str(path)
        for path in (
            "/etc/gpushare/templates/a.yaml",
            "/etc/systemd/system/gpushare-agent.service",
            "/etc/jupyterhub/jupyterhub_config.d/10-gpushare.py",
            "/opt/tljh/config/jupyterhub_config.d/10-gpushare.py",
            "/etc/cdi/nvidia.yaml",
            "/var/lib/kubelet/plugins_registry/a.sock",
            "/run/containerd/containerd.sock",
            "/run/gpushare/control.sock",
        )
        if any(Path(path).is_relative_to(place) for place in (*places, Path("/run")))
    )
    script = (
        f"set -e\n{mounts}\nmount -t tmpfs tmpfs /run\n"
        f'for path in {files}; do mkdir -p "$(dirname "$path")"; : > "$path"; done\nexec "$@"'
    )
    within = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*within, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make a mount namespace")
    assert doctor(environment, root, within=within) == doctor(environment, root)


def test_root_is_the_folder_below_which_a_machine_is_checked(environment: dict[str, str], root: Path) -> None:
    for path in ("var/lib/kubelet", "run/containerd", "etc/gpushare/templates", "etc/cdi"):
        (root / path).mkdir(parents=True)
    (root / "run/containerd/containerd.sock").touch()
    status, answer = doctor(environment, root)
    found = {finding["where"]: finding for finding in answer["findings"]}
    assert status == 1
    assert found["containers"]["what"] == f"{root}/var/lib/kubelet, {root}/run/containerd/containerd.sock"
    assert found["GPU shares by claims"]["what"] != "this machine is not a node of a cluster"
    assert str(root / "etc/gpushare/templates") in found
    assert str(root / "run/gpushare/control.sock") in found


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
