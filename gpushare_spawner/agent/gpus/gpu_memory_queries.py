"""Asks the driver for the memory on a GPU when the answer decides which clients may run.

That is at a process's first request, and every tenth of a second while clients run together because of what was seen of
them. Independently of this, `rounds` asks every two seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from gpushare_spawner.agent.gpus.nvml import Gpu, GpuState

log = logging.getLogger(__name__)

AT_ONCE_EVERY = 0.02
"""Seconds between two questions at least, however many processes ask for the first time."""


class Source(Protocol):
    """Source of the figures: NVML."""

    def memory(self, gpu: Gpu) -> GpuState | None:
        """Memory in use, and by which processes; None where the GPU does not answer. May block for milliseconds."""


class Interested(Protocol):
    """The arbitration of one GPU, which uses the figures."""

    @property
    def look_every(self) -> float | None:
        """Seconds in which the next figures are needed; None: they do not matter now."""


class MemoryQueries:
    """Asks for one GPU. The driver may block or hang, so one thread at a time asks it."""

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
        """A process has asked for the first time since the present question began."""
        self._closed = False

    def wanted(self) -> None:
        """Something has changed: ask repeatedly for as long as it matters."""
        every = self._interested.look_every
        if every is not None:
            self._ask_at(self._asked_at + every)

    def at_once(self) -> None:
        """A process of which nothing is known asks for a lease."""
        self._again = self._again or self._asking
        self._ask_at(self._asked_at + AT_ONCE_EVERY)

    def close(self) -> None:
        """Stop asking."""
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
                log.exception("cannot ask the driver for the memory of GPU %d", self._gpu.index)
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
