"""The action by which a session over quota makes way for a spawn in quota. Which session it is: quota/reclaim.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

from gpushare_spawner.idle.observation import Observation
from gpushare_spawner.idle.schedule import Due
from gpushare_spawner.model.idle_cause import IdleCause
from gpushare_spawner.model.quota import Reclaim
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.tier import Tier


@dataclass(frozen=True)
class Claim:
    """What spawns in quota that wait need of a session over quota."""

    units: int
    """What the session keeps, on each of its GPUs."""
    rules: Reclaim
    """Of the quotas in force."""


def reclaim_action(claim: Claim, session: Observation) -> Due | None:
    """Return how the session makes way; None where it has, and nothing more may be taken.

    It makes way busy or not, as nothing is lost. A stop comes only after that, and never while a kernel is busy.
    """
    rules = claim.rules
    if session.effective_units > claim.units:
        units = _kept(claim, session)
        tier = Tier.DOWNGRADED if units else Tier.RELEASED
        return Due(tier, units, session.opened_at, rules.notice, 0.0, IdleCause.RECLAIM)
    quiet = session.quiet_since
    may_stop = session.yields and not session.gpu_busy and not session.kernels_busy
    if rules.stop_after is None or quiet is None or not may_stop:
        return None
    return Due(Tier.STOPPED, 0, quiet + rules.stop_after, rules.stop_notice, rules.stop_after, IdleCause.RECLAIM)


def _kept(claim: Claim, session: Observation) -> int:
    """Return what the session keeps of its units, at least what its notice of this says.

    What the spawn needs changes with what neighbours hold. If more needed a new notice at once, neighbours that come
    and go would put it off without end; so the session makes way as announced, and then gets a notice of the rest.
    """
    told = session.notice
    if not tells_of_reclaim(told) or told.effective_units >= session.effective_units:
        return claim.units
    return max(claim.units, told.effective_units)


def tells_of_reclaim(told: Notice | None) -> TypeGuard[Notice]:
    """Return whether a notice says that the session makes way."""
    return told is not None and told.cause is IdleCause.RECLAIM and told.tier is not Tier.STOPPED
