"""Keeps: the limits for users, and the time for which a keep is in force. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from gpushare_spawner.model.controls import MOST_KEEPS, Controls, Exemption, Keep
from gpushare_spawner.model.template import Idle

DAY = 86400.0
"""The period in seconds over which keeps are counted."""
CLOCKS_DIFFER = 60.0
"""Seconds. A start further in the future was recorded before the clock was set back."""


@dataclass(frozen=True)
class KeepRule:
    """Limits on a user's keeps. 0 in any field disables keeps."""

    longest: float = 8 * 3600.0
    """Seconds."""
    per_day: int = 2
    """Keeps within 24 hours, over all sessions of the user."""
    at_once: int = 2
    """Maximum number of the user's sessions kept at the same time."""

    @classmethod
    def of(cls, idle: Idle | None) -> KeepRule:
        """Return the limits of a template's idle actions. ``idle`` is None if the template was removed."""
        given = idle.keep.model_dump(exclude_none=True) if idle is not None and idle.keep is not None else {}
        return cls(**given)


class WhyNoKeep(StrEnum):
    """Reasons why a user may not keep a share. Their texts are in `wording.actions`."""

    NOBODY = "nobody"
    """Shares of this template cannot be kept."""
    TOO_LONG = "too-long"
    TOO_OFTEN = "too-often"
    TOO_MANY = "too-many"
    """The user already keeps the maximum number of sessions."""


@dataclass(frozen=True)
class KeepRefusal:
    """Rejection of a keep."""

    why: WhyNoKeep
    rule: KeepRule
    again_at: float | None = None
    """Earliest time of the next keep, seconds since the epoch; None: waiting does not help."""


@dataclass(frozen=True)
class KeepsLeft:
    """The user's remaining keeps."""

    left: int
    """Keeps within 24 hours, over all sessions of the user."""
    rule: KeepRule
    again_at: float | None = None
    """Earliest time of the next keep, seconds since the epoch; None: now, or never."""


def keeps_left(rule: KeepRule, began: Iterable[float], now: float) -> KeepsLeft:
    """Return a user's remaining keeps. ``began``: the start times of the keeps of all the user's sessions."""
    if rule.longest <= 0 or rule.per_day <= 0 or rule.at_once <= 0:
        return KeepsLeft(0, rule)
    counted = recent(began, now)
    left = max(0, rule.per_day - len(counted))
    return KeepsLeft(left, rule, None if left else counted[-rule.per_day] + DAY)


def keep_refused(
    rule: KeepRule, seconds: float, began: Iterable[float], other_sessions: int, now: float
) -> KeepRefusal | None:
    """Return the reason to reject a keep of ``seconds`` from now; None if the user may keep the share.

    ``began``: the start times of the keeps of all the user's sessions. ``other_sessions``: the number of the user's
    other sessions that are kept now.
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
    """Return the instants of the last 24 hours, earliest first.

    An instant in the future counts as now: the clock was set back after it was recorded.
    """
    return sorted(min(instant, now) for instant in began if instant > now - DAY)


def keep_in_force(keep: Keep | None, now: float) -> bool:
    """Return whether a keep is in force now."""
    return keep is not None and now < keep.until


def exempts(exemption: Exemption | None, now: float) -> bool:
    """Return whether an exemption prevents all idle actions now."""
    return exemption is not None and (exemption.until is None or now < exemption.until)


def in_force(controls: Controls, now: float) -> Controls:
    """Return the controls without expired entries. A keep that starts in the future starts now.

    Such a keep was granted before the clock was set back. It lasts for its full length again, so it always ends.
    """
    keep = controls.keep if keep_in_force(controls.keep, now) else None
    if keep is not None and keep.since > now + CLOCKS_DIFFER:
        keep = Keep(until=now + max(0.0, keep.until - keep.since), since=now, by=keep.by)
    return Controls(
        keep=keep,
        keeps=tuple(recent(controls.keeps, now)[-MOST_KEEPS:]),
        exemption=controls.exemption if exempts(controls.exemption, now) else None,
    )
