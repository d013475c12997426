"""doctor/system.py: what the kernel offers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.doctor.finding import Level
from gpushare_spawner.doctor.system import KernelFacts, findings, probe

GOOD = KernelFacts("x86_64", "6.12", membarrier=True, pidfd=True, seccomp=False, memory_cgroups=True)


def test_a_good_kernel_has_nothing_to_do() -> None:
    assert {finding.level for finding in findings(GOOD)} == {Level.OK}


@pytest.mark.parametrize(
    ("change", "where", "level", "remedy"),
    [
        ({"membarrier": False}, "membarrier", Level.NOTE, "allow membarrier in the seccomp profile"),
        ({"pidfd": False}, "pidfd_open", Level.PROBLEM, "Linux 5.3"),
        ({"memory_cgroups": False}, "cgroups", Level.NOTE, "/sys/fs/cgroup"),
        ({"machine": "riscv64"}, "kernel", Level.PROBLEM, "one of these architectures"),
    ],
)
def test_what_the_kernel_refuses_has_a_remedy(change: dict[str, Any], where: str, level: Level, remedy: str) -> None:
    (found,) = [finding for finding in findings(replace(GOOD, **change)) if finding.level is not Level.OK]
    assert (found.where, found.level) == (where, level)
    assert remedy in found.remedy


def test_the_probe_sees_seccomp_and_both_kinds_of_cgroups(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nSeccomp:\t2\nSeccomp_filters:\t1\n")
    assert probe(tmp_path, status).seccomp
    assert not probe(tmp_path, status).memory_cgroups
    (tmp_path / "memory").mkdir()
    assert probe(tmp_path, status).memory_cgroups
    (tmp_path / "cgroup.controllers").write_text("cpu io pids\n")
    assert not probe(tmp_path, status).memory_cgroups
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    status.write_text("Seccomp:\t0\n")
    facts = probe(tmp_path, status)
    assert facts.memory_cgroups
    assert not facts.seccomp
    # this machine runs the tests of the agent, which needs it
    assert facts.pidfd
