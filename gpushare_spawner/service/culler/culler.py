"""The loop: reads reports, decides, notifies users, and carries out idle actions.

Nothing that it remembers matters: it may be killed at any moment, and the next one goes on from the agents' reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from gpushare_spawner.model.control import AgentUnreachable, ControlRefused
from gpushare_spawner.model.template import Template
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.service.counters import Counters
from gpushare_spawner.service.culler.decisions import HubView, Looked, look
from gpushare_spawner.service.culler.gpu_actions import step_down, tell
from gpushare_spawner.service.culler.hub_actions import HubActions, Templates
from gpushare_spawner.service.culler.servers_without_share import Verdict, judge, users_to_delete
from gpushare_spawner.service.culler.settings import CullerSettings
from gpushare_spawner.service.hub.client import Hub, HubFailed, HubServer
from gpushare_spawner.service.hub.server_list import HubWatch
from gpushare_spawner.service.reports import Agent, NodeView, ask_all

log = logging.getLogger("gpushare.service")

Action = Callable[[], Awaitable[bool]]
"""Something to be done; says whether it was."""

_SOON = 1.0
"""Seconds until the next look after a action, and the shortest pause between two looks."""


class Culler:
    """Takes sessions down one tier at a time, and stops servers through the hub.

    The hub's list of servers is asked for every third round at most: the hub itself updates last_activity only every
    few minutes. What the hub does slowly (``patience`` seconds and more) goes on beside the rounds. ``agents`` is
    iterated over in every round, as nodes of a cluster come and go. ``clock`` gives seconds since the epoch.
    """

    def __init__(
        self,
        agents: Iterable[Agent],
        hub: Hub,
        templates: Templates,
        settings: CullerSettings,
        clock: Callable[[], float] = time.time,
        patience: float = 2.0,
    ) -> None:
        self.counters = Counters()
        self._agents = agents
        self._templates = templates
        self._settings = settings
        self._clock = clock
        self._patience = patience
        self._hub = HubWatch(hub, 3 * settings.cull_every, settings.cull_users, self.counters)
        self._hub_actions = HubActions(hub, templates, settings, self.counters, clock)
        self._under_way: dict[str, asyncio.Task[bool]] = {}
        self._turn = asyncio.Semaphore(settings.concurrency or 1000)
        self._said: dict[str, str] = {}
        self._woken = asyncio.Event()

    @property
    def hub_view(self) -> HubView | None:
        """What the hub said last; None: nothing, or it failed since."""
        return self._hub.view

    def reports_changed(self) -> None:
        """New reports have come; look at once where a stop waits for them."""
        if self._hub_actions.awaiting_reports:
            self._woken.set()

    async def run(self) -> None:
        """Rounds without end. A round that fails is logged; the next one starts from the reports again."""
        try:
            while True:
                again: float | None = None
                try:
                    again = await self.round()
                except Exception:
                    log.exception("A round of the idle culler failed")
                    self.counters.failed("round")
                await self._rest(self._pause(again))
        finally:
            self._hub.close()
            for task in self._under_way.values():
                task.cancel()

    async def round(self) -> float | None:
        """Look at everything once and carry out the actions that are due.

        Returns the instant to look again; None: no hurry.
        """
        self._hub_actions.awaiting_reports = False
        views = await ask_all(self._agents)
        await self._hub.refresh(self._patience)
        templates, now = self._templates(), self._clock()
        looked = look(views, self.hub_view, templates, now, self._settings)
        done = await asyncio.gather(
            *(self._guarded(one.name, action) for one in looked if (action := self._gpu_action(one)))
        )
        stopped = await self._at_the_hub(dict(self._due_hub_actions(looked, views, templates, now)))
        self._say_once(dict(self._lasting_problems(views, templates, now)))
        self.counters.failures["agent"] += sum(view.report is None for view in views)
        self.counters.round_done(self._clock())
        instants = [one.decision.look_again_at for one in looked if one.decision.look_again_at is not None]
        return min([*instants, now + _SOON]) if any(done) or stopped else min(instants, default=None)

    async def _rest(self, seconds: float) -> None:
        """Until it is time, or there is news; never less than the shortest pause."""
        shortest = min(_SOON, seconds)
        await asyncio.sleep(shortest)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds - shortest):
                await self._woken.wait()
        self._woken.clear()

    def _pause(self, again: float | None) -> float:
        longest = self._settings.cull_every
        wait = longest if again is None else again - self._clock()
        return max(min(_SOON, longest), min(wait, longest))

    def _gpu_action(self, one: Looked) -> Action | None:
        """What the agent is to do for a session; None: nothing, it is starting or stopping."""
        if _in_between(one) or one.decision.tier is Tier.STOPPED:
            return None
        return partial(tell if one.decision.tier is one.session.tier else step_down, one, self.counters)

    def _due_hub_actions(
        self, looked: Sequence[Looked], views: Sequence[NodeView], templates: Mapping[str, Template], now: float
    ) -> Iterator[tuple[str, Action]]:
        """What the hub is to do, each under a name of its own."""
        for one in looked:
            if one.decision.tier is Tier.STOPPED and not _in_between(one):
                yield f"server {one.name}", partial(self._hub_actions.stop_session, one)
        for server, verdict in self._judged(views, templates, now):
            if verdict.stop_because:
                yield f"server {server.label}", partial(self._hub_actions.stop_unshared, server)
        if self._settings.cull_users and self.hub_view is not None:
            for user, reason in users_to_delete(self.hub_view, self._settings, now):
                yield f"user {user.name}", partial(self._hub_actions.delete_user, user, reason)

    def _judged(
        self, views: Sequence[NodeView], templates: Mapping[str, Template], now: float
    ) -> Iterator[tuple[HubServer, Verdict]]:
        """The servers that no report names."""
        holders = {(s.user, s.server) for view in views if view.report is not None for s in view.report.sessions}
        everybody_answered = all(view.report is not None for view in views)
        for key, server in (self.hub_view.servers if self.hub_view is not None else {}).items():
            if key not in holders:
                yield server, judge(server, templates, self._settings, now, everybody_answered)

    async def _at_the_hub(self, actions: Mapping[str, Action]) -> bool:
        """Begins what is not under way yet, and waits a little. Returns whether something was done."""
        for name, action in actions.items():
            if name not in self._under_way:
                self._under_way[name] = asyncio.create_task(self._guarded(name, action))
        if self._under_way:
            await asyncio.wait(self._under_way.values(), timeout=self._patience)
        ended = {name: task.result() for name, task in self._under_way.items() if task.done()}
        for name in ended:
            del self._under_way[name]
        if any(ended.values()):
            self._hub.outdated()
        return any(ended.values())

    async def _guarded(self, name: str, action: Action) -> bool:
        """One that fails is logged and leaves the others alone."""
        async with self._turn:
            try:
                return await action()
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

    def _lasting_problems(
        self, views: Sequence[NodeView], templates: Mapping[str, Template], now: float
    ) -> Iterator[tuple[str, str]]:
        for number, view in enumerate(views):
            if view.problem:
                yield f"agent {number}", view.problem
        for server, verdict in self._judged(views, templates, now):
            if verdict.left_because:
                yield server.label, verdict.left_because

    def _say_once(self, problems: dict[str, str]) -> None:
        """Logs a lasting problem when it appears or changes, not in every round."""
        for about, text in problems.items():
            if self._said.get(about) != text:
                log.warning("%s: %s", about, text)
        self._said = problems


def _in_between(one: Looked) -> bool:
    """It is starting or stopping."""
    return not one.session.confirmed or (one.server is not None and not one.server.settled)
