"""The driver's figures of device memory, by process, for the arbiters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.gpus.nvml import Gpu, GpuState
from gpushare_spawner.agent.memory.node_memory import MemorySession


def tell_arbiters(
    states: Mapping[str, GpuState],
    gpus: Mapping[str, Gpu],
    arbitrations: Mapping[str, GpuArbitration],
    sessions: Iterable[MemorySession],
    unclaimed: Mapping[tuple[int, str], int],
) -> None:
    """Hand the driver's figures to the arbiters and to the memory limits. All mappings are by the GPU's UUID.

    A process with several connections counts once, for the first of them. ``unclaimed``: bytes that a process holds
    beyond its claims, by pid and GPU.

    The figures bound what a process uses of what it says to have allocated. NVML of a real driver is not known to count
    managed memory for the process that has it: there the bound is what is in use on the whole GPU, without what is
    shown of other processes. A process that is not among those that the driver lists has nothing on the GPU.
    """
    sessions = list(sessions)
    for uuid, state in states.items():
        amounts: dict[int, int | None] = {}
        beyond: dict[int, int] = {}
        bounds: dict[int, int] = {}
        told: set[int] = set()
        of_all = sum(process.memory_bytes or 0 for process in state.processes.values())
        for session in sessions:
            here = session.memory if any(gpu.uuid == uuid for gpu in session.gpus) else None
            for connection in sorted(session.cuda, key=lambda one: one.number):
                number, pid = connection.number, connection.peer.pid
                shown = state.processes.get(pid)
                first = pid not in told
                told.add(pid)
                beyond[number] = unclaimed.get((pid, uuid), 0) if first else 0
                if shown is not None:
                    amounts[number] = shown.memory_bytes if first else 0
                    if not gpus[uuid].simulated:
                        bounds[number] = max(0, state.memory_used_bytes - of_all + (shown.memory_bytes or 0))
                    elif shown.memory_bytes is not None:
                        bounds[number] = shown.memory_bytes
                elif state.processes and pid and not session.suspends:  # a suspended process is not listed
                    amounts[number] = bounds[number] = 0
                else:
                    amounts[number] = None
                    if not gpus[uuid].simulated:
                        bounds[number] = state.memory_used_bytes
                if here is not None and amounts[number] is not None:
                    here.driver_shows(connection, uuid, amounts[number] or 0)
        arbitrations[uuid].device_memory(amounts, beyond)
        if state.healthy:
            arbitrations[uuid].working_sets(bounds)
