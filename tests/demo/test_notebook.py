"""The demo's notebook: its last cell, where the GPU's memory is not enough for it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gpushare_spawner.demo

NOTEBOOK = Path(gpushare_spawner.demo.__file__).with_name("gpu-sharing.ipynb")
SUCCESS, OUT_OF_MEMORY = 0, 2
GIB = 2**30


class ScriptedStatus(SimpleNamespace):
    """A status with what the cell prints of it."""

    def __str__(self) -> str:
        return "the status"


def run_last_cell(error: int) -> list[Any]:
    """Run it with a driver that answers allocations with ``error``; what it asked of the driver."""
    last = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"][-1]
    asked: list[Any] = []
    cuda = SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=SUCCESS, CUDA_ERROR_OUT_OF_MEMORY=OUT_OF_MEMORY),
        cuDeviceTotalMem=lambda device: (SUCCESS, 1000),
        cuMemAlloc=lambda size: (error, 77),
        cuMemFree=lambda pointer: asked.append(("free", pointer)) or (SUCCESS,),  # type: ignore[func-returns-value]
    )

    def check(result: tuple[Any, ...]) -> Any:
        if result[0] != SUCCESS:
            raise RuntimeError(result[0])
        return result[-1]

    names = {"cuda": cuda, "check": check, "device": 0, "pointer": None, "u64": None}
    names |= {"launch": lambda name, *arguments: asked.append(name), "wait": lambda: None}
    turn = ScriptedStatus(memory_bytes=10 * GIB, resident_bytes=6 * GIB)
    names |= {"status": lambda: turn, "intact": lambda: True}
    names |= {"time": SimpleNamespace(sleep=lambda seconds: asked.append(("sleep", seconds)))}
    exec("".join(last["source"]), names)
    return asked


def test_more_memory_than_there_is_is_touched_and_given_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_last_cell(SUCCESS) == ["touch", ("sleep", 1)] * 20 + [("free", 77)]
    said = capsys.readouterr().out.splitlines()
    assert [said[0], said[19]] == [f"{step:2}: 10.0 GiB allocated, 6.0 GiB of it on the GPU" for step in (1, 20)]
    assert said[20:] == ["the status", "the buffer is correct"]


def test_any_other_error_is_raised() -> None:
    with pytest.raises(RuntimeError, match="709"):
        run_last_cell(709)


def test_a_refused_allocation_is_explained_and_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_last_cell(OUT_OF_MEMORY) == []
    assert capsys.readouterr().out.splitlines() == [
        "Not enough memory beside the other servers. Stop those of all but two users, and run this cell again.",
        "the status",
        "the buffer is correct",
    ]
