"""GPU memory that connected processes hold and have not claimed, by what the driver shows of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpushare_spawner.agent.gpus.nvml import Gpu, GpuState
from gpushare_spawner.agent.sessions.session import Session

STEP = 64 * 2**20
"""Bytes; less is not counted, and more in steps of this. The driver rounds each allocation up."""

Process = tuple[int, str]
"""Pid and the GPU's UUID."""


def claimed_bytes(gpus: Iterable[str], sessions: Iterable[Session]) -> dict[Process, int]:
    """Return the bytes that each connected process claims on GPUs (UUIDs), with all its connections."""
    gpus = tuple(gpus)
    claimed: dict[Process, int] = {}
    for session in sessions:
        for connection in session.cuda:
            for gpu in gpus:
                process = connection.peer.pid, gpu
                claimed[process] = claimed.get(process, 0) + session.claims.get(connection, {}).get(gpu, 0)
    return claimed


class UnclaimedMemory:
    """Call `look` with each answer of the driver. A claim counts until the next look: the driver may still show memory
    that was just freed."""

    def __init__(self, gpus: Mapping[str, Gpu], context_bytes: int) -> None:
        """``gpus``: by UUID. ``context_bytes``: GPU memory that each process has beside its allocations; simulated GPUs
        have none."""
        self._gpus = gpus
        self._context_bytes = context_bytes
        self._claimed: Mapping[Process, int] = {}

    def look(self, states: Mapping[str, GpuState], claimed: Mapping[Process, int]) -> dict[Process, int]:
        """Return the bytes that each process holds beyond its context and the claims of all its connections.

        ``states``: what the driver shows, by the GPU's UUID; ``claimed``: see `claimed_bytes`. Processes without such
        memory are left out.
        """
        found: dict[Process, int] = {}
        for (pid, gpu), now in claimed.items():
            shown = states[gpu].processes.get(pid)
            if shown is None or shown.memory_bytes is None:
                continue
            context = 0 if self._gpus[gpu].simulated else self._context_bytes
            unclaimed = shown.memory_bytes - max(now, self._claimed.get((pid, gpu), 0)) - context
            if unclaimed >= STEP:
                found[pid, gpu] = unclaimed // STEP * STEP
        self._claimed = claimed
        return found
