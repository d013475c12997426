"""doctor/gpu.py: what a trial means. test_command.py suspends a program on a simulated GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.doctor.finding import Finding, Level
from gpushare_spawner.doctor.gpu import SuspendUnavailable, Trial, trial_finding, try_suspension

TRIAL = Trial(intact=True, freed=3 * 2**29, suspended_in=0.9, resumed_in=0.7)
CARD = Gpu(0, "GPU-5543a1f8-be84-51d9-b6ef-c988bafad2eb", "NVIDIA L4", 24 * 2**30)


def test_changed_memory_is_a_problem_and_figures_are_said() -> None:
    good, bad = trial_finding("torch", TRIAL), trial_finding("torch", replace(TRIAL, intact=False))
    assert (good.level, bad.level) == (Level.OK, Level.PROBLEM)
    assert "1.5 GiB of GPU memory were free after 0.90 s, and the program ran again after 0.70 s" in good.what
    assert trial_finding("torch", TRIAL, simulated=True).what.endswith("(simulated)")


def found_after(error: Exception, monkeypatch: pytest.MonkeyPatch) -> Finding:
    async def fails(code: str, size: int, gpu: Gpu, environment: Mapping[str, str]) -> Trial:
        raise error

    monkeypatch.setattr("gpushare_spawner.doctor.gpu.try_out", fails)
    return try_suspension("torch", "", 1, CARD, {})


def test_a_machine_without_the_functions_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_after(SuspendUnavailable("the driver is too old"), monkeypatch)
    assert (found.where, found.level, found.what) == ("torch, suspended", Level.SKIPPED, "the driver is too old")


def test_a_driver_that_refuses_is_a_note_that_names_the_other_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_after(RuntimeError("it cannot be checkpointed: this driver does not support it"), monkeypatch)
    assert found.level is Level.NOTE
    assert "this driver does not support it" in found.what
    assert "engine managed" in found.remedy
