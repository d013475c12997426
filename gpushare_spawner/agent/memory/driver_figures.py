"""The driver's figures of device memory, by process, for the arbiters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.gpus.nvml import Gpu, GpuState
from gpushare_spawner.agent.sockets.connection import Connection


def tell_arbiters(
    states: Mapping[str, GpuState],
    gpus: Mapping[str, Gpu],
    arbitrations: Mapping[str, GpuArbitration],
    connections: Iterable[Connection],
    unclaimed: Mapping[tuple[int, str], int],
) -> None:
    """Hand the driver's figures to the arbiters. All mappings are by the GPU's UUID.

    ``connections``: of the CUDA processes. A process with several counts once, for the first of them. ``unclaimed``:
    bytes that a process holds beyond its claims, by pid and GPU.

    The figures bound what a process uses of what it has allocated. NVML of a real driver is not known to count managed
    memory for the process that has it: there the bound is what is in use on the whole GPU.
    """
    connections = list(connections)
    for uuid, state in states.items():
        amounts: dict[int, int | None] = {}
        beyond: dict[int, int] = {}
        bounds: dict[int, int] = {}
        told: set[int] = set()
        for connection in connections:
            pid = connection.peer.pid
            shown = state.processes.get(pid)
            amounts[connection.number] = (0 if pid in told else shown.memory_bytes) if shown else None
            beyond[connection.number] = 0 if pid in told else unclaimed.get((pid, uuid), 0)
            told.add(pid)
            if not gpus[uuid].simulated:
                bounds[connection.number] = state.memory_used_bytes
            elif shown is not None and shown.memory_bytes is not None:
                bounds[connection.number] = shown.memory_bytes
        arbitrations[uuid].device_memory(amounts, beyond)
        if state.healthy:
            arbitrations[uuid].working_sets(bounds)
