"""Idle actions: downgrade or release a share through the agent, stop a server or delete a user through the hub.

The module also determines from the hub's list which servers without a share and which users without servers are idle.
Decisions on sessions are in `decisions`.

Unlike an agent, the hub's API cannot refuse a deletion because of activity, and the hub's list can be a minute old. So
each method checks again just before the deletion. A failed deletion is not repeated; the next round decides again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpushare_spawner.idle.policy import IdleAction, overdue
from gpushare_spawner.idle.use import DryRun
from gpushare_spawner.model.control import NoticeRequest, TierRequest
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import IdleCause, Share, Tier, UseRule
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions.context import ActionContext
from gpushare_spawner.service.actions.share import YIELD_SECONDS
from gpushare_spawner.service.culler.decisions import CullerSettings, CullerState, SessionDecision, decide_session
from gpushare_spawner.service.culler.pressure import Pressure
from gpushare_spawner.service.hub.client import HubServer, HubUser
from gpushare_spawner.service.reports import ask
from gpushare_spawner.service.templates import SessionTemplates
from gpushare_spawner.wording import idle_decisions, stops
from gpushare_spawner.wording.idle_decisions import decided, explained

log = logging.getLogger("gpushare.service")


def log_action(context: ActionContext, decision: SessionDecision) -> None:
    """Log an idle action on a session, or the simulated action in a dry run."""
    chosen = decision.decision
    context.log.session(
        decision.session,
        decision.node,
        chosen.tier,
        units=chosen.units,
        cause=chosen.upcoming.cause.value if chosen.upcoming is not None else "",
        reason=decided(chosen, decision.session.share),
        dry_run=decision.dry_run,
    )


async def take_gpu_action(context: ActionContext, session_decision: SessionDecision) -> bool:
    """Request the decided tier from the agent. Return True.

    The agent refuses with ControlRefused if the session has worked on the GPU since the decision, unless a spawn in
    quota reclaims its units.
    """
    session, decision, seen = session_decision.session, session_decision.decision, session_decision.observation
    cause = decision.upcoming.cause if decision.upcoming is not None else IdleCause.IDLE
    reclaims = cause.makes_way
    yields_until = session_decision.decided_at + YIELD_SECONDS if session_decision.reclaimed is not None else None
    await session_decision.agent.send(
        TierRequest(
            id=session.id,
            tier=decision.tier,
            effective_units=decision.units,
            reason=decided(decision, session.share),
            if_idle_since=None if reclaims else max(0.0, decision.worked_at),
            if_gpu_seconds=None if reclaims else seen.use_from_gpu_seconds,
            use=seen.use_rule,
            yields_until=yields_until,
            background=session_decision.to_background and not decision.units,
        )
    )
    log_action(context, session_decision)
    context.counters.actions[decision.tier] += 1
    return True


async def dry_run_action(context: ActionContext, session_decision: SessionDecision, dry_run: DryRun) -> bool:
    """Log the effect of a session's decision in a dry run. Return False, because nothing has changed."""
    session, decision, seen = session_decision.session, session_decision.decision, session_decision.observation
    if decision.tier is not seen.tier:
        log_action(context, session_decision)
        dry_run.act(session.id, seen, decision.tier, decision.units, session_decision.decided_at)
    elif decision.notice is None:
        if seen.notice is not None:
            dry_run.notify(session.id, seen, None, session_decision.decided_at)
    elif seen.notice is None or not _same(seen.notice, decision.notice):
        dry_run.notify(
            session.id, seen, notice_of(decision.notice, session.share, seen.use_rule), session_decision.decided_at
        )
    return False


