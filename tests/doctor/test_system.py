"""doctor/system.py: what the kernel offers."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpushare_spawner.doctor import system
from gpushare_spawner.doctor.finding import Finding, Level, Machine


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a machine with a good kernel."""
    monkeypatch.setattr(system, "_membarrier", lambda: True)
    monkeypatch.setattr("gpushare_spawner.doctor.system.platform.machine", lambda: "x86_64")
    (tmp_path / "sys/fs/cgroup/memory").mkdir(parents=True)
    return tmp_path


def wrong(root: Path) -> list[Finding]:
    return [finding for finding in system.check(Machine(root, {})) if finding.level is not Level.OK]


def test_a_good_kernel_has_nothing_to_do(root: Path) -> None:
    # this machine runs the tests of the agent, which needs pidfd_open
    assert not wrong(root)


@pytest.mark.parametrize(
    ("name", "value", "where", "level", "remedy"),
    [
        ("_membarrier", False, "membarrier", Level.NOTE, "allow membarrier in the seccomp profile"),
        ("_pidfd", False, "pidfd_open", Level.PROBLEM, "Linux 5.3"),
        ("platform.machine", "riscv64", "kernel", Level.PROBLEM, "one of these architectures"),
    ],
)
def test_what_the_kernel_refuses_has_a_remedy(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object, where: str, level: Level, remedy: str
) -> None:
    monkeypatch.setattr(f"gpushare_spawner.doctor.system.{name}", lambda: value)
    (found,) = wrong(root)
    assert (found.where, found.level) == (where, level)
    assert remedy in found.remedy


def test_both_kinds_of_cgroups_are_seen(root: Path) -> None:
    cgroups = root / "sys/fs/cgroup"
    (cgroups / "cgroup.controllers").write_text("cpu io pids\n")
    (found,) = wrong(root)
    assert (found.where, found.level) == ("cgroups", Level.NOTE)
    assert "--cgroups" in found.remedy
    (cgroups / "cgroup.controllers").write_text("cpu memory\n")
    assert not wrong(root)


@pytest.mark.parametrize(("mode", "what"), [("2", "this process has a filter"), ("0", "this process has no filter")])
def test_seccomp_is_seen(root: Path, mode: str, what: str) -> None:
    status = root / "status"
    status.write_text(f"Name:\tpython\nSeccomp:\t{mode}\nSeccomp_filters:\t1\n")
    (found,) = (finding for finding in system.check(Machine(root, {}), status) if finding.where == "seccomp")
    assert found.what.startswith(what)
