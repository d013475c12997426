"""The demo's folder and its lock."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpushare_spawner.demo.command import prepare_home
from gpushare_spawner.demo.machine import LONGEST_SOCKET_FOLDER, PROGRAMS, DemoFolder, Stack


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


def home_of(stack: Stack, user: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of a user, as the hub's hook prepares it."""
    monkeypatch.setenv(PROGRAMS, stack.hub()[1][PROGRAMS])
    spawner = SimpleNamespace(user=SimpleNamespace(name=user), home_dir_template=str(stack.folder.users / "{username}"))
    prepare_home(spawner)
    return stack.folder.users / user


def in_a_terminal(home: Path, shell: str, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a login shell, as JupyterLab's terminals are; Debian's /etc/profile sets PATH anew."""
    environment = {name: value for name, value in os.environ.items() if name not in ("GPUSHARE_SOCKET", "BASH_ENV")}
    return subprocess.run(
        [shell, "-lc", command], env=environment | {"HOME": str(home)}, cwd=home, capture_output=True, text=True
    )


@pytest.fixture(params=["a demo", 'costs $5 a "day"', "it's `here`"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DemoFolder]:
    folder = DemoFolder(tmp_path / request.param)
    folder.make()
    folder.write_nvidia_smi()
    yield folder
    folder.agent_state.rmdir()


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_gpushare_and_nvidia_smi_are_on_the_path_of_a_terminal(
    folder: DemoFolder, tmp_path: Path, shell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = home_of(Stack(folder, tmp_path, "127.0.0.1", 1, [2, 3, 4], simulated=True), "ann", monkeypatch)
    where = in_a_terminal(home, shell, "command -v gpushare nvidia-smi").stdout.splitlines()
    if shell == "sh":
        # dash looks up the first name only
        where += in_a_terminal(home, shell, "command -v nvidia-smi").stdout.splitlines()
    assert where[:2] == [str(Path(sys.executable).with_name("gpushare")), str(folder.programs / "nvidia-smi")]
    view = in_a_terminal(home, shell, "nvidia-smi")
    same = in_a_terminal(home, shell, "gpushare smi")
    assert view.stdout + view.stderr == same.stdout + same.stderr != ""
    assert "not found" not in view.stderr
    assert view.returncode == same.returncode


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_the_drivers_own_nvidia_smi_is_not_hidden(
    folder: DemoFolder, tmp_path: Path, shell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the demo had simulated GPUs before, and prepared the home then."""
    home_of(Stack(folder, tmp_path, "127.0.0.1", 1, [2, 3, 4], simulated=True), "ann", monkeypatch)
    stack = Stack(folder, tmp_path, "127.0.0.1", 1, [2, 3, 4], simulated=False)
    home = home_of(stack, "ann", monkeypatch)
    assert str(folder.programs) not in stack.hub()[1]["PATH"].split(":")
    path = in_a_terminal(home, shell, 'printf %s "$PATH"').stdout.split(":")
    assert path[0] == str(Path(sys.executable).parent)
    assert str(folder.programs) not in path


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        ('export PATH="/old/venv/bin:$PATH"\n', False),
        ('export PATH="/old/venv/bin:$PATH"\nexport EDITOR=vim\n', True),
        ("umask 027\n", True),
        ("", True),
    ],
)
def test_a_profile_of_an_older_demo_is_written_anew_and_that_of_a_user_stays(
    tmp_path: Path, before: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = Stack(DemoFolder(tmp_path / "demo"), tmp_path, "127.0.0.1", 1, [2, 3, 4], simulated=True)
    profile = stack.folder.users / "ann" / ".profile"
    profile.parent.mkdir(parents=True)
    profile.write_text(before)
    home_of(stack, "ann", monkeypatch)
    assert (profile.read_text() == before) == kept
    assert kept or str(stack.folder.programs) in profile.read_text()