async def go_on_yielding(decision: SessionDecision) -> bool:
    """Have the agent keep the yielded units for others for longer, and give back those that nobody else needs.

    Return whether units are given back.
    """
    session = decision.session
    units = max(session.effective_units, decision.reclaimed.units if decision.reclaimed is not None else 0)
    await decision.agent.send(
        TierRequest(
            id=session.id,
            tier=Tier.DOWNGRADED if units else session.tier,
            effective_units=units,
            reason="its budget is used up" if decision.used_up else "others still need its units, by their quotas",
            use=decision.observation.use_rule,
            yields_until=decision.decided_at + YIELD_SECONDS,
            background=decision.to_background and not units,
        )
    )
    return units > session.effective_units


async def stop_yielding(decision: SessionDecision) -> bool:
    """Notify the agent that no spawn in quota needs the units that the session yields. Return True."""
    session, reason = decision.session, "no spawn in quota waits for its units anymore"
    if session.background:
        reason = "its budget is not used up"
    works = session.gpu_busy or session.waiting
    tier, units = (Tier.ACTIVE, session.share_units) if works else (session.tier, session.effective_units)
    if tier is not Tier.STOPPED:
        use = decision.observation.use_rule if tier is not Tier.ACTIVE else None
        await decision.agent.send(TierRequest(id=session.id, tier=tier, effective_units=units, reason=reason, use=use))
        log.info("%s: %s", decision.name, reason)
    return True


async def update_notice(context: ActionContext, decision: SessionDecision) -> bool:
    """Send or withdraw the session's notice, as decided. Return False, because the tier is unchanged."""
    current, coming = decision.session.notice, decision.decision.notice
    share = decision.session.share
    if coming is None:
        if current is not None:
            why = decided(decision.decision, share)
            await decision.agent.send(NoticeRequest(id=decision.session.id, tier=None, reason=why))
            log.info("%s: notice withdrawn (%s at %s): %s", decision.name, current.tier, _time(current.at), why)
            context.counters.withdrawn[current.tier] += 1
    elif current is None or not _same(current, coming):
        notice = notice_of(coming, share, decision.observation.use_rule)
        await decision.agent.send(NoticeRequest.of(decision.session.id, notice))
        log.info("%s: user notified: %s at %s", decision.name, coming.tier, _time(coming.at))
        context.counters.notices[coming.tier] += 1
    return False


def notice_of(action: IdleAction, share: Share, use: UseRule | None = None) -> Notice:
    """Return the notice of an upcoming action for the session's agent.

    ``use``: the GPU work that counts as use of the share. Work of any length prevents a stop.
    """
    return Notice(
        tier=action.tier,
        at=action.at,
        reason=explained(action, share),
        effective_units=action.units,
        cause=action.cause,
        after_seconds=action.after,
        use=use if action.cause is IdleCause.IDLE and action.tier is not Tier.STOPPED else None,
    )


def _same(current: Notice, coming: IdleAction) -> bool:
    """Return whether the current notice has this action, time and cause. An older agent does not store the cause."""
    same_cause = current.cause in (None, coming.cause)
    return same_cause and (current.tier, current.at, current.effective_units) == (coming.tier, coming.at, coming.units)


def _time(instant: float) -> str:
    """Return the time of day for logs in the machine's time zone: 14:05:00."""
    return time.strftime("%H:%M:%S", time.localtime(instant))


@dataclass(frozen=True)
class ServerVerdict:
    """The reason why a server is stopped, or why an idle server is not stopped. Both empty: the server is in use."""

    stop_because: str = ""
    left_because: str = ""


def judge(
    server: HubServer, templates: Mapping[str, Template], settings: CullerSettings, now: float, agents_answered: bool
) -> ServerVerdict:
    """Decide on a server that is in no agent's report.

    ``agents_answered``: whether no report is missing. If one is missing, a server that may have a share is not stopped:
    its GPU work is unknown, and a training run without output must not count as idle.
    """
    if not server.not_pending:
        return ServerVerdict()
    each = SessionTemplates.of(templates)
    if each.quiet_until(Tier.STOPPED, now) > now:
        return ServerVerdict()
    template = each.of_user(server.profile, server.user)
    if template is None:
        if not agents_answered:
            return ServerVerdict()
        timeout = settings.timeout
    elif template.gpu is not None:
        return ServerVerdict(left_because="not stopped: its template has a GPU share, and no agent reports the session")
    else:
        timeout = template.idle.stop_after or 0.0
    excess = overdue(server.last_activity, server.started, now, timeout, settings.max_age)
    return ServerVerdict(stop_because=idle_decisions.overdue(excess) if excess is not None else "")


