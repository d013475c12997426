"""NVML for an agent that does not see the host's processes: without NVML's figures of processes.

The driver uses the host's process ids. In a pid namespace of its own (a pod without hostPID) the agent can match none
of them: the kernel gives it pid 0 for a process of another namespace, and an id that exists in both belongs to another
process.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.nvml import Gpu, GpuState, Utilisation
from gpushare_spawner.agent.periodic import GpuSource

log = logging.getLogger(__name__)


class WithoutProcesses:
    """A source of figures of GPUs, without those of processes."""

    def __init__(self, source: GpuSource) -> None:
        self._source = source

    def state(self, gpu: Gpu) -> GpuState:
        """Return what the source says now, without its processes. May block for milliseconds."""
        return replace(self._source.state(gpu), processes={})

    def memory(self, gpu: Gpu) -> GpuState | None:
        """Return what the source says of the memory now, without its processes. May block for milliseconds."""
        state = self._source.memory(gpu)
        return None if state is None else replace(state, processes={})

    def utilisation(self, gpu: Gpu, since: float) -> tuple[Utilisation, ...] | None:
        """Return None: never known here. GPU time is then estimated from leases."""
        return None


def matched(source: GpuSource, gpus: tuple[Gpu, ...]) -> GpuSource:
    """Return a source whose pids are those of the agent's own pid namespace: this one, or one without processes.

    The simulated driver numbers processes as they see themselves.
    """
    if all(gpu.simulated for gpu in gpus) or processes.sees_the_host():
        return source
    log.warning(
        "this agent does not see the host's processes (hostPID): GPU time is estimated from leases, "
        "and processes that use a GPU without the library are not found"
    )
    return WithoutProcesses(source)
