"""The demo's folder and its lock."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpushare_spawner.demo.machine import LONGEST_SOCKET_FOLDER, DemoFolder, Stack


def test_a_second_demo_is_told_where_the_first_one_is(tmp_path: Path) -> None:
    first = DemoFolder(tmp_path / "demo")
    first.make()
    assert first.lock() is None
    first.write_address("http://127.0.0.1:8000")
    assert DemoFolder(tmp_path / "demo").lock() == {"pid": os.getpid(), "url": "http://127.0.0.1:8000"}


def test_a_demo_that_is_only_just_starting_says_nothing_yet(tmp_path: Path) -> None:
    first = DemoFolder(tmp_path / "demo")
    first.make()
    assert first.lock() is None
    assert DemoFolder(tmp_path / "demo").lock() == {}


def test_a_lock_left_by_a_crash_keeps_nobody_out(tmp_path: Path) -> None:
    folder = DemoFolder(tmp_path / "demo")
    folder.make()
    (folder.root / "lock").write_text('{"pid": 1, "url": "http://127.0.0.1:1"}')
    assert folder.lock() is None


def test_sockets_have_short_paths_however_deep_the_checkout_is(tmp_path: Path) -> None:
    deep = tmp_path / ("a" * 60) / ("b" * 60)
    folder = DemoFolder(deep)
    folder.make()
    try:
        assert len(str(folder.agent_state)) <= LONGEST_SOCKET_FOLDER
        assert folder.agent_state.stat().st_mode & 0o777 == 0o700
        assert DemoFolder(deep).agent_state == folder.agent_state
    finally:
        folder.agent_state.rmdir()


def test_a_folder_in_tmp_that_somebody_else_made_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = DemoFolder(tmp_path / ("a" * 60))
    mine = tmp_path / "theirs"
    mine.mkdir()
    folder.agent_state = tmp_path / "link"
    folder.agent_state.symlink_to(mine)
    with pytest.raises(PermissionError):
        folder.make()


def test_nvidia_smi_of_simulated_gpus_is_the_view_of_the_share(tmp_path: Path) -> None:
    folder = DemoFolder(tmp_path / "a demo")
    folder.make()
    folder.write_nvidia_smi()
    stack = Stack(folder, tmp_path, "127.0.0.1", 1, 2, 3, 4, simulated=True)
    environment = {name: value for name, value in stack.hub()[1].items() if name != "GPUSHARE_SOCKET"}
    assert shutil.which("nvidia-smi", path=environment["PATH"]) == str(folder.programs / "nvidia-smi")
    shown = [
        subprocess.run(command, env=environment, capture_output=True, text=True)
        for command in (["nvidia-smi"], [sys.executable, "-m", "gpushare_spawner.cli", "smi"])
    ]
    assert shown[0].stdout + shown[0].stderr == shown[1].stdout + shown[1].stderr != ""
    assert shown[0].returncode == shown[1].returncode
    real = Stack(folder, tmp_path, "127.0.0.1", 1, 2, 3, 4, simulated=False)
    assert str(folder.programs) not in real.hub()[1]["PATH"].split(":")
