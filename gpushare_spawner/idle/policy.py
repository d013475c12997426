"""Which tier a session should be in now, and what its user should be told.

The service takes a share down, one announced action at a time; the agent restores it at once, without asking anybody.
All that is remembered between two decisions is in the agent's report (tier and announcement), so that a decision may be
lost, or made twice. Words for actions and causes: `wording.idle_actions`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpushare_spawner.idle.observation import Observation
from gpushare_spawner.idle.schedule import Due, NoAction, max_age_action, next_idle_action
from gpushare_spawner.model.idle_cause import IdleCause
from gpushare_spawner.model.report import Announcement
from gpushare_spawner.model.template import Idle
from gpushare_spawner.model.tier import Tier

_SLACK = 1.0
"""Seconds by which an announced instant may differ from the exact one before users are told a new one."""


@dataclass(frozen=True)
class IdleAction:
    """A downgrade, release or stop, with the instant (seconds since the epoch) at which it comes, or came."""

    tier: Tier
    units: int
    at: float
    after: float
    """Seconds of idleness, or of the server's life, at which it comes."""
    cause: IdleCause = IdleCause.IDLE


@dataclass(frozen=True)
class Decision:
    """What should be so now. The caller compares it with what is so, and sees to the difference."""

    tier: Tier
    """The tier that the session should be in: the one it is in, or one below."""
    units: int
    """Units (per GPU) that it should hold there."""
    no_action: NoAction | None
    """Why the session stays in its tier; None: the action is due now."""
    announcement: IdleAction | None
    """The announcement that should stand; None: none, and one that stands is withdrawn."""
    upcoming: IdleAction | None
    """The action that comes next if nothing happens, announced or not; None: none."""
    idle_since: float
    """GPU work after this instant makes the decision void."""
    look_again_at: float | None
    """When time alone changes the decision; None: it does not."""


def decide(idle: Idle | None, session: Observation, now: float, max_age: float = 0.0) -> Decision:
    """The decision for one session.

    ``idle`` is that of its template, None where the template is gone. ``now`` and all instants are seconds since the
    epoch. ``max_age`` (seconds, 0: none) stops older servers even if they are busy, as jupyterhub-idle-culler's option
    of that name does.

    An action needs an announcement that stands, whose time has come, and that was not overtaken by work since. An
    announcement that is made late delays the action, so that users always have their notice period. Instants in the
    future, or a clock that was set back, make the session look less idle, never more.
    """
    if idle is None:
        return _stay(session, NoAction.TEMPLATE_GONE)
    due = next_idle_action(idle, session)
    end = max_age_action(idle, session, max_age) if max_age > 0 else None
    if end is not None and (isinstance(due, NoAction) or now >= end.tell_at):
        due, end = end, None
    if isinstance(due, NoAction):
        return _stay(session, due)
    decision = _approach(due, session, now)
    if end is not None and decision.look_again_at is not None:
        return _looking_by(decision, end.tell_at)
    return decision


def _approach(due: Due, session: Observation, now: float) -> Decision:
    told = session.announcement
    earliest = max(due.at, now + due.notice)
    if told is None or not _announces(told, due) or told.at > earliest + _SLACK:
        coming = IdleAction(due.tier, due.units, earliest, due.after, due.cause)
        if now < due.tell_at:
            return _stay(session, NoAction.NOT_YET, upcoming=coming, look_again_at=due.tell_at)
        return _stay(session, NoAction.ANNOUNCED, announcement=coming, upcoming=coming, look_again_at=coming.at)
    coming = IdleAction(due.tier, due.units, told.at, due.after, due.cause)
    at = max(told.at, due.at)
    if now < at:
        return _stay(session, NoAction.ANNOUNCED, announcement=coming, upcoming=coming, look_again_at=at)
    return Decision(due.tier, due.units, None, coming, coming, session.gpu_idle_since, look_again_at=None)


def _announces(told: Announcement, due: Due) -> bool:
    """Whether the user was told of this very action; one told for an earlier instant was overtaken by work since."""
    # an older agent does not keep the cause
    same_cause = told.cause in (None, due.cause)
    same_action = told.tier is due.tier and told.effective_units == due.units
    return same_action and same_cause and told.at >= due.at - _SLACK


def _stay(
    session: Observation,
    why: NoAction,
    announcement: IdleAction | None = None,
    upcoming: IdleAction | None = None,
    look_again_at: float | None = None,
) -> Decision:
    return Decision(
        session.tier, session.effective_units, why, announcement, upcoming, session.gpu_idle_since, look_again_at
    )


def _looking_by(decision: Decision, instant: float) -> Decision:
    if decision.look_again_at is None or decision.look_again_at <= instant:
        return decision
    return replace(decision, look_again_at=instant)
