"""What the kernels of a running Jupyter server do: how many are there, how many are busy, when one last did a thing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True)
class KernelActivity:
    """What the agent is told."""

    busy: int
    alive: int
    last_activity: float = 0.0
    """Seconds since the epoch; 0: unknown."""

    def fields(self) -> tuple[int, int, int]:
        """The fields of a KERNELS frame."""
        return (self.busy, self.alive, round(self.last_activity * 1e9))


def kernel_activity(kernel_manager: Any) -> KernelActivity:
    """Read jupyter_server's kernel manager. A kernel that is busy with anything, GPU or not, is busy.

    Kernels that start or end meanwhile are passed over.
    """
    busy = alive = 0
    latest = 0.0
    for kernel_id in list(kernel_manager.list_kernel_ids()):
        try:
            kernel = kernel_manager.get_kernel(kernel_id)
        except KeyError:
            continue
        alive += 1
        busy += getattr(kernel, "execution_state", None) == "busy"
        at = getattr(kernel, "last_activity", None)
        if isinstance(at, datetime):
            latest = max(latest, at.timestamp())
    return KernelActivity(busy, alive, latest)
