"""The kernels of a running Jupyter server: how many run, how many are busy, and their last activity."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True)
class KernelActivity:
    """What the agent gets."""

    busy: int
    alive: int
    last_activity: float = 0.0
    """Seconds since the epoch; 0: unknown."""

    def fields(self) -> tuple[int, int, int]:
        """The fields of a KERNELS frame."""
        return (self.busy, self.alive, round(self.last_activity * 1e9))


def kernel_activity(kernel_manager: Any) -> KernelActivity:
    """Read jupyter_server's kernel manager. A kernel that runs a cell is busy, with or without GPU work.

    Kernels that start or end meanwhile are ignored.
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
