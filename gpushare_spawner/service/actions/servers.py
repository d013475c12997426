"""Actions on a session's server through the hub: stop."""

from __future__ import annotations

from gpushare_spawner.model.tier import Tier
from gpushare_spawner.service.actions.action_log import ActionLog
from gpushare_spawner.service.actions.outcome import Actor, First, Outcome, Target, check_own, nothing_first, refusals
from gpushare_spawner.service.hub.client import Hub
from gpushare_spawner.service.hub.server_notes import ServerNotes
from gpushare_spawner.wording.controls import session_controls as words


class ServerActions:
    """Each method raises ActionRefused."""

    def __init__(self, hub: Hub, log: ActionLog) -> None:
        self._hub = hub
        self._log = log
        self._notes = ServerNotes(hub)

    async def stop(self, one: Target, actor: Actor, why: str = "", first: First = nothing_first) -> Outcome:
        """Stop the server of a session. A named server stays in its user's list. ``why``: what the actor says of it;
        the hub's pages say it if the server's user does not act. ``first`` is awaited when nothing stands in the way.
        """
        check_own(one, actor)
        session = one.session
        with refusals():
            server = await self._hub.server(session.user, session.server)
            if server is None or not (server.ready or server.pending):
                return Outcome(False, words.NOT_RUNNING)
            if server.pending == "stop":
                return Outcome(False, words.STOPS_ALREADY)
            await first()
            await self._hub.stop(session.user, session.server)
        reason = words.stopped_by(actor.name, why)
        at = self._log.session(session, one.node, Tier.STOPPED, actor.name, units=0, reason=reason)
        if actor.name != session.user:
            self._notes.stopped(server, reason, at)
        return Outcome(True, words.STOPS)
