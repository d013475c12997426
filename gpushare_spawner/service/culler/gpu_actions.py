"""Deeds that an agent does: steps down of a share, and what users are told of them."""

from __future__ import annotations

import logging
import time

from gpushare_spawner.idle import Step
from gpushare_spawner.model.control import AnnounceRequest, TierRequest
from gpushare_spawner.model.report import Announcement
from gpushare_spawner.service.counters import Counters
from gpushare_spawner.service.culler.decisions import Looked

log = logging.getLogger("gpushare.service")


async def step_down(one: Looked, counters: Counters) -> bool:
    """Ask the agent for the tier that was decided. It refuses where there was GPU work since. True: it is done."""
    session, decision = one.session, one.decision
    await one.agent.tier(
        TierRequest(
            id=session.id,
            tier=decision.tier,
            effective_units=decision.units,
            reason=decision.reason,
            if_idle_since=max(0.0, decision.idle_since),
        )
    )
    left = f"{decision.units} of {session.share_units} units left"
    log.info("%s: %s, %s. %s", one.name, decision.tier, left, decision.reason)
    counters.stepped(decision.tier)
    return True


async def tell(one: Looked, counters: Counters) -> bool:
    """Make the announcement that should stand, or take back one that should not. Always False: no step was taken."""
    told, coming = one.session.announcement, one.decision.announcement
    if coming is None:
        if told is not None:
            await one.agent.announce(AnnounceRequest(id=one.session.id, tier=None, reason=one.decision.reason))
            log.info("%s: %s at %s is taken back: %s", one.name, told.tier, _time(told.at), one.decision.reason)
            counters.withdrew(told.tier)
    elif told is None or not _same(told, coming):
        await one.agent.announce(AnnounceRequest.of(one.session.id, coming.announcement))
        log.info("%s: %s announced for %s", one.name, coming.tier, _time(coming.at))
        counters.announced(coming.tier)
    return False


def _same(told: Announcement, coming: Step) -> bool:
    """Whether the user was told of this step, its time and its cause; an older agent does not keep the cause."""
    same_cause = told.cause in (None, coming.cause)
    return same_cause and (told.tier, told.at, told.effective_units) == (coming.tier, coming.at, coming.units)


def _time(instant: float) -> str:
    """For logs: 14:05:00, in the machine's time zone."""
    return time.strftime("%H:%M:%S", time.localtime(instant))
