"""The demo's folder and its lock."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpushare_spawner.demo.folder import LONGEST_SOCKET_FOLDER, DemoFolder


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
