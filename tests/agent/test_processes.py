"""Processes, and which of them belong to a session."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.bypass import bypassing


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that was told of a session's socket."""
    environment = os.environ | {"GPUSHARE_SOCKET": "/run/gpushare/s/x/gpu"}
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment)
    yield process
    process.kill()
    process.communicate()


def test_a_process_is_named_by_more_than_its_pid(child: subprocess.Popen[bytes]) -> None:
    name = processes.named(child.pid)
    assert name is not None
    assert processes.alive(name)
    assert name != processes.named(os.getpid())
    later = processes.ProcessName(name.pid, name.started + 1, name.boot)
    assert not processes.alive(later)
    assert not processes.alive(processes.ProcessName(name.pid, name.started, "another boot"))


def test_a_zombie_is_gone(child: subprocess.Popen[bytes]) -> None:
    name = processes.named(child.pid)
    assert name is not None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processes.named(child.pid) is None
    assert not processes.alive(name)


def test_what_is_not_there() -> None:
    assert processes.named(2**22 + 1) is None
    assert processes.parent(2**22 + 1) is None
    assert processes.variable(2**22 + 1, "HOME") is None
    assert processes.cgroup(2**22 + 1) is None


def test_a_command_with_brackets_and_spaces() -> None:
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b') R 1 (', 0, 0, 0); print(flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert processes.parent(process.pid) == os.getpid()
        assert processes.named(process.pid) is not None
    finally:
        process.kill()
        process.communicate()


def test_a_descendant_belongs_to_the_server(child: subprocess.Popen[bytes]) -> None:
    found = bypassing([child.pid, 1], [], roots={"ada": os.getpid()}, sockets={"ada": "/elsewhere"})
    assert found == {"ada": (child.pid,)}


def test_who_is_connected_bypasses_nothing(child: subprocess.Popen[bytes]) -> None:
    assert bypassing([child.pid], [child.pid], roots={"ada": os.getpid()}, sockets={}) == {}


def test_an_orphan_is_known_by_the_socket_it_was_told_of(child: subprocess.Popen[bytes]) -> None:
    assert processes.variable(child.pid, "GPUSHARE_SOCKET") == "/run/gpushare/s/x/gpu"
    found = bypassing([child.pid], [], roots={}, sockets={"ada": "/run/gpushare/s/x/gpu", "bob": "/other"})
    assert found == {"ada": (child.pid,)}


def test_a_cgroup_of_its_own_names_the_session(child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    stray = 4_000_000
    groups = {101: "/ada.service", 102: "/shared", 103: "/shared", child.pid: "/ada.service", stray: "/shared"}
    monkeypatch.setattr(processes, "cgroup", lambda pid: groups.get(pid))
    monkeypatch.setattr(processes, "cgroup_of_self", lambda: "/agent.service")
    monkeypatch.setattr(processes, "parent", lambda pid: 1)
    monkeypatch.setattr(processes, "variable", lambda pid, name: None)
    found = bypassing([child.pid, stray], [], roots={"ada": 101, "bob": 102, "cleo": 103}, sockets={})
    assert found == {"ada": (child.pid,)}


POD = "/kubepods/besteffort/pod862f8ab8-a5cc-48a4-8839-325f1cf45b74"


@pytest.mark.parametrize(
    ("lines", "group"),
    [
        (f"0::{POD}/6a", f"{POD}/6a"),
        (f"0::/../..{POD}/6a", f"/../..{POD}/6a"),  # seen from another cgroup namespace
        (f"12:cpuset:/\n9:name=systemd:{POD}/6a\n8:pids:{POD}/6a", f"{POD}/6a"),
        (f"4:memory:{POD}/6a\n0::/", f"{POD}/6a"),
        ("4:memory:/docker/5f\n0::/system.slice/containerd.service", "/system.slice/containerd.service"),
        ("12:cpuset:/\n0::/", "/"),
        ("4:memory:/a:b", "/a:b"),
        ("", None),
    ],
    ids=[
        "version 2",
        "another namespace",
        "version 1",
        "both",
        "both, version 2 used",
        "none",
        "colon",
        "nothing told",
    ],
)
def test_the_cgroup_of_both_versions(
    lines: str, group: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PROC", tmp_path)
    (tmp_path / "77").mkdir()
    (tmp_path / "77" / "cgroup").write_text(lines)
    assert processes.cgroup(77) == group


def test_a_process_in_a_pods_cgroup_of_version_1_is_the_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # an agent without capabilities may read nothing else of another user's process
    monkeypatch.setattr(processes, "PROC", tmp_path)
    (tmp_path / "77").mkdir()
    (tmp_path / "77" / "cgroup").write_text(f"12:cpuset:/\n8:pids:{POD}/6a\n")
    assert bypassing([77], [], roots={}, sockets={}, pods={"ada": POD[-36:], "bob": "other"}) == {"ada": (77,)}


def test_a_foreign_process_is_nobodys(child: subprocess.Popen[bytes]) -> None:
    assert bypassing([child.pid], [], roots={}, sockets={"bob": "/other"}) == {}
