"""Processes of this machine, as /proc tells. A pid alone is no name: the kernel gives it away again."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_HOSTS_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the first pid namespace: PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h, the same since 3.8."""

_THREADS = 17
"""Place of the number of threads in what `_stat` returns: field 20 of /proc/PID/stat."""


@dataclass(frozen=True)
class ProcessName:
    """A process that cannot be mistaken for a later one of the same pid."""

    pid: int
    started: int
    """Clock ticks since boot, field 22 of /proc/PID/stat."""
    boot: str
    """The kernel's boot id: pids and ticks begin anew with each boot."""


def sees_the_host() -> bool:
    """Whether this process is in the host's pid namespace. True where /proc does not tell."""
    try:
        return (PROC / "self/ns/pid").stat().st_ino == _HOSTS_PID_NAMESPACE
    except OSError:
        return True


def boot_id() -> str:
    """Which boot of the machine this is."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def named(pid: int) -> ProcessName | None:
    """The process that has this pid now; None if there is none, or only a zombie that nobody has reaped.

    A process whose first thread has ended runs on in its other threads, and its state is a zombie's.
    """
    stat = _stat(pid)
    if stat is None or (stat[0] in ("Z", "X") and int(stat[_THREADS]) <= 1):
        return None
    return ProcessName(pid, started=int(stat[19]), boot=boot_id())


def exists(pid: int) -> bool:
    """Whether there is a process of this pid, an ended one that nobody has reaped included."""
    return (PROC / str(pid)).exists()


def alive(process: ProcessName) -> bool:
    """Whether this very process still runs."""
    return named(process.pid) == process


def stopped(pid: int) -> bool:
    """Whether all its threads are stopped, by a signal or a debugger. False where there is no such process."""
    try:
        stats = [_stat(int(thread), PROC / str(pid) / "task") for thread in os.listdir(PROC / str(pid) / "task")]
    except OSError:
        return False
    states = {stat[0] for stat in stats if stat is not None} - {"Z", "X"}
    return bool(states) and states <= {"T", "t"}


def parent(pid: int) -> int | None:
    """Its parent's pid; None where there is no such process."""
    stat = _stat(pid)
    return int(stat[1]) if stat is not None else None


def cgroup(pid: int | str) -> str | None:
    """Path of its cgroup; None where it cannot be told.

    Where the hierarchies of version 1 are in use it is that of one of them: groups of services and of containers have
    the same path in each.
    """
    try:
        lines = (PROC / str(pid) / "cgroup").read_text().splitlines()
    except (OSError, ValueError):
        return None
    # hierarchy:controllers:path, as cgroups(7) says; hierarchy 0 is version 2, and is unused or absent beside version 1
    paths = {number: path for number, _, path in (line.split(":", 2) for line in lines if line.count(":") > 1)}
    unified = paths.pop("0", None)
    if unified in (None, "/"):
        return next((path for path in paths.values() if path != "/"), unified)
    return unified


def cgroup_of_self() -> str | None:
    """The cgroup of this process."""
    return cgroup("self")


def uid(pid: int) -> int | None:
    """The uid that it was started as (its real one); None where there is no such process."""
    return next(iter(uids(pid)), None)


def uids(pid: int) -> tuple[int, ...]:
    """Return its real, effective, saved and file system uid; empty where there is no such process."""
    try:
        lines = (PROC / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return ()
    return next((tuple(map(int, line.split()[1:5])) for line in lines if line.startswith("Uid:")), ())


def _stat(pid: int, folder: Path | None = None) -> list[str] | None:
    """Fields of /proc/PID/stat from the third (state) on; the second, the command, may hold spaces and brackets.
    `folder`: where its threads are, for one of them."""
    try:
        text = ((folder or PROC) / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 1 :].split()
