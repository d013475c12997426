"""The idle culler's loop: reads reports, decides, notifies users, and carries out idle actions.

The loop has no essential state: a service that is killed at any moment continues from the agents' reports.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from gpushare_spawner.background import set_within
from gpushare_spawner.model.control import AgentUnreachable, ControlRefused
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.report import Report, SessionReport, doubled_gpus
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions.context import ActionContext, ActionRefused
from gpushare_spawner.service.actions.keeps import clean_up, needs_cleanup
from gpushare_spawner.service.actions.share import YIELD_SECONDS
from gpushare_spawner.service.culler.actions import (
    HubActions,
    ServerVerdict,
    dry_run_action,
    go_on_yielding,
    judge,
    stop_yielding,
    take_gpu_action,
    update_notice,
    users_to_delete,
)
from gpushare_spawner.service.culler.bypassing import BypassNotices
from gpushare_spawner.service.culler.decisions import (
    CullerSettings,
    CullerState,
    HubWatch,
    SessionDecision,
    add_use,
    decide_sessions,
    servers_of,
)
from gpushare_spawner.service.culler.drained import Drains
from gpushare_spawner.service.culler.pressure import (
    NO_PRESSURE,
    Pressure,
    candidates,
    may_matter,
    needed,
    pressure,
    within_budget,
    without_budget,
)
from gpushare_spawner.service.hub.client import HubFailed, HubServer, HubUser
from gpushare_spawner.service.reports import Agent, NodeSnapshot, answered, ask_all
from gpushare_spawner.service.waiting import (
    PendingServers,
    QueueProgressOf,
    pending_unknown,
    progress_unknown,
    quota_use,
    waiting_spawns,
)
from gpushare_spawner.wording.amounts import doubled_gpu
from gpushare_spawner.wording.idle_decisions import kept_by_short_work

log = logging.getLogger("gpushare.service")

Action = Callable[[], Awaitable[bool]]
"""An action, which returns whether it changed something."""

AT_ONCE = 10
"""Maximum concurrent idle actions. Our choice: the number of concurrent requests to the hub (`hub.client.Hub`)."""
_SOON = 1.0
"""Seconds until the round after an action, and the minimum pause between rounds."""


class Culler:
    """The idle culler: downgrades and releases sessions, one tier at a time, and stops servers through the hub.

    The culler requests the hub's list of servers in at most every third round, because the hub updates last_activity
    only every few minutes. A request to the hub that takes longer than ``patience`` seconds continues in the
    background.
    """

    def __init__(
        self,
        context: ActionContext,
        settings: CullerSettings,
        patience: float = 2.0,
        pending: PendingServers = pending_unknown,
        notify: Callable[[Sequence[SessionDecision]], None] = lambda decisions: None,
        progress: QueueProgressOf = progress_unknown,
        used_up: Callable[[Sequence[SessionReport]], Mapping[str, float] | None] = lambda sessions: {},
    ) -> None:
        """Create the culler, which does nothing until `run`.

        ``pending`` returns the servers that the hub is starting, longest wait first; None: unknown, or too old for an
        idle action. ``notify`` sends messages to users with a closed tab. ``progress`` returns what the hub shows to
        the users of waiting spawns. ``used_up`` returns the sessions with a used-up budget, by id, and since when;
        None: unknown.
        """
        self.counters = context.counters
        self._context = context
        self._settings = settings
        self._patience = patience
        self._hub = HubWatch(context.hub, 3 * settings.cull_every, settings.cull_users, self.counters)
        self._hub_actions = HubActions(context, settings)
        self._notify = notify
        self._drains = Drains(context)
        self._bypasses = BypassNotices(context)
        self._under_way: dict[str, asyncio.Task[bool]] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._logged_problems: dict[str, str] = {}
        self._last: dict[Agent, Report] = {}
        self._pending = pending
        self._progress = progress
        self._used_up = used_up
        self.state = CullerState()
        self._logged_dry_run: set[str] = set()
        self._kept_since: dict[str, float] = {}
        """Time of the last request to an agent to reserve yielded units, by session id."""
        self._refused: dict[str, str] = {}
        """An agent's last refusal as logged, by the session's name."""
        self._woken = asyncio.Event()

    @property
    def hub_users(self) -> Sequence[HubUser] | None:
        """The users in the hub's last answer; None before the first answer and after a failure."""
        return self._hub.users

    def clock_was_set(self, by: float) -> None:
        """Adjust instants after a step of the clock, so that idle times do not change. Agents do the same."""
        log.warning("The clock was set by %+.0f s; idle times are unchanged", by)
        self._hub.clock_was_set(by)
        self._drains.clock_was_set(by)
        self._bypasses.clock_was_set(by)

    def decide(
        self, snapshots: Sequence[NodeSnapshot], templates: Mapping[str, Template], now: float
    ) -> list[SessionDecision]:
        """Decide on the sessions of all agents that answered, by the hub's last list and the last pressure."""
        return decide_sessions(snapshots, self.hub_users, templates, now, self._settings, self.state)

    def reports_changed(self) -> None:
        """Start the next round immediately if a stop waits for new reports."""
        if self._hub_actions.awaiting_reports:
            self._woken.set()

    def session_changed(self) -> None:
        """Start the next round soon after an action on a session."""
        self._woken.set()

    async def run(self) -> None:
        """Run rounds until cancelled. A failed round is logged; the next one starts from the reports again."""
        try:
            while True:
                again: float | None = None
                try:
                    again = await self.round()
                except Exception:
                    log.exception("A round of the idle culler failed")
                    self.counters.failures["round"] += 1
                await self._rest(self._pause(again))
        finally:
            self._hub.close()
            for task in self._under_way.values():
                task.cancel()

    async def round(self) -> float | None:
        """Read all reports once and carry out the actions that are due.

        Return the instant at which the next round is due; None for the usual interval.
        """
        self._hub_actions.awaiting_reports = False
        snapshots = await ask_all(self._context.agents)
        await self._hub.refresh(self._patience)
        templates, now = self._context.templates(), self._context.clock()
        add_use(self.state.use, snapshots, templates, now)
        self.state.pressure = await self._pressure(snapshots, templates, now)
        decisions = self.decide(snapshots, templates, now)
        self._notify(decisions)
        if all(snapshot.report is not None for snapshot in snapshots):
            # an unavailable agent's sessions have not ended
            self.state.dry_run.retain({decision.session.id for decision in decisions})
        kept_on = self.state.pressure.kept_on
        names = {decision.name for decision in decisions}
        self._refused = {name: text for name, text in self._refused.items() if name in names}
        self._kept_since = {session: since for session, since in self._kept_since.items() if session in kept_on}
        done = await self._carried_out(
            (decision.name, action)
            for due in (self._gpu_action, self._end_of_controls)
            for decision in decisions
            if (action := due(decision)) is not None
        )
        if not self._settings.dry_run:
            done |= await self._carried_out(self._drains.due(snapshots, decisions, now))
            done |= await self._carried_out(self._bypasses.due(decisions, now))
        judged = list(self._judged(snapshots, templates, now))
        stopped = await self._at_the_hub(dict(self._due_hub_actions(decisions, snapshots, judged, now)))
        self._log_problems(dict(_lasting_problems(snapshots, judged)) | dict(_short_work(decisions)))
        self.counters.failures["agent"] += sum(snapshot.report is None for snapshot in snapshots)
        self.counters.last_round = self._context.clock()
        instants = [
            decision.decision.decide_again_at for decision in decisions if decision.decision.decide_again_at is not None
        ]
        stops = self._drains.next_stop(snapshots, decisions, now), self._bypasses.next_stop(decisions, now)
        instants += [stop_at for stop_at in stops if stop_at is not None]
        return min([*instants, now + _SOON]) if done or stopped else min(instants, default=None)

    async def _pressure(
        self, snapshots: Sequence[NodeSnapshot], templates: Mapping[str, Template], now: float
    ) -> Pressure:
        """Return the units that waiting spawns need, and all units of sessions with a used-up budget."""
        reports, quotas = answered(snapshots), self._context.quotas()
        sessions = [session for report in reports for session in report.sessions]
        used_up = self._used_up(sessions)
        background = {session.id for session in sessions if session.background}
        if not used_up and not background:
            return await self._pressure_now(snapshots, templates, now)
        apart = background if used_up is None else used_up.keys()
        others = [
            snapshot if snapshot.report is None else replace(snapshot, report=within_budget(snapshot.report, apart))
            for snapshot in snapshots
        ]
        needs = await self._pressure_now(others, templates, now)
        # unknown: sessions stay in the background until their agents' reservations end
        return needs if used_up is None else without_budget(needs, reports, used_up, (quotas or Quotas()).reclaim)

    async def _pressure_now(
        self, snapshots: Sequence[NodeSnapshot], templates: Mapping[str, Template], now: float
    ) -> Pressure:
        """Return the units that waiting spawns need. No units are needed while the hub does not answer.

        An unavailable agent's sessions count as in its last report, and none of them makes way. No units are needed
        while an agent has never reported, because the use of quotas is unknown.
        """
        last = {
            snapshot.agent: snapshot.report if snapshot.report is not None else self._last.get(snapshot.agent)
            for snapshot in snapshots
        }
        self._last = {agent: report for agent, report in last.items() if report is not None}
        if len(self._last) < len(snapshots):
            return NO_PRESSURE
        reports = answered(snapshots)
        silent = [self._last[snapshot.agent] for snapshot in snapshots if snapshot.report is None]
        quotas, use, usage = self._context.quotas(), self.state.use, None
        # Threads: with thousands of sessions each of these takes long, and only rounds change what they read.
        idle = await asyncio.to_thread(candidates, reports, templates, now, use)
        if quotas is not None and quotas.reclaim.enabled:
            servers = servers_of(self.hub_users or ()).values()
            usage = await asyncio.to_thread(quota_use, quotas, [*reports, *silent], templates, servers)
        reclaims = await asyncio.to_thread(may_matter, reports, usage)
        if not idle and not reclaims:
            return NO_PRESSURE
        pending = await self._pending()
        if pending is None:
            return NO_PRESSURE
        placed = {(session.user, session.server) for report in silent for session in report.sessions}
        pending = [server for server in pending if (server.user, server.name) not in placed]
        try:
            progress = await self._progress([spawn.server for spawn in waiting_spawns(pending, reports, templates)])
            needs = NO_PRESSURE
            if reclaims:
                needs = await asyncio.to_thread(
                    pressure, quotas, reports, pending, templates, now, use, silent, progress, usage
                )
            return replace(needs, needed=await asyncio.to_thread(needed, idle, reports, pending, templates, progress))
        except Exception:
            # other idle actions are still due
            log.exception("The units that waiting spawns need are unknown")
            return NO_PRESSURE

    async def _rest(self, seconds: float) -> None:
        """Wait for ``seconds`` or for new reports, but at least the minimum pause."""
        shortest = min(_SOON, seconds)
        await asyncio.sleep(shortest)
        await set_within(self._woken, seconds - shortest)
        self._woken.clear()

    def _pause(self, again: float | None) -> float:
        longest = self._settings.cull_every
        wait = longest if again is None else again - self._context.clock()
        return max(min(_SOON, longest), min(wait, longest))

    def _gpu_action(self, decision: SessionDecision) -> Action | None:
        """Return the action through a session's agent; None while the session starts or stops."""
        if _starts_or_stops(decision):
            return None
        if decision.dry_run:
            return partial(dry_run_action, self._context, decision, self.state.dry_run)
        if decision.decision.tier is Tier.STOPPED:
            return None
        if decision.session.yields and decision.session.id in self.state.pressure.free_again:
            return partial(stop_yielding, decision)
        session = decision.session
        has_its_place = session.yields and (session.background or not decision.report.supports_budgets)
        if decision.used_up and not session.effective_units and not has_its_place:
            # an idle action released its share before; work would restore it
            self._kept_since[decision.session.id] = decision.decided_at
            return partial(go_on_yielding, decision)
        if decision.decision.tier is not decision.session.tier:
            self._kept_since[decision.session.id] = decision.decided_at
            return partial(take_gpu_action, self._context, decision)
        if self._has_to_go_on_yielding(decision):
            self._kept_since[decision.session.id] = decision.decided_at
            return partial(go_on_yielding, decision)
        return partial(update_notice, self._context, decision)

    def _end_of_controls(self, decision: SessionDecision) -> Action | None:
        """Return the action that removes an expired keep or exemption; None if there is none."""
        if not needs_cleanup(decision.session, decision.decided_at):
            return None
        return partial(clean_up, self._context, decision)

    def _has_to_go_on_yielding(self, decision: SessionDecision) -> bool:
        """Return whether the agent needs another request to reserve the yielded units.

        It is not sent while the user has a notice, because a tier change would withdraw the notice.
        """
        if not decision.session.yields or decision.session.id not in self.state.pressure.kept_on:
            return False
        if decision.reclaimed is not None and decision.reclaimed.units > decision.session.effective_units:
            return True
        since = self._kept_since.get(decision.session.id)
        silent = decision.session.notice is None and decision.decision.notice is None
        # an unknown or later instant: from another process of this service, or the clock was set back
        return silent and (since is None or not 0 <= decision.decided_at - since < YIELD_SECONDS / 2)

    def _due_hub_actions(
        self,
        decisions: Sequence[SessionDecision],
        snapshots: Sequence[NodeSnapshot],
        judged: Sequence[tuple[HubServer, ServerVerdict]],
        now: float,
    ) -> Iterator[tuple[str, Action]]:
        """Yield the actions through the hub, each with a unique name. ``judged``: the servers that are in no report."""
        for decision in decisions:
            if decision.decision.tier is Tier.STOPPED and not decision.dry_run and not _starts_or_stops(decision):
                yield f"server {decision.name}", partial(self._hub_actions.stop_session, decision)
        unused = users_to_delete(self.hub_users, self._settings, now)
        if self._settings.dry_run:
            complete = self.hub_users is not None and all(snapshot.report is not None for snapshot in snapshots)
            self._log_dry_run(judged, unused, complete)
            return
        for server, verdict in judged:
            if verdict.stop_because:
                yield f"server {server.label}", partial(self._hub_actions.stop_unshared, server)
        for user, reason in unused:
            yield f"user {user.name}", partial(self._hub_actions.delete_user, user, reason)

    def _log_dry_run(
        self, judged: Iterable[tuple[HubServer, ServerVerdict]], unused: Iterable[tuple[HubUser, str]], complete: bool
    ) -> None:
        """Log once which servers without a share a dry run would stop, and which users it would delete.

        ``complete``: whether the hub and the agents have answered, so that a missing action is not due.
        """
        due: dict[str, Callable[[], None]] = {
            f"server {server.label}": partial(
                self._context.log.server, server, Tier.STOPPED, reason=verdict.stop_because, dry_run=True
            )
            for server, verdict in judged
            if verdict.stop_because
        }
        for user, reason in unused:
            due[f"user {user.name}"] = partial(log.info, "Dry run: user %s is not deleted: %s", user.name, reason)
        for name in sorted(due.keys() - self._logged_dry_run):
            due[name]()
        self._logged_dry_run = set(due) if complete else self._logged_dry_run | set(due)

    def _judged(
        self, snapshots: Sequence[NodeSnapshot], templates: Mapping[str, Template], now: float
    ) -> Iterator[tuple[HubServer, ServerVerdict]]:
        """Yield the servers that are in no report."""
        reports = answered(snapshots)
        with_share = {(session.user, session.server) for report in reports for session in report.sessions}
        all_answered = len(reports) == len(snapshots)
        for key, server in servers_of(self.hub_users or ()).items():
            if key not in with_share:
                yield server, judge(server, templates, self._settings, now, all_answered)

    async def _at_the_hub(self, actions: Mapping[str, Action]) -> bool:
        """Start the actions that are not running yet; wait ``patience`` seconds. Return whether any has an effect."""
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

    async def _carried_out(self, due: Iterable[tuple[str, Action]]) -> bool:
        """Carry out actions on sessions, each with the session's name. Return whether any changed something."""
        return any(await asyncio.gather(*(self._guarded(name, action) for name, action in due)))

    async def _guarded(self, name: str, action: Action) -> bool:
        """Run one action. A failure is logged and does not affect the other actions."""
        async with self._slots:
            try:
                done = await action()
                self._refused.pop(name, None)
                return done
            except ControlRefused as error:
                # the session has worked or ended since the report
                expected = error.code in ("busy", "unknown-session")
                # an older agent refuses the same request in each round
                level = logging.DEBUG if self._refused.get(name) == str(error) else logging.WARNING
                log.log(logging.INFO if expected else level, "%s: %s", name, error)
                if not expected:
                    self._refused[name] = str(error)
                    self.counters.failures["agent"] += 1
            except AgentUnreachable as error:
                log.warning("%s: %s", name, error)
                self.counters.failures["agent"] += 1
            except HubFailed as error:
                log.warning("%s: %s", name, error)
                self.counters.failures["hub"] += 1
            except ActionRefused as error:
                log.warning("%s: cannot remove an expired keep or exemption: %s", name, error)
            except Exception:
                log.exception("%s: unexpected error; nothing was changed", name)
                self.counters.failures["session"] += 1
            return False

    def _log_problems(self, problems: dict[str, str]) -> None:
        """Log a persistent problem when it appears or changes, not in every round."""
        for about, text in problems.items():
            if self._logged_problems.get(about) != text:
                log.warning("%s: %s", about, text)
        self._logged_problems = problems


def _lasting_problems(
    snapshots: Sequence[NodeSnapshot], judged: Iterable[tuple[HubServer, ServerVerdict]]
) -> Iterator[tuple[str, str]]:
    for number, snapshot in enumerate(snapshots):
        if snapshot.problem:
            yield f"agent {number}", snapshot.problem
    for uuid, nodes in doubled_gpus(answered(snapshots)).items():
        yield f"GPU {uuid}", doubled_gpu(uuid, nodes)
    for server, verdict in judged:
        if verdict.left_because:
            yield server.label, verdict.left_because


def _short_work(decisions: Sequence[SessionDecision]) -> Iterator[tuple[str, str]]:
    """Yield a sentence about each session that short GPU work would have kept active."""
    for decision in decisions:
        work = decision.observation.short_work
        if work is not None and decision.kept_by_short_work:
            yield f"session {decision.name}", kept_by_short_work(work.rule)


def _starts_or_stops(decision: SessionDecision) -> bool:
    return not decision.session.confirmed or (decision.server is not None and not decision.server.not_pending)
