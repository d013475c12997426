"""Idle actions through the hub: stop a server, delete a user.

The hub's API cannot refuse a deletion because of activity, as an agent can, and the hub's list can be a minute old.
So each method checks again just before the deletion. A deletion that fails is not repeated but decided anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from gpushare_spawner.model.template import Template
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.service.counters import Counters
from gpushare_spawner.service.culler.decisions import SessionDecision, decide_session
from gpushare_spawner.service.culler.gpu_actions import update_notice
from gpushare_spawner.service.culler.idle_action_log import IdleActionLog
from gpushare_spawner.service.culler.servers_without_share import judge
from gpushare_spawner.service.culler.settings import CullerSettings
from gpushare_spawner.service.hub.client import Hub, HubServer, HubUser
from gpushare_spawner.service.hub.server_notes import ServerNotes
from gpushare_spawner.service.reports import ask
from gpushare_spawner.wording import stops
from gpushare_spawner.wording.idle_decisions import decided

log = logging.getLogger("gpushare.service")

FRESH_SECONDS = 5.0
"""A server is stopped on a report that is at most this old: later activity is not in the report."""

Templates = Callable[[], Mapping[str, Template]]
"""Returns the valid templates by name."""


class HubActions:
    """Each method returns whether it changed something. Raises HubFailed and the agent's errors."""

    def __init__(
        self,
        hub: Hub,
        templates: Templates,
        settings: CullerSettings,
        counters: Counters,
        actions: IdleActionLog,
        clock: Callable[[], float],
    ) -> None:
        self._hub = hub
        self._templates = templates
        self._settings = settings
        self._counters = counters
        self._actions = actions
        self._clock = clock
        self._notes = ServerNotes(hub)
        self.awaiting_reports = False
        """Whether a stop waits for the agent's next report."""

    async def stop_session(self, one: SessionDecision) -> bool:
        """Stop the server of a session, if that is still due."""
        session = one.session
        if self._too_old(one.agent.report_age()):
            return False
        server = await self._hub.server(session.user, session.server)
        snapshot = await ask(one.agent)
        current = snapshot.report.session(session.id) if snapshot.report is not None else None
        if snapshot.report is None or current is None or server is None or not server.settled:
            return False
        if self._too_old(snapshot.age):
            return False
        templates, now = self._templates(), self._clock()
        fresh = decide_session(one.agent, snapshot.report, current, server, templates, now, self._settings, one.claim)
        if fresh.decision.tier is current.tier:
            log.info("%s: not stopped: %s", one.name, decided(fresh.decision, current.share))
            return await update_notice(fresh, self._counters)
        if fresh.decision.tier is not Tier.STOPPED or fresh.dry_run:
            return False
        await self._stop(server, stops.by_culler(fresh.decision))
        self._actions.stopped_session(fresh, decided(fresh.decision, current.share))
        return True

    def _too_old(self, age: float) -> bool:
        self.awaiting_reports = self.awaiting_reports or age > FRESH_SECONDS
        return age > FRESH_SECONDS

    async def stop_unshared(self, listed: HubServer) -> bool:
        """Stop a server without a share, if that is still due."""
        server = await self._hub.server(listed.user, listed.name)
        if server is None:
            return False
        verdict = judge(server, self._templates(), self._settings, self._clock(), agents_answered=True)
        if not verdict.stop_because:
            return False
        await self._stop(server, stops.overdue(verdict.stop_because))
        self._actions.stopped_server(server, verdict.stop_because)
        return True

    async def delete_user(self, user: HubUser, reason: str) -> bool:
        """Delete a user who has no servers."""
        await self._hub.delete_user(user.name)
        log.info("User %s deleted: %s", user.name, reason)
        return True

    async def _stop(self, server: HubServer, why: str) -> None:
        """``why``: what the hub's pages say, in sentences."""
        removed = bool(server.name) and self._settings.remove_named_servers
        await self._hub.stop(server.user, server.name, removed)
        self._counters.acted(Tier.STOPPED)
        if not removed:
            self._notes.stopped(server, why, self._clock())
