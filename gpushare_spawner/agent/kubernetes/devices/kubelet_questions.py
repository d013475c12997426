"""When the kubelet is asked who holds which devices: now and then, and soon where something changed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

ASK_EVERY = 30.0
"""Seconds between reads of the device assignments while nothing changes."""
SOON = 0.1
"""Seconds until the kubelet is asked whose a new grant is; twice as long with every try, up to `NOT_SO_SOON`."""
NOT_SO_SOON = 2.0


class KubeletQuestions:
    """Asks, one question after the other: an older answer is not to be dealt with after a newer one."""

    def __init__(self, ask: Callable[[], Awaitable[None]], settled: Callable[[], bool]) -> None:
        """`ask` asks once, and deals with the answer. `settled`: nothing waits for another answer."""
        self._ask = ask
        self._settled = settled
        self._due = asyncio.Event()
        self._asking = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def soon(self) -> None:
        """Ask soon, and again until everything is settled."""
        self._due.set()

    async def once(self) -> None:
        """Ask now."""
        async with self._asking:
            await self._ask()

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._keep_asking())

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep_asking(self) -> None:
        while True:
            pause = SOON
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_EVERY):
                    await self._due.wait()
            self._due.clear()
            while True:
                await asyncio.sleep(pause)
                try:
                    await self.once()
                except Exception:
                    log.exception("cannot process the kubelet's device assignments; retrying")
                if self._settled():
                    break
                pause = SOON if self._due.is_set() else min(2 * pause, NOT_SO_SOON)
                self._due.clear()
