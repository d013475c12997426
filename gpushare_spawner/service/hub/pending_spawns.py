"""The hub's servers that are being started. Asked only while a page shows them, or sessions are over quota."""

from __future__ import annotations

import logging
import math
import time

from gpushare_spawner.service.hub.background_request import BackgroundRequest
from gpushare_spawner.service.hub.client import Hub, HubFailed, HubServer

log = logging.getLogger("gpushare.service")

SHARE_OF_TIME = 20.0
"""The next request comes after this many times the time that the last one took: a list of thousands of servers keeps
the hub busy, and open dashboards must not."""
RECENT = 30.0
"""Seconds. Ours: half of the shortest notice period that is usual, so that nobody makes way for a spawn that has
ended."""
LONGEST_PAUSE = 60.0
"""Seconds. Ours: after a minute a page may cost a slow hub one more request, and an older queue is shown to nobody."""


class PendingSpawns:
    """The spawns that are pending, at most ``max_age`` seconds old, or older where the hub's answers take long."""

    def __init__(self, hub: Hub, max_age: float = 4.0, patience: float = 1.0) -> None:
        """``patience``: seconds that a page waits for an answer; a later answer is on the next page."""
        self._hub = hub
        self._max_age = max_age
        self._patience = patience
        self._known: tuple[HubServer, ...] | None = None
        self._known_at = self._next_at = -math.inf
        self._request = BackgroundRequest(self._ask)
        self._problem = ""

    async def now(self) -> tuple[HubServer, ...] | None:
        """Return the servers that are being started, the longest first; None: the hub has not said."""
        await self._request.refresh(time.monotonic() >= self._next_at, self._patience)
        return self.known(2 * LONGEST_PAUSE)

    async def recent(self) -> tuple[HubServer, ...] | None:
        """Return the same, but None where it is older than an idle action may be based on."""
        await self.now()
        return self.known(RECENT)

    def known(self, max_age: float) -> tuple[HubServer, ...] | None:
        """Return the last answer if it is at most ``max_age`` seconds old."""
        return self._known if time.monotonic() - self._known_at <= max_age else None

    def close(self) -> None:
        """Cancel a request that runs."""
        self._request.close()

    async def _ask(self) -> None:
        began = time.monotonic()
        try:
            found = await self._hub.pending_spawns()
        except HubFailed as error:
            if str(error) != self._problem:
                log.warning("The dashboard shows no queue until the hub lists its servers again. %s", error)
            self._known, self._problem = None, str(error)
            took = 0.0  # the time went by in pauses between tries
        else:
            # the hub says when a spawn started only once its hooks have run: such a spawn is the newest
            self._known = tuple(
                sorted(found, key=lambda server: math.inf if server.started is None else server.started)
            )
            self._problem, took = "", time.monotonic() - began
        self._known_at = time.monotonic()
        self._next_at = self._known_at + min(LONGEST_PAUSE, max(self._max_age, SHARE_OF_TIME * took))
