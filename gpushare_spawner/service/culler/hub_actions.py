"""Idle actions through the hub: stop a server, delete a user.

A deletion has no guard as an agent's tier has, and the hub's list may be a minute old: everything is looked at once
more just before, and a deletion that the hub turns away is not repeated but decided anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from gpushare_spawner.model.template import Template
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.service.counters import Counters
from gpushare_spawner.service.culler.decisions import Looked, look_at
from gpushare_spawner.service.culler.gpu_actions import tell
from gpushare_spawner.service.culler.servers_without_share import judge
from gpushare_spawner.service.culler.settings import CullerSettings
from gpushare_spawner.service.hub.client import Hub, HubServer, HubUser
from gpushare_spawner.service.reports import ask
from gpushare_spawner.wording.idle_actions import decided

log = logging.getLogger("gpushare.service")

FRESH_SECONDS = 5.0
"""A server is stopped on a report that is no older: what its kernels and its GPU did since is not in it."""

Templates = Callable[[], Mapping[str, Template]]
"""The good templates as they are now, by name."""


class HubActions:
    """Each method returns whether it was done; HubFailed and the agent's errors pass through."""

    def __init__(
        self, hub: Hub, templates: Templates, settings: CullerSettings, counters: Counters, clock: Callable[[], float]
    ) -> None:
        self._hub = hub
        self._templates = templates
        self._settings = settings
        self._counters = counters
        self._clock = clock
        self.awaiting_reports = False
        """Whether a stop was put off until the agent publishes its next report."""

    async def stop_session(self, one: Looked) -> bool:
        """Stop the server of a session, if that is still right."""
        session = one.session
        if self._too_old(one.agent.report_age()):
            return False
        server = await self._hub.server(session.user, session.server)
        view = await ask(one.agent)
        current = view.report.session(session.id) if view.report is not None else None
        if view.report is None or current is None or server is None or not server.settled:
            return False
        if self._too_old(view.age):
            return False
        fresh = look_at(one.agent, view.report, current, server, self._templates(), self._clock(), self._settings)
        if fresh.decision.tier is current.tier:
            log.info("%s: not stopped after all: %s", one.name, decided(fresh.decision, current.share))
            return await tell(fresh, self._counters)
        if fresh.decision.tier is not Tier.STOPPED:
            return False
        return await self._stop(server, decided(fresh.decision, current.share))

    def _too_old(self, age: float) -> bool:
        self.awaiting_reports = self.awaiting_reports or age > FRESH_SECONDS
        return age > FRESH_SECONDS

    async def stop_unshared(self, listed: HubServer) -> bool:
        """Stop a server without a share, if that is still right."""
        server = await self._hub.server(listed.user, listed.name)
        if server is None:
            return False
        verdict = judge(server, self._templates(), self._settings, self._clock(), agents_answered=True)
        return bool(verdict.stop_because) and await self._stop(server, verdict.stop_because)

    async def delete_user(self, user: HubUser, reason: str) -> bool:
        """Delete a user who has no servers."""
        await self._hub.delete_user(user.name)
        log.info("User %s deleted: %s", user.name, reason)
        return True

    async def _stop(self, server: HubServer, reason: str) -> bool:
        await self._hub.stop(server.user, server.name, self._settings.remove_named_servers)
        log.info("%s: stopped: %s", server.label, reason)
        self._counters.stepped(Tier.STOPPED)
        return True
