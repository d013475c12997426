"""doctor/gpu.py: the memory rule, and what an outcome means. test_command.py runs a program on a simulated GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.doctor import gpu
from gpushare_spawner.doctor.finding import Level
from gpushare_spawner.doctor.gpu import ProgramResult, failed, finding, too_much

GIB = 2**30
OUTCOME = ProgramResult(intact=True, page_out=10e9, page_in=20e9, release=0.002, launch_ns=900.0, bare_ns=850.0)


def test_programs_hold_less_than_half_of_what_is_free() -> None:
    assert too_much(1 * GIB, 5 * GIB) is None
    refused = too_much(1 * GIB, 4 * GIB)
    assert refused is not None
    assert refused.level is Level.NOTE
    assert "--gpu-memory" in refused.remedy


def test_no_program_runs_where_the_card_is_too_full(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Gpu(0, "GPU-5543a1f8-be84-51d9-b6ef-c988bafad2eb", "NVIDIA L4", 24 * GIB)
    monkeypatch.setattr(gpu, "free_memory", lambda gpu: 3 * GIB)
    monkeypatch.setattr(gpu, "run", lambda *rest: pytest.fail("it ran"))
    assert [found.level for found in gpu.check((card,), GIB, [])] == [Level.NOTE]
    assert [found.level for found in gpu.check((), GIB, [])] == [Level.SKIPPED]


def test_changed_memory_is_a_problem_and_figures_are_said() -> None:
    good, bad = finding("torch", OUTCOME), finding("torch", replace(OUTCOME, intact=False))
    assert (good.level, bad.level) == (Level.OK, Level.PROBLEM)
    assert (
        "page out 10.0 GB/s, page in 20.0 GB/s, lease returned in 2.0 ms, a launch 900 ns, 850 ns without" in good.what
    )
    assert finding("torch", OUTCOME, simulated=True).what.endswith("(simulated)")


def test_a_program_that_fails_is_a_problem_with_its_last_line() -> None:
    found = failed("jax", RuntimeError("it ends with status 1: ImportError: no jaxlib"))
    assert found.level is Level.PROBLEM
    assert "no jaxlib" in found.what
    assert "GPUSHARE_DISABLE=1" in found.remedy
