"""Checks the kernel: the system calls that agent and library need, and that a seccomp profile can forbid."""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from gpushare_spawner.doctor.finding import Finding, Machine, note, ok, problem

_SYS_MEMBARRIER = {"x86_64": 324, "aarch64": 283}
_MEMBARRIER_QUERY = 0
_EXPEDITED = 1 << 3 | 1 << 4
"""PRIVATE_EXPEDITED and REGISTER_PRIVATE_EXPEDITED of membarrier(2), Linux 4.14."""


@dataclass(frozen=True)
class KernelFacts:
    """Facts that the probe has read."""

    machine: str
    release: str
    membarrier: bool
    pidfd: bool
    seccomp: bool
    """Whether this process has a seccomp filter."""
    memory_cgroups: bool
    """Whether the memory limits of servers can be read."""


def check(machine: Machine) -> list[Finding]:
    """Return the findings."""
    return findings(probe(machine.path(Path("/sys/fs/cgroup"))))


def probe(cgroups: Path, status: Path = Path("/proc/self/status")) -> KernelFacts:
    """Read the facts."""
    return KernelFacts(
        machine=platform.machine(),
        release=platform.release(),
        membarrier=_membarrier(),
        pidfd=_pidfd(),
        seccomp=_seccomp(status),
        memory_cgroups=_memory_cgroups(cgroups),
    )


def findings(facts: KernelFacts) -> list[Finding]:
    """Return the findings that follow from the facts."""
    system = f"Linux {facts.release}, {facts.machine}"
    results = [ok("kernel", system)]
    if facts.machine not in _SYS_MEMBARRIER:
        remedy = "Use a machine of one of these architectures."
        results = [problem("kernel", f"{system}: the library exists for x86_64 and aarch64 only", remedy)]
    if not facts.pidfd:
        results.append(
            problem(
                "pidfd_open",
                "refused by the kernel, so the agent cannot detect the end of a notebook server",
                "Use Linux 5.3 or later. In a container, allow pidfd_open in the seccomp profile.",
            )
        )
    if facts.membarrier:
        results.append(ok("membarrier", "available to this process"))
    else:
        results.append(
            note(
                "membarrier",
                "refused by the kernel, so each kernel launch with the library needs a memory fence",
                "Use Linux 4.14 or later. In a container, allow membarrier in the seccomp profile.",
            )
        )
    filtered = "this process has a filter" if facts.seccomp else "this process has no filter"
    results.append(ok("seccomp", f"{filtered}; notebooks in containers can have another one"))
    if facts.memory_cgroups:
        results.append(ok("cgroups", "memory limits of servers can be read"))
    else:
        results.append(
            note(
                "cgroups",
                "no memory controller was found, so the agent cannot read the servers' memory limits",
                "Mount the cgroups in /sys/fs/cgroup.",
            )
        )
    return results


def _membarrier() -> bool:
    number = _SYS_MEMBARRIER.get(platform.machine())
    if number is None:
        return False
    commands = int(ctypes.CDLL(None, use_errno=True).syscall(number, _MEMBARRIER_QUERY, 0, 0))
    return commands >= 0 and commands & _EXPEDITED == _EXPEDITED


def _pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _seccomp(status: Path) -> bool:
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    return fields.get("Seccomp", "0").strip() not in ("", "0")


def _memory_cgroups(cgroups: Path) -> bool:
    controllers = cgroups / "cgroup.controllers"
    if controllers.is_file():
        return "memory" in controllers.read_text().split()
    return (cgroups / "memory").is_dir()
