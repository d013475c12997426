"""An agent that does not see the host's processes: what NVML says about processes is left out, rather than misread.

The driver numbers processes as the host does. In a pid namespace of its own (a pod without hostPID) the agent can match
none of these numbers: the kernel gives it pid 0 for a process of another namespace, and a number that its own
namespace has too belongs to somebody else.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus import Gpu, GpuState, Utilisation
from gpushare_spawner.agent.rounds import GpuSource

log = logging.getLogger(__name__)


class WithoutProcesses:
    """A source that tells of GPUs and of no process."""

    def __init__(self, source: GpuSource) -> None:
        self._source = source

    def state(self, gpu: Gpu) -> GpuState:
        """Return what the source says now, without its processes. May block for milliseconds."""
        return replace(self._source.state(gpu), processes={})

    def utilisation(self, gpu: Gpu, since: float) -> tuple[Utilisation, ...] | None:
        """Return None, which means: never known here. Shares are then reckoned from bursts."""
        return None


def matched(source: GpuSource, gpus: tuple[Gpu, ...]) -> GpuSource:
    """Return a source whose pids are those of the agent's own pid namespace: this one, or one without processes.

    The simulated driver numbers processes as they see themselves.
    """
    if all(gpu.simulated for gpu in gpus) or processes.sees_the_host():
        return source
    log.warning(
        "this agent does not see the host's processes (hostPID): GPU time is reckoned from what sessions report, "
        "and processes that use a GPU without the library are not found"
    )
    return WithoutProcesses(source)
