"""Idle actions through the agent: downgrade or release a share, and notify its user before."""

from __future__ import annotations

import logging
import time

from gpushare_spawner.idle import DryRun, IdleAction
from gpushare_spawner.model.idle_cause import IdleCause
from gpushare_spawner.model.protocol.control import AnnounceRequest, TierRequest
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import Share
from gpushare_spawner.model.tier import Tier, UseRule
from gpushare_spawner.service.actions.tiers import YIELD_SECONDS
from gpushare_spawner.service.counters import Counters
from gpushare_spawner.service.culler.decisions import SessionDecision
from gpushare_spawner.service.culler.idle_action_log import IdleActionLog
from gpushare_spawner.wording.idle_decisions import decided, explained

log = logging.getLogger("gpushare.service")


async def take_gpu_action(one: SessionDecision, counters: Counters, actions: IdleActionLog) -> bool:
    """Ask the agent for the tier that was decided. Returns True.

    The agent refuses (ControlRefused) if the session has worked on the GPU since, unless it makes way for a spawn in
    quota.
    """
    session, decision, seen, share = one.session, one.decision, one.observation, one.session.share
    reclaims = decision.upcoming is not None and decision.upcoming.cause is IdleCause.RECLAIM
    await one.agent.tier(
        TierRequest(
            id=session.id,
            tier=decision.tier,
            effective_units=decision.units,
            reason=decided(decision, share),
            if_idle_since=None if reclaims else max(0.0, decision.worked_at),
            if_gpu_seconds=None if reclaims else seen.use_from_gpu_seconds,
            use=seen.use_rule,
            yields_until=one.decided_at + YIELD_SECONDS if one.claim is not None else None,
        )
    )
    actions.gpu_action(one)
    counters.acted(decision.tier)
    return True


async def suppose(one: SessionDecision, dry_run: DryRun, actions: IdleActionLog) -> bool:
    """Log what a session's decision would do, instead of doing it. Returns False: nothing has changed."""
    session, decision, seen = one.session, one.decision, one.observation
    if decision.tier is not seen.tier:
        actions.gpu_action(one)
        dry_run.act(session.id, seen, decision.tier, decision.units, one.decided_at)
    elif decision.notice is None:
        if seen.notice is not None:
            dry_run.notify(session.id, seen, None, one.decided_at)
    elif seen.notice is None or not _same(seen.notice, decision.notice):
        dry_run.notify(session.id, seen, notice_of(decision.notice, session.share, seen.use_rule), one.decided_at)
    return False


async def go_on_yielding(one: SessionDecision) -> bool:
    """Have the agent keep what the session yields for longer: the server that it is for does not run yet. Returns
    False: nothing has changed."""
    session = one.session
    await one.agent.tier(
        TierRequest(
            id=session.id,
            tier=session.tier,
            effective_units=session.effective_units,
            reason="a spawn in quota still waits for its units, or has them and starts",
            use=one.observation.use_rule,
            yields_until=one.decided_at + YIELD_SECONDS,
        )
    )
    return False


async def stop_yielding(one: SessionDecision) -> bool:
    """Tell the agent that no spawn in quota needs what the session yields. Returns True."""
    session, reason = one.session, "no spawn in quota waits for its units any longer"
    works = session.gpu_busy or session.waiting
    tier, units = (Tier.ACTIVE, session.share_units) if works else (session.tier, session.effective_units)
    if tier is not Tier.STOPPED:
        use = one.observation.use_rule if tier is not Tier.ACTIVE else None
        await one.agent.tier(TierRequest(id=session.id, tier=tier, effective_units=units, reason=reason, use=use))
        log.info("%s: %s", one.name, reason)
    return True


async def update_notice(one: SessionDecision, counters: Counters) -> bool:
    """Send the notice that should stand, or withdraw one that should not. Returns False: the tier stays."""
    told, coming = one.session.notice, one.decision.notice
    share = one.session.share
    if coming is None:
        if told is not None:
            await one.agent.announce(AnnounceRequest(id=one.session.id, tier=None, reason=decided(one.decision, share)))
            why = decided(one.decision, share)
            log.info("%s: notice withdrawn (%s at %s): %s", one.name, told.tier, _time(told.at), why)
            counters.withdrew(told.tier)
    elif told is None or not _same(told, coming):
        notice = notice_of(coming, share, one.observation.use_rule)
        await one.agent.announce(AnnounceRequest.of(one.session.id, notice))
        log.info("%s: user notified: %s at %s", one.name, coming.tier, _time(coming.at))
        counters.notified(coming.tier)
    return False


def notice_of(action: IdleAction, share: Share, use: UseRule | None = None) -> Notice:
    """Return the notice of a coming action, as the session's agent gets it. ``use``: how much GPU work counts as use
    of the share; a stop is averted by work of any length."""
    return Notice(
        tier=action.tier,
        at=action.at,
        reason=explained(action, share),
        effective_units=action.units,
        cause=action.cause,
        after_seconds=action.after,
        use=use if action.cause is IdleCause.IDLE and action.tier is not Tier.STOPPED else None,
    )


def _same(told: Notice, coming: IdleAction) -> bool:
    """Return whether the user was told of this action, its time and its cause; an older agent keeps no cause."""
    same_cause = told.cause in (None, coming.cause)
    return same_cause and (told.tier, told.at, told.effective_units) == (coming.tier, coming.at, coming.units)


def _time(instant: float) -> str:
    """For logs: 14:05:00, in the machine's time zone."""
    return time.strftime("%H:%M:%S", time.localtime(instant))
