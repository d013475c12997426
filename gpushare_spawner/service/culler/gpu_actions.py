"""Idle actions through the agent: downgrade or release a share, and notify its user before."""

from __future__ import annotations

import logging
import time

from gpushare_spawner.idle import IdleAction
from gpushare_spawner.model.control import AnnounceRequest, TierRequest
from gpushare_spawner.model.report import Announcement
from gpushare_spawner.model.share import Share
from gpushare_spawner.service.counters import Counters
from gpushare_spawner.service.culler.decisions import Looked
from gpushare_spawner.wording.idle_actions import decided, explained

log = logging.getLogger("gpushare.service")


async def step_down(one: Looked, counters: Counters) -> bool:
    """Ask the agent for the tier that was decided. It refuses where there was GPU work since. True: it is done."""
    session, decision, share = one.session, one.decision, one.session.share
    await one.agent.tier(
        TierRequest(
            id=session.id,
            tier=decision.tier,
            effective_units=decision.units,
            reason=decided(decision, share),
            if_idle_since=max(0.0, decision.idle_since),
        )
    )
    left = f"{decision.units} of {session.share_units} units left"
    log.info("%s: %s, %s. %s", one.name, decision.tier, left, decided(decision, share))
    counters.stepped(decision.tier)
    return True


async def tell(one: Looked, counters: Counters) -> bool:
    """Make the announcement that should stand, or take back one that should not. Always False: no step was taken."""
    told, coming = one.session.announcement, one.decision.announcement
    share = one.session.share
    if coming is None:
        if told is not None:
            await one.agent.announce(AnnounceRequest(id=one.session.id, tier=None, reason=decided(one.decision, share)))
            why = decided(one.decision, share)
            log.info("%s: the notice of %s at %s is withdrawn: %s", one.name, told.tier, _time(told.at), why)
            counters.withdrew(told.tier)
    elif told is None or not _same(told, coming):
        await one.agent.announce(AnnounceRequest.of(one.session.id, announced(coming, share)))
        log.info("%s: the user is notified: %s at %s", one.name, coming.tier, _time(coming.at))
        counters.announced(coming.tier)
    return False


def announced(action: IdleAction, share: Share) -> Announcement:
    """Return what the session's agent is told of a coming action."""
    return Announcement(
        tier=action.tier,
        at=action.at,
        reason=explained(action, share),
        effective_units=action.units,
        cause=action.cause,
        after_seconds=action.after,
    )


def _same(told: Announcement, coming: IdleAction) -> bool:
    """Whether the user was told of this action, its time and its cause; an older agent does not keep the cause."""
    same_cause = told.cause in (None, coming.cause)
    return same_cause and (told.tier, told.at, told.effective_units) == (coming.tier, coming.at, coming.units)


def _time(instant: float) -> str:
    """For logs: 14:05:00, in the machine's time zone."""
    return time.strftime("%H:%M:%S", time.localtime(instant))
