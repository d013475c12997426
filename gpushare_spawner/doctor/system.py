"""The kernel: what the agent and the library ask of it, and what a seccomp profile may forbid."""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from gpushare_spawner.doctor.finding import Finding, note, ok, problem

_SYS_MEMBARRIER = {"x86_64": 324, "aarch64": 283}
_MEMBARRIER_QUERY = 0
_EXPEDITED = 1 << 3 | 1 << 4
"""PRIVATE_EXPEDITED and REGISTER_PRIVATE_EXPEDITED of membarrier(2), Linux 4.14."""


@dataclass(frozen=True)
class KernelFacts:
    """What the probe saw."""

    machine: str
    release: str
    membarrier: bool
    pidfd: bool
    seccomp: bool
    """Whether a filter is on this process."""
    memory_cgroups: bool
    """Whether the memory limits of servers can be read."""


def check(cgroups: Path = Path("/sys/fs/cgroup")) -> list[Finding]:
    """The findings."""
    return findings(probe(cgroups))


def probe(cgroups: Path, status: Path = Path("/proc/self/status")) -> KernelFacts:
    """Look."""
    return KernelFacts(
        machine=platform.machine(),
        release=platform.release(),
        membarrier=_membarrier(),
        pidfd=_pidfd(),
        seccomp=_seccomp(status),
        memory_cgroups=_memory_cgroups(cgroups),
    )


def findings(facts: KernelFacts) -> list[Finding]:
    """What the facts mean."""
    system = f"Linux {facts.release}, {facts.machine}"
    found = [ok("kernel", system)]
    if facts.machine not in _SYS_MEMBARRIER:
        found = [problem("kernel", f"{system}: the library exists for x86_64 and aarch64 only", "Use such a machine.")]
    if not facts.pidfd:
        found.append(
            problem(
                "pidfd_open",
                "the kernel refuses it, so the agent cannot see the end of a notebook server",
                "Linux 5.3 or later is needed. In a container, let the seccomp profile allow pidfd_open.",
            )
        )
    if facts.membarrier:
        found.append(ok("membarrier", "available to this process"))
    else:
        found.append(
            note(
                "membarrier",
                "the kernel refuses it: each kernel launch under the library pays for a memory fence",
                "Linux 4.14 or later has it. In a container, let the seccomp profile allow membarrier.",
            )
        )
    filtered = "a filter is on this process" if facts.seccomp else "no filter is on this process"
    found.append(ok("seccomp", f"{filtered}; notebooks in containers may have another one"))
    if facts.memory_cgroups:
        found.append(ok("cgroups", "memory limits of servers can be read"))
    else:
        found.append(
            note(
                "cgroups",
                "no memory controller was found: the memory limits of servers are unknown to the agent",
                "Mount the cgroups, or name their folder with `gpushare agent --cgroups DIR`.",
            )
        )
    return found


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
