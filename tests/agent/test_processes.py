"""Processes, and which of them belong to a session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.sessions.attribution import ProcessOwner, attributed, of_other_users


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
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


def test_a_process_goes_on_when_its_first_thread_has_ended() -> None:
    """Its GPU time would count for no session if it were taken for a zombie."""
    code = "import ctypes, threading; threading.Thread(target=input).start(); ctypes.CDLL(None).pthread_exit(None)"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        end = time.monotonic() + 10
        while Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
            assert time.monotonic() < end
            time.sleep(0.01)
        name = processes.named(process.pid)
        assert name is not None
        assert processes.alive(name)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not processes.alive(name)
    finally:
        process.kill()
        process.communicate()


def test_a_process_is_stopped_until_it_is_told_to_go_on(child: subprocess.Popen[bytes]) -> None:
    assert not processes.stopped(child.pid)
    for number, stopped in ((signal.SIGSTOP, True), (signal.SIGCONT, False)):
        child.send_signal(number)
        end = time.monotonic() + 5
        while processes.stopped(child.pid) is not stopped:
            assert time.monotonic() < end
            time.sleep(0.005)


def test_a_process_that_has_ended_is_not_stopped(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    assert not processes.stopped(child.pid)


def test_what_is_not_there() -> None:
    assert processes.named(2**22 + 1) is None
    assert processes.parent(2**22 + 1) is None
    assert processes.uid(2**22 + 1) is None
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
    assert attributed([child.pid, 1], [ProcessOwner("ada", server=os.getpid())]) == {"ada": {child.pid}}


def test_connection_decides_between_sessions_that_the_kernel_cannot_tell_apart(child: subprocess.Popen[bytes]) -> None:
    both = [ProcessOwner("ada", server=os.getpid()), ProcessOwner("bob", server=os.getpid())]
    assert attributed([child.pid], both, {child.pid: "ada"}) == {"ada": {child.pid}}
    assert attributed([child.pid], both, {child.pid: "bob"}) == {"bob": {child.pid}}
    # and makes no process a session's to which the kernel attributes nothing
    assert attributed([1], both, {1: "ada"}) == {}
    assert attributed([child.pid], [both[0], ProcessOwner("eve", server=2**22 + 1)], {child.pid: "eve"}) == {
        "ada": {child.pid}
    }


as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can start processes of other users")


@pytest.fixture
def orphan() -> Iterator[int]:
    """A process of uid 60001, whose parent is gone, that names the socket of another session in its environment."""
    code = (
        "import os, sys, time\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid(); os.setgid(60001); os.setuid(60001); print(os.getpid(), flush=True); time.sleep(60)"
    )
    environment = os.environ | {"GPUSHARE_SOCKET": "/run/gpushare/s/victim/gpu"}
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    starter.wait()
    yield pid
    os.kill(pid, signal.SIGKILL)
    starter.stdout.close()


@as_root
def test_an_orphan_belongs_to_the_session_of_its_uid_whatever_it_says(orphan: int) -> None:
    victim, own, second = (
        ProcessOwner("victim", uid=60002),
        ProcessOwner("eve", uid=60001),
        ProcessOwner("eve-2", uid=60001),
    )
    assert attributed([orphan], [victim, own, second]) == {"eve": {orphan}}
    assert attributed([orphan], [victim]) == {}


@as_root
def test_roots_processes_are_nobodys_by_their_uid(child: subprocess.Popen[bytes]) -> None:
    assert attributed([child.pid], [ProcessOwner("ada", uid=0)]) == {}


def test_a_cgroup_of_its_own_names_the_session(child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    stray, other = 4_000_000, 4_000_001
    groups = {
        101: "/ada.service", 102: "/shared", 103: "/shared", child.pid: "/ada.service", stray: "/shared",
        other: "/ada.service",
    }  # fmt: skip
    monkeypatch.setattr(processes, "cgroup", lambda pid: groups.get(pid))
    monkeypatch.setattr(processes, "cgroup_of_self", lambda: "/agent.service")
    monkeypatch.setattr(processes, "parent", lambda pid: 1)
    monkeypatch.setattr(processes, "uid", lambda pid: 7 if pid == child.pid else 8)
    owners = [ProcessOwner("ada", 101, 7), ProcessOwner("bob", 102, 9), ProcessOwner("cleo", 103, 9)]
    # an orphan of another user's, in a cgroup where one server is left, is not that server's
    assert attributed([child.pid, stray, other], owners) == {"ada": {child.pid}}


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
    assert attributed([77], [ProcessOwner("ada", pod=POD[-36:]), ProcessOwner("bob", pod="other")]) == {"ada": {77}}


def test_a_foreign_process_is_nobodys(child: subprocess.Popen[bytes]) -> None:
    assert attributed([child.pid], [ProcessOwner("bob", server=2**22 + 1, uid=60002)]) == {}


@pytest.mark.parametrize(
    ("uids", "other"),
    [("1000 1000 1000 1000", False), ("1000 0 0 0", True), ("1000 1000 0 1000", True), ("0 0 0 0", True)],
)
def test_a_setuid_program_is_of_another_user_though_it_was_started_as_its_own(
    uids: str, other: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PROC", tmp_path)
    (tmp_path / "77").mkdir()
    (tmp_path / "77" / "status").write_text(f"Name:\tx\nUid:\t{uids}\n")
    session: Any = SimpleNamespace(record=SimpleNamespace(pod=None, request=SimpleNamespace(uid=1000)))
    assert of_other_users([77, 78], session) == ({77} if other else set())
    session.record.pod = SimpleNamespace(uid="u")
    assert of_other_users([77], session) == set(), "a pod has users of its own"
