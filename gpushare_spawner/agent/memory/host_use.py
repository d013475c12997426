"""How much CPU and host memory pods use: a released session's pod must not request less."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from gpushare_spawner.agent.memory.cgroups import CpuCgroups, MemoryCgroups
from gpushare_spawner.model.report import HostUseReport

OVER = 10.0
"""Seconds over which CPU use is measured."""
FORGET_AFTER = 600.0
"""Seconds after which the figures of a pod that nobody asked for are forgotten."""
CPU_STEP = 50
"""Millicores; use is rounded up, so that a report changes only where it matters."""
MEMORY_STEP = 64 * 2**20
"""Bytes, likewise."""


@dataclass
class _Sample:
    at: float
    cpu_seconds: float
    cores: float | None = None
    """Over the interval before `at`; None: there was none."""


class HostUse:
    """Reads cgroups. Figures are None until a pod was asked for twice, with at least `OVER` seconds between."""

    def __init__(self, cgroups: MemoryCgroups, clock: Callable[[], float]) -> None:
        """``clock``: seconds on any monotonic clock."""
        self._memory = cgroups
        self._cpu = CpuCgroups(cgroups.root)
        self._clock = clock
        self._samples: dict[str, _Sample] = {}

    def of_pod(self, uid: str) -> HostUseReport | None:
        """Return what the pod uses; None: not known (yet)."""
        now = self._clock()
        self._samples = {name: one for name, one in self._samples.items() if now - one.at < FORGET_AFTER}
        last = self._samples.get(uid)
        if last is None or now - last.at >= OVER:
            seconds = self._cpu.seconds_of_pod(uid)
            if seconds is None:
                self._samples.pop(uid, None)
                return None
            cores = None if last is None else max(0.0, seconds - last.cpu_seconds) / (now - last.at)
            last = self._samples[uid] = _Sample(now, seconds, cores)
        memory = self._memory.used_by_pod(uid)
        if last.cores is None or memory is None:
            return None
        return HostUseReport(
            cpu_millicores=math.ceil(last.cores * 1000 / CPU_STEP) * CPU_STEP,
            memory_bytes=math.ceil(memory / MEMORY_STEP) * MEMORY_STEP,
        )
