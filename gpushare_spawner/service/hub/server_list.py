"""The hub's list of users and servers, read in the background: a hub that hangs delays no downgrade or release."""

from __future__ import annotations

import logging
import time

from gpushare_spawner.service.counters import Counters
from gpushare_spawner.service.culler.decisions import HubSnapshot
from gpushare_spawner.service.hub.background_request import BackgroundRequest
from gpushare_spawner.service.hub.client import Hub, HubFailed

log = logging.getLogger("gpushare.service")


class HubWatch:
    """Keeps the hub's list at most ``max_age`` seconds old while the hub answers."""

    def __init__(self, hub: Hub, max_age: float, everybody: bool, counters: Counters) -> None:
        self.snapshot: HubSnapshot | None = None
        """The hub's last answer; None: no answer yet, or a failure since."""
        self._hub = hub
        self._max_age = max_age
        self._everybody = everybody
        self._counters = counters
        self._asked_at = float("-inf")
        self._request = BackgroundRequest(self._ask)
        self._problem = ""

    def outdated(self) -> None:
        """Mark the list as old, after a server was stopped: the next `refresh` asks again."""
        self._asked_at = float("-inf")

    def clock_was_set(self, by: float) -> None:
        """Move the instants of the hub's last answer by a step of the clock."""
        if self.snapshot is not None:
            users = (user.with_instants(lambda instant: instant + by) for user in self.snapshot.users)
            self.snapshot = HubSnapshot(tuple(users))

    async def refresh(self, patience: float) -> None:
        """Ask if the list is old, and wait ``patience`` seconds for the answer. A later answer counts next time."""
        await self._request.refresh(time.monotonic() - self._asked_at >= self._max_age, patience)

    def close(self) -> None:
        """Cancel a request that runs."""
        self._request.close()

    async def _ask(self) -> None:
        began = time.monotonic()
        try:
            users = await self._hub.users(with_ready_servers=not self._everybody)
        except HubFailed as error:
            problem = f"No server is stopped until the hub lists its servers again. {error}"
            if problem != self._problem:
                log.warning("%s", problem)
            self.snapshot, self._problem = None, problem
            self._counters.failed("hub")
        else:
            self.snapshot, self._problem, self._asked_at = HubSnapshot(tuple(users)), "", began
