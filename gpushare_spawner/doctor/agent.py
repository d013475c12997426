"""Checks of this machine's agent: its control socket, its answer, and whether it shares the machine's GPUs."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.clients.agent import AgentClient
from gpushare_spawner.doctor.finding import Finding, closed_part, note, ok, problem, skipped
from gpushare_spawner.model.control import AgentUnreachable, ControlRefused
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import Report
from gpushare_spawner.wording.service import not_durable

_LAYER_REMEDIES = {
    LayerName.MPS: "See the log of the MPS daemon in the agent's state folder (`mps/*/log`), and the agent's own log.",
    LayerName.MIG: "`nvidia-smi -L` lists the existing MIG instances. Stop the server before you destroy its instance.",
}
_LOGS = "See `systemctl status gpushare-agent` and `journalctl -u gpushare-agent`."


def check(socket: Path, gpus: tuple[Gpu, ...]) -> tuple[list[Finding], Report | None]:
    """Return the findings, and the agent's report for other checks (None if the agent does not answer).

    ``gpus``: the machine's GPUs that can be shared.
    """
    where = str(socket)
    unusable = skipped(where, "only the agent's user and root can use the socket: run `gpushare doctor` as root")
    try:
        mode = stat.S_IMODE(socket.stat().st_mode)
    except PermissionError:
        return [unusable], None
    except OSError:
        remedy = "Start it: `systemctl enable --now gpushare-agent`. For another socket use --control-socket."
        return [problem(where, "no agent is running: its control socket does not exist", remedy)], None
    if not os.access(socket, os.W_OK):
        return [unusable], None
    results = []
    if mode & 0o077:
        what = f"other users can open the control socket (mode {mode:04o})"
        results.append(problem(where, what, "Restart the agent: it creates the socket with mode 0600."))
    blocked = closed_part(socket.resolve().parent / "s")
    if blocked and os.geteuid() == 0:
        what = "other users cannot enter this folder, so their programs cannot reach their session's socket"
        results.append(problem(blocked, what, f"Run `chmod o+x {blocked}`; the unit file creates it with 0711."))
    try:
        report = asyncio.run(AgentClient(socket).report())
    except (AgentUnreachable, ControlRefused) as failure:
        return [*results, problem(where, str(failure), _LOGS)], None
    return results + report_findings(where, report, gpus), report


def report_findings(where: str, report: Report, gpus: tuple[Gpu, ...]) -> list[Finding]:
    """Return the findings that follow from the report."""
    instances = sum(gpu.mig is not None for gpu in report.gpus)
    counts = f"GPUs: {len({gpu.whole for gpu in report.gpus})}" + (f", MIG instances: {instances}" * (instances > 0))
    results = [ok(where, f"the agent of {report.node} answers; {counts}, sessions: {len(report.sessions)}")]
    shared = {gpu.uuid: gpu for gpu in report.gpus}
    for gpu in gpus:
        if gpu.uuid not in shared:
            what = f"the agent does not share this {gpu.model}"
            remedy = "Restart the agent if the GPU is new. On a node the agent shares only the GPUs that it claims."
            results.append(note(gpu.label, what, remedy))
    for shared_gpu in report.gpus:
        if not shared_gpu.healthy:
            what = f"the agent reports this {shared_gpu.model} as unhealthy"
            results.append(problem(shared_gpu.label, what, _LOGS))
    if report.state_trouble is not None:
        results.append(
            problem("state folder", not_durable(report.node, report.state_trouble), "Free space on that file system.")
        )
    if report.host_memory is None:
        what = "no budget of host memory: paged-out GPU memory can fill the machine's memory"
        results.append(note("host memory", what, "Start the agent without `--host-memory off`."))
    if report.stop_trouble is not None:
        what = f"templates with `gpu.bypass.action: stop` only notify on this machine: {report.stop_trouble}"
        results.append(skipped("stop of bypassing processes", what))
    for session in report.sessions:
        if session.layer_trouble is not None:
            remedy = _LAYER_REMEDIES.get(session.layer, _LOGS)
            results.append(problem(f"session {session.id}", session.layer_trouble, remedy))
        if session.bypassing_pids:
            pids = ", ".join(map(str, session.bypassing_pids))
            what = f"processes bypassing the library: {pids}"
            remedy = "Ask the user why LD_PRELOAD is missing there. See docs/guides/security.md."
            results.append(note(f"session {session.id}", what, remedy))
    return results