def users_to_delete(
    users: Sequence[HubUser] | None, settings: CullerSettings, now: float
) -> Iterator[tuple[HubUser, str]]:
    """Yield the idle users without servers, with the reasons; none unless ``cull_users`` is set.

    Unless ``cull_admin_users`` is set, only users that the hub lists as non-admins are deleted.
    """
    for user in (users or ()) if settings.cull_users else ():
        if user.servers or (not settings.cull_admin_users and user.admin is not False):
            continue
        excess = overdue(user.last_activity, user.created, now, settings.timeout, settings.max_age)
        if excess is not None:
            yield user, idle_decisions.overdue(excess)


FRESH_SECONDS = 5.0
"""Seconds. Maximum age of a report that a stop relies on, because later activity is not in the report."""


class HubActions:
    """Idle actions through the hub.

    Each method returns whether it changed something, and raises HubFailed and the agent's errors.
    """

    def __init__(self, context: ActionContext, settings: CullerSettings) -> None:
        self._context = context
        self._settings = settings
        self.awaiting_reports = False
        """Whether a stop waits for the agent's next report."""

    async def stop_session(self, decision: SessionDecision) -> bool:
        """Stop a session's server if the stop is still due."""
        session = decision.session
        if self._too_old(decision.agent.report_age()):
            return False
        server = await self._context.hub.server(session.user, session.server)
        snapshot = await ask(decision.agent)
        current = snapshot.report.session(session.id) if snapshot.report is not None else None
        if snapshot.report is None or current is None or server is None or not server.not_pending:
            return False
        if self._too_old(snapshot.age):
            return False
        templates, now = self._context.templates(), self._context.clock()
        reclaimed = {session.id: decision.reclaimed} if decision.reclaimed is not None else {}
        state = CullerState(pressure=Pressure(reclaimed))
        fresh = decide_session(decision.agent, snapshot.report, current, server, templates, now, self._settings, state)
        if fresh.decision.tier is current.tier:
            log.info("%s: not stopped: %s", decision.name, decided(fresh.decision, current.share))
            return await update_notice(self._context, fresh)
        if fresh.decision.tier is not Tier.STOPPED or fresh.dry_run:
            return False
        await self._stop(server, stops.by_culler(fresh.decision))
        log_action(self._context, fresh)
        return True

    def _too_old(self, age: float) -> bool:
        self.awaiting_reports = self.awaiting_reports or age > FRESH_SECONDS
        return age > FRESH_SECONDS

    async def stop_unshared(self, listed: HubServer) -> bool:
        """Stop a server without a share if the stop is still due."""
        context = self._context
        server = await context.hub.server(listed.user, listed.name)
        if server is None:
            return False
        verdict = judge(server, context.templates(), self._settings, context.clock(), agents_answered=True)
        if not verdict.stop_because:
            return False
        await self._stop(server, stops.overdue(verdict.stop_because))
        context.log.server(server, Tier.STOPPED, reason=verdict.stop_because)
        return True

    async def delete_user(self, user: HubUser, reason: str) -> bool:
        """Delete a user without servers."""
        await self._context.hub.delete_user(user.name)
        log.info("User %s deleted: %s", user.name, reason)
        return True

    async def _stop(self, server: HubServer, why: str) -> None:
        """Stop a server. ``why``: sentences with the reason, for the hub's pages."""
        removed = bool(server.name) and self._settings.remove_named_servers
        await self._context.hub.stop(server.user, server.name, removed)
        self._context.counters.actions[Tier.STOPPED] += 1
        if not removed:
            self._context.notes.stopped(server, why, self._context.clock())
