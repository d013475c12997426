"""What is on a GPU, asked of the driver when it decides who may run: at a process's first request, and every tenth of a
second while clients work together by what was seen of them. Rounds ask anyway, every two seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from gpushare_spawner.agent.gpus import Gpu, GpuState

log = logging.getLogger(__name__)

AT_ONCE_EVERY = 0.02
"""Seconds at least between two looks, however many processes ask for the first time."""


class Source(Protocol):
    """Where figures come from: NVML."""

    def memory(self, gpu: Gpu) -> GpuState | None:
        """What is in use and by which processes; None where the GPU does not answer. May block for milliseconds."""


class Interested(Protocol):
    """What the looks are for: one GPU's arbitration."""

    @property
    def look_every(self) -> float | None:
        """Seconds in which the next look is needed; None: it does not matter now."""


class MemoryLooks:
    """Looks at one GPU. The driver may block or hang: it is asked in a thread, once at a time."""

    def __init__(
        self, gpu: Gpu, source: Source, interested: Interested, seen: Callable[[Mapping[str, GpuState]], None]
    ) -> None:
        """`seen` is called on the event loop with each answer, by the GPU's UUID."""
        self._gpu = gpu
        self._source = source
        self._interested = interested
        self._seen = seen
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._asked_at = 0.0
        self._asking = False
        self._again = False
        """A process has asked for the first time since the present question was put."""
        self._closed = False

    def wanted(self) -> None:
        """Something has changed: look every so often, for as long as it matters."""
        every = self._interested.look_every
        if every is not None:
            self._ask_at(self._asked_at + every)

    def at_once(self) -> None:
        """A process of which nothing is known asks for a lease."""
        self._again = self._again or self._asking
        self._ask_at(self._asked_at + AT_ONCE_EVERY)

    def close(self) -> None:
        """Look no more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _ask_at(self, due: float) -> None:
        if self._asking or self._closed or (self._timer is not None and self._due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = self._loop.call_at(due, self._ask)

    def _ask(self) -> None:
        self._timer, self._asking, self._again = None, True, False
        self._asked_at = self._loop.time()

        def ask() -> None:
            try:
                found = self._source.memory(self._gpu)
            except Exception:
                log.exception("the driver could not be asked for the memory of GPU %d", self._gpu.index)
                found = None
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._answered, found)

        threading.Thread(target=ask, name="memory", daemon=True).start()

    def _answered(self, found: GpuState | None) -> None:
        self._asking = False
        if self._closed:
            return
        if found is not None:
            self._seen({self._gpu.uuid: found})
        if self._again:
            self.at_once()
        self.wanted()
