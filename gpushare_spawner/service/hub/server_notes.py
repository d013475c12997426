"""Notes on the hub's pages: why a spawn was cancelled, or a server was stopped.

The hub has no route for that: the spawner gets the note with a spawn that it refuses. If a note fails, the history
still has the action.
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
"""Servers that are awaited at a time. Ours: each costs two requests per second, and a node's drain stops many."""


class ServerNotes:
    """Notes for the hub's pages. ``patience``: seconds that a server has to stop."""

    def __init__(self, hub: Hub, patience: float = PATIENCE) -> None:
        self._hub = hub
        self._patience = patience
        self._slots = asyncio.Semaphore(AT_A_TIME)
        self._under_way: set[asyncio.Task[None]] = set()

    def stopped(self, server: HubServer, why: str, at: float) -> None:
        """Show on the hub's pages why a server was stopped, after its stop. ``at``: seconds since the epoch."""
        note = SpawnNote(text=notices.note(why, at)[:MAX_LETTERS], stopped=True)
        task = asyncio.create_task(self._in_turn(server, note))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def cancelled(self, server: HubServer, why: str) -> None:
        """Show on the hub's page why a spawn was cancelled."""
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
            # also the spawner's refusal, which is expected
            log.debug("The note on the server of %s: %s", server.label, error)
