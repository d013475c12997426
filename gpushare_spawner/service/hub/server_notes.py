"""Tells users on the hub's pages why their spawn was cancelled, or their server stopped.

The hub has no route for that: the spawner gets the note with a spawn that it refuses. A user whom no note reaches has
the history's line.
"""

from __future__ import annotations

import asyncio
import logging

from gpushare_spawner.model.spawn_note import MAX_LETTERS, SpawnNote
from gpushare_spawner.service.hub.client import Hub, HubFailed, HubServer
from gpushare_spawner.wording import notices

log = logging.getLogger("gpushare.service.hub")

PATIENCE = 60.0
"""Seconds that a server has to stop, as the hub's own setting `slow_stop_timeout` and `poll_interval` together."""
AT_A_TIME = 8
"""Servers that are waited for at a time. Ours: each asks the hub twice a second, and a node's drain stops many."""


class ServerNotes:
    """``patience``: seconds that a server has to stop."""

    def __init__(self, hub: Hub, patience: float = PATIENCE) -> None:
        self._hub = hub
        self._patience = patience
        self._slots = asyncio.Semaphore(AT_A_TIME)
        self._under_way: set[asyncio.Task[None]] = set()

    def stopped(self, server: HubServer, why: str, at: float) -> None:
        """Have the hub's pages say why a server was stopped, as soon as it has. ``at``: seconds since the epoch."""
        note = SpawnNote(text=notices.note(why, at)[:MAX_LETTERS], stopped=True)
        task = asyncio.create_task(self._in_turn(server, note))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def cancelled(self, server: HubServer, why: str) -> None:
        """Have the hub's page of a cancelled spawn say why."""
        await self._leave(server, SpawnNote(text=why[:MAX_LETTERS], cancelled=True))

    async def _in_turn(self, server: HubServer, note: SpawnNote) -> None:
        async with self._slots:
            try:
                await self._leave(server, note)
            except Exception:
                log.exception("The hub's pages do not say why the server of %s was stopped", server.label)

    async def _leave(self, server: HubServer, note: SpawnNote) -> None:
        try:
            if await self._hub.stopped(server.user, server.name, self._patience):
                await self._hub.start(server.user, server.name, note.within(server.options))
        except HubFailed as error:
            # also the refusal that is asked for
            log.debug("The note on the server of %s: %s", server.label, error)
