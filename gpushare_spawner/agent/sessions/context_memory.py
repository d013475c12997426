"""GPU memory that the CUDA contexts of connected processes take, by what the driver shows. For reports.

The driver shows one figure for each process: context, plain memory, and the managed memory that is on the GPU, which
some drivers leave out. So what it shows beyond all claims is at least context, and the most of that ever seen is all of
it where the process's memory was once all on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpushare_spawner.agent.gpus.nvml import GpuState
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.agent.sessions.unclaimed import Process

LARGEST = 2**30
"""Bytes; more than that is memory that a process has not claimed, see bypassing.py."""


class ContextMemory:
    """Call `look` with each answer of the driver."""

    def __init__(self) -> None:
        self._most: dict[Process, int] = {}
        self._claimed: dict[Process, int] = {}
        """At the last look: the driver may still show memory that was just freed."""

    def look(self, states: Mapping[str, GpuState], sessions: Iterable[Session], claimed: Mapping[Process, int]) -> None:
        """Set `context_bytes` of the sessions. ``states``: by the GPU's UUID; ``claimed``: see `claimed_bytes`."""
        most = {key: size for key, size in self._most.items() if key[1] not in states}
        for (pid, gpu), now in claimed.items():
            before = self._most.get((pid, gpu), 0)
            shown = states[gpu].processes.get(pid)
            if shown is not None and shown.memory_bytes is not None:
                before = max(before, shown.memory_bytes - max(now, self._claimed.get((pid, gpu), 0)))
            most[pid, gpu] = min(before, LARGEST)
        kept = {key: size for key, size in self._claimed.items() if key[1] not in states}
        self._most, self._claimed = most, {**kept, **claimed}
        for session in sessions:
            pids = {connection.peer.pid for connection in session.cuda}
            found = [most.get((pid, gpu.uuid), 0) for pid in pids for gpu in session.gpus]
            session.context_bytes = 0 if session.suspended else sum(found)
