"""Processes that use a GPU without the library: sharing is cooperative, so this is seen and reported, not prevented."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from gpushare_spawner.agent import processes

MAX_GENERATIONS = 64
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")


def bypassing(
    gpu_pids: Iterable[int],
    connected: Iterable[int],
    roots: Mapping[str, int],
    sockets: Mapping[str, str],
    pods: Mapping[str, str] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Per session the processes of `gpu_pids` that belong to it and are not connected.

    `roots`: pid of each session's notebook server; `sockets`: path of each session's socket. A process belongs to the
    session whose server it descends from; else (it was orphaned) to the one whose socket it was told of when it
    started; else to the one whose server shares its cgroup, where that cgroup is one session's alone.
    `pods`: uid of each session's pod, on Kubernetes; a process belongs to the pod whose uid is in its cgroup's name.
    """
    by_pid = {pid: session for session, pid in roots.items()}
    by_socket = {path: session for session, path in sockets.items()}
    by_cgroup = _own_cgroups(roots)
    by_uid = {uid: session for session, uid in (pods or {}).items() if uid}
    found: dict[str, list[int]] = {}
    for pid in sorted(set(gpu_pids) - set(connected)):
        session = _by_descent(pid, by_pid)
        if session is None:
            session = by_socket.get(processes.variable(pid, "GPUSHARE_SOCKET") or "")
        if session is None:
            session = by_cgroup.get(processes.cgroup(pid) or "")
        if session is None and by_uid:
            session = by_uid.get(_pod_uid(processes.cgroup(pid) or ""))
        if session is not None:
            found.setdefault(session, []).append(pid)
    return {session: tuple(pids) for session, pids in found.items()}


def _by_descent(pid: int, by_pid: Mapping[int, str]) -> str | None:
    ancestor: int | None = pid
    for _ in range(MAX_GENERATIONS):
        if ancestor is None or ancestor <= 1:
            return None
        if ancestor in by_pid:
            return by_pid[ancestor]
        ancestor = processes.parent(ancestor)
    return None


def _pod_uid(cgroup: str) -> str:
    """The uid of the pod that a cgroup is of: .../pod<uid>/..., or (systemd driver) ...-pod<uid with _ for ->.slice."""
    found = _POD.search(cgroup)
    return found[1].replace("_", "-") if found else ""


def _own_cgroups(roots: Mapping[str, int]) -> dict[str, str]:
    """cgroup -> session, for cgroups that hold one session and not the agent too."""
    sessions: dict[str, list[str]] = {}
    for session, pid in roots.items():
        path = processes.cgroup(pid)
        if path is not None:
            sessions.setdefault(path, []).append(session)
    own = processes.cgroup_of_self()
    return {path: names[0] for path, names in sessions.items() if len(names) == 1 and path != own}
