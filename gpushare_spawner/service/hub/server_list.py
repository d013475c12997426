"""What the hub says of its servers, asked for in the background: a hub that hangs holds up no GPU step."""

from __future__ import annotations

import asyncio
import logging
import time

from gpushare_spawner.service.counters import Counters
from gpushare_spawner.service.culler.decisions import HubView
from gpushare_spawner.service.hub.client import Hub, HubFailed

log = logging.getLogger("gpushare.service")


class HubWatch:
    """The hub's list of users and servers, at most ``max_age`` seconds old where the hub answers."""

    def __init__(self, hub: Hub, max_age: float, everybody: bool, counters: Counters) -> None:
        self.view: HubView | None = None
        """What the hub said last; None: nothing yet, or it failed since."""
        self._hub = hub
        self._max_age = max_age
        self._everybody = everybody
        self._counters = counters
        self._asked_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._problem = ""

    def outdated(self) -> None:
        """Something was stopped: ask again next time."""
        self._asked_at = float("-inf")

    async def refresh(self, patience: float) -> None:
        """Ask if the list is old, and wait ``patience`` seconds for the answer; a later one counts next time."""
        if self._asking is None and time.monotonic() - self._asked_at >= self._max_age:
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=patience)
            if self._asking.done():
                asking, self._asking = self._asking, None
                asking.result()

    def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()

    async def _ask(self) -> None:
        began = time.monotonic()
        try:
            users = await self._hub.users(with_ready_servers=not self._everybody)
        except HubFailed as error:
            problem = f"Servers are not stopped until the hub says which there are. {error}"
            if problem != self._problem:
                log.warning("%s", problem)
            self.view, self._problem = None, problem
            self._counters.failed("hub")
        else:
            self.view, self._problem, self._asked_at = HubView(tuple(users)), "", began
