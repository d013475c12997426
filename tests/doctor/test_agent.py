"""doctor/agent.py: what an agent's socket and report mean."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.doctor.agent import check, report_findings
from gpushare_spawner.doctor.finding import Finding, Level
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import GpuReport, HostMemoryReport, Report, SessionReport
from tests.placement.instances import instance

UUID = "GPU-5543a1f8-be84-51d9-b6ef-c988bafad2eb"
GPU = Gpu(0, UUID, "NVIDIA L4", 24 * 2**30)
REPORT = Report(
    node="lab",
    published_at=0,
    gpus=(GpuReport(index=0, uuid=UUID, model="NVIDIA L4", memory_bytes=24 * 2**30),),
    host_memory=HostMemoryReport(budget_bytes=1, needed_bytes=0),
)
WHERE = "/run/gpushare/control.sock"


def findings(report: Report = REPORT, gpus: tuple[Gpu, ...] = (GPU,)) -> list[Finding]:
    return report_findings(WHERE, report, gpus)


def wrong(gpus: tuple[Gpu, ...] = (GPU,), **change: object) -> list[Finding]:
    """The findings about the good report with this change, without those that are fine."""
    return [finding for finding in findings(REPORT.model_copy(update=change), gpus) if finding.level is not Level.OK]


def test_an_agent_that_answers_has_nothing_to_do() -> None:
    assert not wrong()
    assert "the agent of lab answers; GPUs: 1, sessions: 0" in findings()[0].what


@pytest.mark.parametrize(
    ("change", "level", "what"),
    [
        ({"gpus": (GPU, replace(GPU, index=1, uuid="GPU-new"))}, Level.NOTE, "the agent does not share"),
        ({"host_memory": None}, Level.NOTE, "no budget of host memory"),
    ],
)
def test_what_is_wrong_with_an_agent_is_said(change: dict[str, Any], level: Level, what: str) -> None:
    (found,) = wrong(**change)
    assert found.level is level
    assert what in found.what


def test_a_gpu_that_is_unhealthy_is_a_problem() -> None:
    unhealthy = REPORT.gpus[0].model_copy(update={"healthy": False})
    (found,) = (one for one in findings(REPORT.model_copy(update={"gpus": (unhealthy,)})) if one.level is not Level.OK)
    assert found.level is Level.PROBLEM
    assert "unhealthy" in found.what


def test_what_a_layer_does_to_a_session_is_a_problem() -> None:
    session = SessionReport(
        id="ada", user="ada", template="t", gpus=(UUID,), share_units=25, tier_since=0, effective_units=25,
        guaranteed_units=25, opened_at=0, layer_trouble="The MPS daemon of GPU 0 does not run.",
    )  # fmt: skip
    (found,) = wrong(sessions=(session,))
    assert (found.level, found.where) == (Level.PROBLEM, "session ada")
    assert found.what == "The MPS daemon of GPU 0 does not run."


def test_instances_are_counted_beside_the_gpus_that_they_are_parts_of() -> None:
    instances = (instance("MIG-1", "1g.10gb"), instance("MIG-2", "1g.10gb", healthy=False))
    found = findings(REPORT.model_copy(update={"gpus": (*REPORT.gpus, *instances)}))
    assert "GPUs: 2, MIG instances: 2, sessions: 0" in found[0].what
    assert [one.where for one in found if one.level is Level.PROBLEM] == ["GPU 0, MIG 1g.10gb"]


def test_trouble_of_an_instance_has_its_own_remedy() -> None:
    session = SessionReport(
        id="ada", user="ada", template="t", gpus=("MIG-1",), share_units=10, tier_since=0, effective_units=10,
        guaranteed_units=10, opened_at=0, layer=LayerName.MIG, layer_trouble="It was destroyed.",
    )  # fmt: skip
    (found,) = wrong(sessions=(session,))
    assert "nvidia-smi -L" in found.remedy


def test_bypassing_processes_are_a_note_with_their_session() -> None:
    session = SessionReport(
        id="ada", user="ada", template="t", gpus=(UUID,), share_units=25, tier_since=0, effective_units=25,
        guaranteed_units=25, opened_at=0, bypassing_pids=(4711,),
    )  # fmt: skip
    (found,) = wrong(sessions=(session,))
    assert (found.level, found.where) == (Level.NOTE, "session ada")
    assert "4711" in found.what


def test_a_socket_that_nobody_serves(open_folder: Path) -> None:
    path = open_folder / "control.sock"
    (missing,), report = check(path, ())
    assert (missing.level, report) == (Level.PROBLEM, None)
    assert "no agent is running" in missing.what
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        os.chmod(path, 0o600)
        (unserved,), _ = check(path, ())
        assert "no agent listens" in unserved.what
        os.chmod(path, 0o666)
        opened, _ = check(path, ())[0]
    assert (opened.level, opened.where) == (Level.PROBLEM, str(path))
    assert "mode 0666" in opened.what


def test_a_state_folder_that_others_cannot_pass_is_found(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    path = open_folder / "control.sock"
    path.touch(0o600)
    assert len(check(path, ())[0]) == 1
    os.chmod(open_folder, 0o700)
    blocked, _ = check(path, ())[0]
    assert blocked.where == str(open_folder)
    assert "cannot enter this folder" in blocked.what


def test_a_socket_of_another_user_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    path = tmp_path / "control.sock"
    path.touch(0o600)
    (found,), _ = check(path, ())
    assert found.level is Level.SKIPPED
    assert "run `gpushare doctor` as root" in found.what


def test_agent_that_cannot_stop_processes_is_no_problem_and_said() -> None:
    report = Report(node="n", published_at=0, gpus=(), stop_trouble="it lacks the capability KILL")
    said = {found.where: (found.level, found.what) for found in report_findings("socket", report, ())}
    what = "templates with `gpu.bypass.action: stop` only notify on this machine: it lacks the capability KILL"
    assert said["stop of bypassing processes"] == (Level.SKIPPED, what)
