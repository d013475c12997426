"""The demo without the package gpushare-simgpu: one sentence that says how to install it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from gpushare_spawner.demo import command
from gpushare_spawner.demo.machine import free_ports


def without_simgpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setitem(sys.modules, "gpushare_simgpu", None)
    parser = argparse.ArgumentParser()
    command.configure(parser)
    (port,) = free_ports(1)
    return command.run(parser.parse_args(["--dir", str(tmp_path / "demo"), "--port", str(port), *options]))


def test_without_a_gpu_and_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "own_gpus", list)
    assert without_simgpu(tmp_path, monkeypatch) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("gpushare: no NVIDIA GPU was found, and the simulated driver is not installed")
    assert "`pip install packages/gpushare-simgpu`" in said.err


def test_where_simulated_gpus_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert without_simgpu(tmp_path, monkeypatch, "--simulate") == 1
    assert capsys.readouterr().err.startswith("gpushare: the simulated driver is not installed")
