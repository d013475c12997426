"""Actions on spawns that wait for a GPU: cancel one, or put it at the end of the queue.

The queue is in the hub's process. The service acts through the hub: it stops the server that is starting,
and starts it again.
"""

from __future__ import annotations

from gpushare_spawner.model.spawn_note import MAX_LETTERS, SpawnNote
from gpushare_spawner.service.actions.action_log import ActionLog
from gpushare_spawner.service.actions.outcome import (
    ActionRefused,
    Actor,
    Outcome,
    RefusalCode,
    check_admin,
    hub_refused,
    refusals,
)
from gpushare_spawner.service.actions.texts import harmless
from gpushare_spawner.service.hub.client import Hub, HubFailed, HubServer
from gpushare_spawner.service.hub.server_notes import ServerNotes
from gpushare_spawner.wording.controls import session_controls as words

CANCEL, REQUEUE = "cancel", "requeue"
"""What the history calls these actions."""
PATIENCE = 30.0
"""Seconds that a spawn has to end."""


class SpawnActions:
    """Each method raises ActionRefused."""

    def __init__(self, hub: Hub, log: ActionLog, patience: float = PATIENCE) -> None:
        self._hub = hub
        self._log = log
        self._patience = patience
        self._notes = ServerNotes(hub, patience)

    async def cancel(self, user: str, name: str, actor: Actor, why: str = "") -> Outcome:
        """End a spawn. ``name``: of the server. ``why``: what its user reads, if another one does it."""
        if not actor.is_admin and actor.name != user:
            raise ActionRefused(words.NOT_YOURS, RefusalCode.FORBIDDEN)
        with refusals():
            server = await self._waiting(user, name)
            if server is None:
                return Outcome(False, words.NOT_STARTING)
            await self._hub.stop(user, name)
        reason = words.cancelled_by(actor.name, harmless(why))
        self._log.server(server, CANCEL, actor.name, reason=reason)
        if actor.name != user:
            await self._notes.cancelled(server, reason)
        return Outcome(True, words.CANCELLED)

    async def requeue(self, user: str, name: str, actor: Actor, why: str = "") -> Outcome:
        """Put a spawn at the end of the queue. For admins. ``why``: what its user reads."""
        check_admin(actor)
        with refusals():
            server = await self._waiting(user, name)
            if server is None:
                raise ActionRefused(words.NOT_STARTING, RefusalCode.UNKNOWN_SESSION)
            await self._hub.stop(user, name)
            if not await self._hub.stopped(user, name, self._patience):
                raise ActionRefused(words.STOP_TAKES_LONG, RefusalCode.HUB_UNAVAILABLE)
        reason = words.requeued_by(actor.name, harmless(why))
        try:
            await self._hub.start(user, name, SpawnNote(text=reason[:MAX_LETTERS]).within(server.options))
        except HubFailed as error:
            self._log.server(server, CANCEL, actor.name, reason=f"{reason} {error.to_users}")
            raise hub_refused(error, words.not_queued_again) from error
        self._log.server(server, REQUEUE, actor.name, reason=reason)
        return Outcome(True, words.REQUEUED)

    async def _waiting(self, user: str, name: str) -> HubServer | None:
        """Return the server if it is starting; None: it is not."""
        server = await self._hub.server(user, name)
        if server is not None and server.ready and not server.pending:
            raise ActionRefused(words.RUNS_ALREADY, RefusalCode.BUSY)
        return server if server is not None and server.pending == "spawn" else None
