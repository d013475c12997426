"""Tells the arbiters how much device memory the driver shows for each connected process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.gpus.nvml import Gpu, GpuState
from gpushare_spawner.agent.sessions.session import Session


def tell_arbiters(
    states: Mapping[str, GpuState],
    gpus: Mapping[str, Gpu],
    arbitrations: Mapping[str, GpuArbitration],
    sessions: Iterable[Session],
) -> None:
    """Hand the driver's figures to the arbiters. All mappings are by the GPU's UUID.

    The figures bound what a process uses of what it has allocated. NVML of a real driver is not known to count managed
    memory for the process that has it: there the bound is what is in use on the whole GPU.
    """
    sessions = list(sessions)
    for uuid, state in states.items():
        amounts: dict[int, int | None] = {}
        bounds: dict[int, int] = {}
        told: set[int] = set()
        for session in sessions:
            for connection in sorted(session.cuda, key=lambda one: one.number):
                pid = connection.peer.pid
                shown = state.processes.get(pid)
                amounts[connection.number] = (0 if pid in told else shown.memory_bytes) if shown else None
                told.add(pid)
                if not gpus[uuid].simulated:
                    bounds[connection.number] = state.memory_used_bytes
                elif shown is not None and shown.memory_bytes is not None:
                    bounds[connection.number] = shown.memory_bytes
        arbitrations[uuid].device_memory(amounts)
        if state.healthy:
            arbitrations[uuid].working_sets(bounds)
