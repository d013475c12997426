"""Keeps: whether a user may keep a share, and until when a keep is in force. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from gpushare_spawner.model.controls import MOST_KEEPS, Controls, Exemption, Keep

DAY = 86400.0
"""Seconds over which keeps are counted."""
CLOCKS_DIFFER = 60.0
"""Seconds. What begins later than this from now was written before the clock was set back."""


@dataclass(frozen=True)
class KeepRule:
    """What a user may keep. 0 anywhere: nothing."""

    longest: float = 8 * 3600.0
    """Seconds."""
    per_day: int = 2
    """Keeps within 24 hours, over all sessions of the user."""
    at_once: int = 2
    """Sessions of the user that are kept at a time."""


class WhyNoKeep(StrEnum):
    """Why a user may not keep a share. Words for it: `wording.controls.session_controls`."""

    NOBODY = "nobody"
    """Nobody may keep this template's shares."""
    TOO_LONG = "too-long"
    TOO_OFTEN = "too-often"
    TOO_MANY = "too-many"
    """The user keeps other sessions already."""


@dataclass(frozen=True)
class KeepRefusal:
    """Why a user may not keep a share now."""

    why: WhyNoKeep
    rule: KeepRule
    again_at: float | None = None
    """When the user may keep again, seconds since the epoch; None: time alone does not help."""


@dataclass(frozen=True)
class KeepsLeft:
    """How often a user can still keep a share."""

    left: int
    """Keeps within 24 hours, over all sessions of the user."""
    rule: KeepRule
    again_at: float | None = None
    """When the user can keep again, seconds since the epoch; None: now, or never."""


def keeps_left(rule: KeepRule, began: Iterable[float], now: float) -> KeepsLeft:
    """Return a user's keeps that are left. ``began``: the instants at which keeps of all the user's sessions began."""
    if rule.longest <= 0 or rule.per_day <= 0 or rule.at_once <= 0:
        return KeepsLeft(0, rule)
    counted = recent(began, now)
    left = max(0, rule.per_day - len(counted))
    return KeepsLeft(left, rule, None if left else counted[-rule.per_day] + DAY)


def keep_refused(
    rule: KeepRule, seconds: float, began: Iterable[float], other_sessions: int, now: float
) -> KeepRefusal | None:
    """Return why a user may not keep a share for so many seconds from now on; None: the user may.

    ``began``: the instants at which keeps of all the user's sessions began. ``other_sessions``: those of the user that
    are kept now, without this one.
    """
    available = keeps_left(rule, began, now)
    if not available.left and available.again_at is None:
        return KeepRefusal(WhyNoKeep.NOBODY, rule)
    if not seconds <= rule.longest:
        return KeepRefusal(WhyNoKeep.TOO_LONG, rule)
    if other_sessions >= rule.at_once:
        return KeepRefusal(WhyNoKeep.TOO_MANY, rule)
    if not available.left:
        return KeepRefusal(WhyNoKeep.TOO_OFTEN, rule, available.again_at)
    return None


def recent(began: Iterable[float], now: float) -> list[float]:
    """Return the instants of the last 24 hours, the earliest first. One in the future counts as now: the clock was set
    back since."""
    return sorted(min(instant, now) for instant in began if instant > now - DAY)


def holds(keep: Keep | None, now: float) -> bool:
    """Return whether a keep is in force now."""
    return keep is not None and now < keep.until


def exempts(exemption: Exemption | None, now: float) -> bool:
    """Return whether no idle action at all may come now."""
    return exemption is not None and (exemption.until is None or now < exemption.until)


def in_force(controls: Controls, now: float) -> Controls:
    """Return the controls without what is over, and with a keep from the future dated now.

    A keep of the future was given before the clock was set back. It lasts once more for as long as it was given for,
    and so never without end.
    """
    keep = controls.keep if holds(controls.keep, now) else None
    if keep is not None and keep.since > now + CLOCKS_DIFFER:
        keep = Keep(until=now + max(0.0, keep.until - keep.since), since=now, by=keep.by)
    return Controls(
        keep=keep,
        keeps=tuple(recent(controls.keeps, now)[-MOST_KEEPS:]),
        exemption=controls.exemption if exempts(controls.exemption, now) else None,
    )
