"""The agent of this machine: its control socket, its answer, and whether it shares the GPUs that are here."""

from __future__ import annotations

import asyncio
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.clients.agent import AgentClient
from gpushare_spawner.doctor.finding import Finding, note, ok, problem, skipped
from gpushare_spawner.model.control import AgentUnreachable, ControlRefused
from gpushare_spawner.model.report import Report

_LOGS = "`systemctl status gpushare-agent` and `journalctl -u gpushare-agent` say more."


@dataclass(frozen=True)
class AgentFacts:
    """What the probe saw."""

    socket: Path
    present: bool = False
    mode: int = 0
    """Permission bits of the socket."""
    usable: bool = True
    """Whether this user may use the socket."""
    blocked: str = ""
    """The first folder on the way to the sessions' sockets that other users cannot pass; empty: none."""
    root: bool = False
    error: str = ""
    """Why there is no report."""
    report: Report | None = None
    gpus: tuple[Gpu, ...] = ()
    """The machine's GPUs that can be shared."""


def check(socket: Path, gpus: tuple[Gpu, ...]) -> list[Finding]:
    """The findings."""
    return findings(probe(socket, gpus))


def probe(socket: Path, gpus: tuple[Gpu, ...]) -> AgentFacts:
    """Look, and ask the agent for its report."""
    root = os.geteuid() == 0
    try:
        state = socket.stat()
    except PermissionError:
        return AgentFacts(socket, present=True, usable=False, gpus=gpus)
    except OSError:
        return AgentFacts(socket, root=root, gpus=gpus)
    error, report = "", None
    try:
        report = asyncio.run(AgentClient(socket).report())
    except (AgentUnreachable, ControlRefused) as said:
        error = str(said)
    return AgentFacts(
        socket,
        present=True,
        mode=stat.S_IMODE(state.st_mode),
        usable=os.access(socket, os.W_OK),
        blocked=_blocked(socket.resolve().parent / "s"),
        root=root,
        error=error,
        report=report,
        gpus=gpus,
    )


def findings(facts: AgentFacts) -> list[Finding]:
    """What the facts mean."""
    where = str(facts.socket)
    if not facts.present:
        remedy = "Start it: `systemctl enable --now gpushare-agent`. With another socket give --control-socket."
        return [problem(where, "no agent runs here: its control socket does not exist", remedy)]
    if not facts.usable:
        return [skipped(where, "the socket is for the agent's user and root: run `gpushare doctor` as root")]
    found = []
    if facts.mode & 0o077:
        what = f"other users may open the control socket (mode {facts.mode:04o})"
        found.append(problem(where, what, "Restart the agent, which makes it with mode 0600."))
    if facts.blocked and facts.root:
        what = "other users cannot pass this folder, so their programs do not reach their session's socket"
        found.append(
            problem(facts.blocked, what, f"Run `chmod o+x {facts.blocked}`; the unit file makes it with 0711.")
        )
    if facts.report is None:
        return [*found, problem(where, facts.error, _LOGS)]
    return found + _report_findings(where, facts.report, facts.gpus)


def _report_findings(where: str, report: Report, gpus: tuple[Gpu, ...]) -> list[Finding]:
    found = [
        ok(where, f"the agent of {report.node} answers; GPUs: {len(report.gpus)}, sessions: {len(report.sessions)}")
    ]
    shared = {gpu.uuid: gpu for gpu in report.gpus}
    for gpu in gpus:
        if gpu.uuid not in shared:
            what = f"{gpu.model} is not shared by the agent"
            remedy = "Restart the agent if the GPU is new. On a node the agent shares the GPUs that it was given."
            found.append(note(f"GPU {gpu.index}", what, remedy))
    for shared_gpu in report.gpus:
        if not shared_gpu.healthy:
            what = f"the agent says that {shared_gpu.model} is unhealthy"
            found.append(problem(f"GPU {shared_gpu.index}", what, _LOGS))
    if report.host_memory is None:
        what = "no budget of host memory: paged-out GPU memory may fill the machine's memory"
        found.append(note("host memory", what, "Start the agent without `--host-memory off`."))
    for session in report.sessions:
        if session.bypassing_pids:
            pids = ", ".join(map(str, session.bypassing_pids))
            what = f"processes use the GPU without the library: {pids}"
            remedy = "Ask the user why LD_PRELOAD is missing there; docs/guides/security.md says what that means."
            found.append(note(f"session {session.id}", what, remedy))
    return found


def _blocked(folder: Path) -> str:
    for part in (*reversed(folder.parents), folder):
        try:
            if not part.stat().st_mode & stat.S_IXOTH:
                return str(part)
        except OSError:
            break
    return ""
