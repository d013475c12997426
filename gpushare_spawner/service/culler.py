"""The loop: reads reports, decides, announces, and steps down.

Nothing that it remembers matters: it may be killed at any moment, and the next one goes on from the agents' reports.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial

from gpushare_spawner.model.control import AgentUnreachable, AnnounceRequest, ControlRefused, TierRequest
from gpushare_spawner.model.template import Template
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.service.counters import Counters
from gpushare_spawner.service.hub import Hub, HubFailed, HubServer, HubUser
from gpushare_spawner.service.look import HubView, Looked, look, look_at
from gpushare_spawner.service.reports import Agent, NodeView, ask, ask_all
from gpushare_spawner.service.settings import CullerSettings
from gpushare_spawner.service.unshared import Verdict, judge, users_to_delete

log = logging.getLogger("gpushare.service")

Templates = Callable[[], Mapping[str, Template]]
"""The good templates as they are now, by name."""

Deed = Callable[[], Awaitable[bool]]
"""Something to be done; says whether it was."""

_SOON = 1.0
"""Seconds until the next look after a deed, and the shortest pause between two looks."""


class Culler:
    """Takes agents down one tier at a time, and stops servers through the hub.

    The hub's list of servers is asked for every third round at most: the hub itself updates last_activity only every
    few minutes. ``clock`` gives seconds since the epoch.
    """

    def __init__(
        self,
        agents: Sequence[Agent],
        hub: Hub,
        templates: Templates,
        settings: CullerSettings,
        counters: Counters | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.hub_view: HubView | None = None
        """What the hub said last; None: nothing, or it failed."""
        self.counters = counters or Counters()
        self._agents = agents
        self._hub = hub
        self._templates = templates
        self._settings = settings
        self._clock = clock
        self._hub_asked_at = float("-inf")
        self._turn = asyncio.Semaphore(max(1, settings.concurrency or 1000))
        self._said: dict[str, str] = {}

    async def run(self) -> None:
        """Rounds without end. A round that fails is logged; the next one starts from the reports again."""
        while True:
            again: float | None = None
            try:
                again = await self.round()
            except Exception:
                log.exception("A round of the idle culler failed")
                self.counters.failed("round")
            await asyncio.sleep(self._pause(again))

    async def round(self) -> float | None:
        """One look at everything, and the deeds that follow. Returns the instant to look again; None: no hurry."""
        views = await ask_all(self._agents)
        self._report_problems(views)
        await self._ask_hub()
        templates = self._templates()
        now = self._clock()
        looked = look(views, self.hub_view, templates, now, self._settings)
        done = await self._all((one.name, partial(self._act, one)) for one in looked)
        if self.hub_view is not None:
            await self._all(self._unshared(self.hub_view, views, templates, now))
            await self._all(self._users(self.hub_view, now))
        self.counters.round_done(self._clock())
        instants = [one.decision.look_again_at for one in looked if one.decision.look_again_at is not None]
        return min([*instants, now + _SOON]) if any(done) else min(instants, default=None)

    def _pause(self, again: float | None) -> float:
        longest = self._settings.cull_every
        wait = longest if again is None else again - self._clock()
        return max(min(_SOON, longest), min(wait, longest))

    async def _ask_hub(self) -> None:
        if time.monotonic() - self._hub_asked_at < 3 * self._settings.cull_every:
            return
        try:
            users = await self._hub.users(with_ready_servers=not self._settings.cull_users)
        except HubFailed as error:
            self._say("hub", f"Servers are not stopped until the hub says which there are. {error}")
            self.counters.failed("hub")
            self.hub_view = None
            return
        self._say("hub", "")
        self.hub_view = HubView(tuple(users))
        self._hub_asked_at = time.monotonic()

    async def _all(self, deeds: Iterable[tuple[str, Deed]]) -> list[bool]:
        """Does all of them, some at a time; one that fails is logged and leaves the others alone."""
        return list(await asyncio.gather(*(self._guarded(name, deed) for name, deed in deeds)))

    async def _guarded(self, name: str, deed: Deed) -> bool:
        async with self._turn:
            try:
                return await deed()
            except ControlRefused as error:
                # it went to work, or away, since the report
                expected = error.code in ("busy", "unknown-session")
                log.log(logging.INFO if expected else logging.WARNING, "%s: %s", name, error)
                if not expected:
                    self.counters.failed("agent")
            except AgentUnreachable as error:
                log.warning("%s: %s", name, error)
                self.counters.failed("agent")
            except HubFailed as error:
                log.warning("%s: %s", name, error)
                self.counters.failed("hub")
            except Exception:
                log.exception("%s: left as it is after an unexpected error", name)
                self.counters.failed("session")
            return False

    async def _act(self, one: Looked) -> bool:
        """Sees to the difference between what is and what should be. Returns whether a step was taken."""
        session, decision = one.session, one.decision
        if not session.confirmed or (one.server is not None and not one.server.settled):
            return False  # it is starting or stopping
        if decision.tier is session.tier:
            return await self._tell(one)
        if decision.tier is Tier.STOPPED:
            return await self._stop(one)
        await one.agent.tier(
            TierRequest(
                id=session.id,
                tier=decision.tier,
                effective_units=decision.units,
                reason=decision.reason,
                if_idle_since=max(0.0, decision.idle_since),
            )
        )
        log.info(
            "%s: %s, %d of %d units left. %s",
            one.name,
            decision.tier,
            decision.units,
            session.share_units,
            decision.reason,
        )
        self.counters.stepped(decision.tier)
        return True

    async def _tell(self, one: Looked) -> bool:
        told, tell = one.session.announcement, one.decision.announcement
        if tell is None:
            if told is not None:
                await one.agent.announce(AnnounceRequest(id=one.session.id, tier=None, reason=one.decision.reason))
                log.info(
                    "%s: %s at %s is taken back: %s", one.name, told.tier, _clock_time(told.at), one.decision.reason
                )
                self.counters.withdrew(told.tier)
            return False
        if told is None or (told.tier, told.at, told.effective_units) != (tell.tier, tell.at, tell.units):
            await one.agent.announce(
                AnnounceRequest(
                    id=one.session.id, tier=tell.tier, at=tell.at, effective_units=tell.units, reason=tell.reason
                )
            )
            log.info("%s: %s announced for %s", one.name, tell.tier, _clock_time(tell.at))
            self.counters.announced(tell.tier)
        return False

    async def _stop(self, one: Looked) -> bool:
        session = one.session
        # The hub's list may be a minute old, and a deletion has no guard as a tier has: look once more, at everything.
        view = await ask(one.agent)
        server = await self._hub.server(session.user, session.server)
        current = view.report.session(session.id) if view.report is not None else None
        if view.report is None or current is None or server is None or not server.settled:
            return False
        fresh = look_at(one.agent, view.report, current, server, self._templates(), self._clock(), self._settings)
        if fresh.decision.tier is not Tier.STOPPED:
            log.info("%s: not stopped after all: %s", one.name, fresh.decision.reason)
            return await self._tell(fresh) if fresh.decision.tier is current.tier else False
        await self._hub.stop(session.user, session.server, self._settings.remove_named_servers)
        log.info("%s: stopped. %s", one.name, fresh.decision.reason)
        self.counters.stepped(Tier.STOPPED)
        self._hub_asked_at = float("-inf")
        return True

    def _unshared(
        self, hub: HubView, views: Sequence[NodeView], templates: Mapping[str, Template], now: float
    ) -> Iterable[tuple[str, Deed]]:
        holders = {(s.user, s.server) for view in views if view.report is not None for s in view.report.sessions}
        everybody_answered = all(view.report is not None for view in views)
        for server in hub.servers.values():
            if (server.user, server.name) in holders:
                continue
            verdict = judge(server, templates, self._settings, now, everybody_answered)
            self._say(server.label, verdict.left_because)
            if verdict.stop_because:
                yield server.label, partial(self._stop_unshared, server, templates, now)

    async def _stop_unshared(self, listed: HubServer, templates: Mapping[str, Template], now: float) -> bool:
        server = await self._hub.server(listed.user, listed.name)  # the list may be a minute old
        verdict = judge(server, templates, self._settings, now, True) if server is not None else Verdict()
        if not verdict.stop_because:
            return False
        await self._hub.stop(listed.user, listed.name, self._settings.remove_named_servers)
        log.info("%s: stopped: %s", listed.label, verdict.stop_because)
        self.counters.stepped(Tier.STOPPED)
        self._hub_asked_at = float("-inf")
        return True

    def _users(self, hub: HubView, now: float) -> Iterable[tuple[str, Deed]]:
        if self._settings.cull_users:
            for user, reason in users_to_delete(hub, self._settings, now):
                yield user.name, partial(self._delete_user, user, reason)

    async def _delete_user(self, user: HubUser, reason: str) -> bool:
        await self._hub.delete_user(user.name)
        log.info("User %s deleted: %s", user.name, reason)
        self._hub_asked_at = float("-inf")
        return True

    def _report_problems(self, views: Sequence[NodeView]) -> None:
        for number, view in enumerate(views):
            self._say(f"agent {number}", view.problem)
            if view.problem:
                self.counters.failed("agent")

    def _say(self, about: str, text: str) -> None:
        """Logs a lasting problem once, and again when it changes."""
        if text and self._said.get(about) != text:
            log.warning("%s: %s", about, text)
        if text:
            self._said[about] = text
        else:
            self._said.pop(about, None)


def _clock_time(instant: float) -> str:
    """For logs: 14:05:00 of the machine's time."""
    return time.strftime("%H:%M:%S", time.localtime(instant))
