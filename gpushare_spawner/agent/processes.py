"""This machine's processes, read from /proc.

A pid alone does not identify a process: the kernel reuses pids. For sessions' processes, see sessions/attribution.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_HOSTS_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the first pid namespace: PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h, unchanged since 3.8."""

_THREADS = 17
"""Index of the number of threads in the result of `_stat`: field 20 of /proc/PID/stat."""


@dataclass(frozen=True)
class ProcessName:
    """The identity of a process, distinct from later processes with the same pid."""

    pid: int
    started: int
    """Clock ticks since boot, field 22 of /proc/PID/stat."""
    boot: str
    """The kernel's boot ID: pids and ticks restart at each boot."""


def sees_the_host() -> bool:
    """Return whether this process is in the host's pid namespace. True if /proc does not show it."""
    try:
        return (PROC / "self/ns/pid").stat().st_ino == _HOSTS_PID_NAMESPACE
    except OSError:
        return True


def effective_capabilities(proc: Path | None = None) -> int | None:
    """Return this process's effective capabilities, as the kernel's bits; None if /proc does not show them."""
    try:
        status = ((proc or PROC) / "self/status").read_text()
        return next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
    except (OSError, StopIteration, ValueError):
        return None


def boot_id() -> str:
    """Return the ID of the machine's current boot."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def named(pid: int) -> ProcessName | None:
    """Return the process that currently has this pid; None if there is none, or only an unreaped zombie.

    A process continues in its other threads after its first thread has exited, and has the state of a zombie.
    """
    stat = _stat(pid)
    if stat is None or (stat[0] in ("Z", "X") and int(stat[_THREADS]) <= 1):
        return None
    return ProcessName(pid, started=int(stat[19]), boot=boot_id())


def exists(pid: int) -> bool:
    """Return whether there is a process with this pid, including an unreaped zombie."""
    return (PROC / str(pid)).exists()


def alive(process: ProcessName) -> bool:
    """Return whether this exact process is still running."""
    return named(process.pid) == process


def stopped(pid: int) -> bool:
    """Return whether all its threads are stopped, by a signal or a debugger. False if there is no such process."""
    try:
        stats = [_stat(int(thread), PROC / str(pid) / "task") for thread in os.listdir(PROC / str(pid) / "task")]
    except OSError:
        return False
    states = {stat[0] for stat in stats if stat is not None} - {"Z", "X"}
    return bool(states) and states <= {"T", "t"}


def parent(pid: int) -> int | None:
    """Return its parent's pid; None if there is no such process."""
    stat = _stat(pid)
    return int(stat[1]) if stat is not None else None


MOST_ANCESTORS = 16
"""Ancestors that `ancestry` returns: a kernel starts its programs directly or through a few shells and launchers."""


def ancestry(pid: int) -> tuple[int, ...]:
    """Return the pids of the process and its nearest ancestors in its pid namespace, in that namespace's numbering.

    Empty if there is no such process.
    """
    pids: list[int] = []
    depth = 0
    ancestor: int | None = pid
    while ancestor and len(pids) <= MOST_ANCESTORS:
        # proc_pid_status(5): the pids in each namespace, from that of this /proc to the process's own
        numbers = _status(ancestor, "NSpid:")
        if not numbers or len(numbers) < depth:
            break
        depth = len(numbers)
        pids.append(numbers[-1])
        ancestor = parent(ancestor)
    return tuple(pids)


def cgroup(pid: int | str) -> str | None:
    """Return the path of its cgroup; None if it cannot be read.

    If version 1 hierarchies are in use, this is the path in a single hierarchy: the cgroups of services and containers
    have the same path in each.
    """
    try:
        lines = (PROC / str(pid) / "cgroup").read_text().splitlines()
    except (OSError, ValueError):
        return None
    # hierarchy:controllers:path, see cgroups(7); hierarchy 0 is version 2, and is unused or absent next to version 1
    paths = {number: path for number, _, path in (line.split(":", 2) for line in lines if line.count(":") > 1)}
    unified = paths.pop("0", None)
    if unified in (None, "/"):
        return next((path for path in paths.values() if path != "/"), unified)
    return unified


def cgroup_of_self() -> str | None:
    """Return the cgroup of this process."""
    return cgroup("self")


def uid(pid: int) -> int | None:
    """Return its original real uid; None if there is no such process."""
    return next(iter(uids(pid)), None)


def uids(pid: int) -> tuple[int, ...]:
    """Return its real, effective, saved and file system uids; empty if there is no such process."""
    return _status(pid, "Uid:")


def _status(pid: int, name: str) -> tuple[int, ...]:
    """Return the numbers in a line of /proc/PID/status; empty if there is none."""
    try:
        lines = (PROC / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return ()
    return next((tuple(map(int, line.split()[1:])) for line in lines if line.startswith(name)), ())


def _stat(pid: int, folder: Path | None = None) -> list[str] | None:
    """Return the fields of /proc/PID/stat, starting with the third (state).

    The second field, the command, can contain spaces and parentheses. `folder`: the folder of a single thread instead.
    """
    try:
        text = ((folder or PROC) / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 1 :].split()
