"""Whether a GPU may be given out, and why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpushare_spawner.agent.gpus.nvml import Gpu, GpuState


class GpuHealth:
    """Combines what the driver says with what other users of the GPUs hold."""

    def __init__(self, gpus: Mapping[str, Gpu], states: Callable[[], Mapping[str, GpuState]]) -> None:
        """`states`: the driver's last answer for each GPU. Both by the GPU's UUID."""
        self._gpus = gpus
        self._states = states
        self.withheld: Mapping[str, str] = {}
        """GPUs (UUIDs) that must not be given out, each with the reason."""

    def trouble(self, gpu: str) -> str | None:
        """Return why the GPU of that UUID may not be given out, as a sentence; None where it may."""
        if gpu in self.withheld:
            return self.withheld[gpu]
        state = self._states()[gpu]
        return None if state.healthy else f"{self._gpus[gpu].label} ({gpu}) {state.trouble}"

    def healthy(self, gpu: str) -> bool:
        """Return whether the GPU of that UUID may be given out."""
        return self.trouble(gpu) is None
