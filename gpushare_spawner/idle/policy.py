"""Policy that decides the tier of a session and the notice of its user, and finds overdue servers and users.

The service downgrades, releases and stops, one action at a time, each after a notice. The agent restores a share by
itself when GPU work counts as use of it. Decisions depend only on the agent's report (tier and notice), so a decision
can be lost or made twice. quota/reclaim.py chooses the sessions that make way for spawns in quota. Words for actions
and causes: `wording.idle_decisions`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeGuard

from gpushare_spawner.idle.keep import exempts, holds
from gpushare_spawner.idle.schedule import Due, NoAction, QuietUntil, max_age_action, never_quiet, next_idle_action
from gpushare_spawner.idle.use import Observation
from gpushare_spawner.model.quota import Reclaim
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import IdleCause, Tier, UseRule
from gpushare_spawner.model.template import Idle


@dataclass(frozen=True)
class UnitsNeeded:
    """Units of a session over quota that waiting spawns in quota need."""

    units: int
    """Units that the session keeps, on each of its GPUs."""
    rules: Reclaim
    """Rules of the quotas in force."""


def reclaim_action(claim: UnitsNeeded, session: Observation) -> Due | None:
    """Return the action by which the session makes way; None: it has made way, and no more may be taken.

    A busy session makes way too, as nothing is lost. A stop comes only after that, and never while a kernel is busy.
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


def _kept(claim: UnitsNeeded, session: Observation) -> int:
    """Return the units that the session keeps, at least the units of its notice.

    The spawn's need changes with the neighbours' units. If a greater need sent a new notice at once, changing
    neighbours would delay the action without end. So the session makes way as its notice says, and then gets a notice
    of the rest.
    """
    notice = session.notice
    if not is_reclaim_notice(notice) or notice.effective_units >= session.effective_units:
        return claim.units
    return max(claim.units, notice.effective_units)


def is_reclaim_notice(notice: Notice | None) -> TypeGuard[Notice]:
    """Return whether a notice says that the session makes way."""
    return notice is not None and notice.cause is IdleCause.RECLAIM and notice.tier is not Tier.STOPPED


_SLACK = 1.0
"""Seconds by which a notice's time can differ from the exact time before users get a new notice."""


@dataclass(frozen=True)
class IdleAction:
    """A downgrade, release or stop, with its time (seconds since the epoch)."""

    tier: Tier
    units: int
    at: float
    after: float
    """Idle seconds, or age of the server in seconds, at which the action comes."""
    cause: IdleCause = IdleCause.IDLE
    short_of: UseRule | None = None
    """Rule that the session's GPU work in that time did not meet. None: it did no GPU work."""


@dataclass(frozen=True)
class Decision:
    """Desired state of a session. The caller compares it with the actual state."""

    tier: Tier
    """Desired tier: the present tier or a deeper tier."""
    units: int
    """Desired units (per GPU) in that tier."""
    no_action: NoAction | None
    """Reason why the session stays in its tier; None: the action is due now."""
    notice: IdleAction | None
    """Action that the user should have a notice of; None: no notice, and a present notice is withdrawn."""
    upcoming: IdleAction | None
    """Next action if the session stays idle, with or without a notice; None: there is none."""
    idle_since: float
    """Last use of the GPU."""
    worked_at: float
    """Last GPU work, even if too short to count as use. Later work invalidates the decision."""
    decide_again_at: float | None
    """Instant at which time alone changes the decision; None: never."""


def decide(
    idle: Idle | None,
    session: Observation,
    now: float,
    max_age: float = 0.0,
    claim: UnitsNeeded | None = None,
    held: bool = False,
    quiet_until: QuietUntil = never_quiet,
    leaves: int | None = None,
) -> Decision:
    """Decide on one session.

    ``idle``: idle actions of its template, None if the template is gone. ``now`` and all instants are seconds since
    the epoch. ``max_age`` (seconds, 0: none) stops older servers even if they are busy, like jupyterhub-idle-culler's
    option of that name. ``claim``: units of the session that spawns in quota need; None: none. ``held``: the idle share
    is taken only while a waiting spawn can use it, and no such spawn waits. ``quiet_until``: the earliest time of an
    idle action; ``claim`` ignores it. ``leaves``: the units that a waiting spawn leaves a session whose share is taken
    only then; None: no spawn needs it, or the share is taken in any case.

    An action is due only after a notice: the notice's time has come, and no work came since. A late notice delays the
    action, so that users always have their notice period. Instants in the future, or a clock that was set back, make a
    session count as less idle, never as more idle.

    A keep prevents the idle actions of the template, not those of ``max_age`` and ``claim``. An exemption prevents all
    idle actions.
    """
    if session.exemption is not None and exempts(session.exemption, now):
        return _stay(session, NoAction.EXEMPT, decide_again_at=session.exemption.until)
    made_way = claim is not None and session.yields and session.effective_units <= claim.units
    due: Due | NoAction = NoAction.TEMPLATE_GONE
    kept_until: float | None = None
    if session.keep is not None and holds(session.keep, now) and idle is not None:
        due, kept_until = NoAction.KEPT, session.keep.until
    elif idle is not None:
        due = next_idle_action(idle, session, held, quiet_until, leaves)
    stops = isinstance(due, Due) and due.tier is Tier.STOPPED and now >= due.tell_at
    if made_way and not stops:
        # the spawns need these units, so a tier between is useless; the template can still stop the session
        due, kept_until = NoAction.YIELDS, None
    if claim is not None:
        due = _sooner(due, reclaim_action(claim, session), session, now)
    if idle is None:
        return _stay(session, due) if isinstance(due, NoAction) else _approach(due, session, now)
    end = max_age_action(idle, session, max_age).outside(quiet_until) if max_age > 0 else None
    if end is not None and (isinstance(due, NoAction) or now >= end.tell_at):
        due, end = end, None
    if isinstance(due, NoAction):
        return _stay(session, due, notice=_standing(session, due), decide_again_at=kept_until)
    decision = _approach(due, session, now)
    return decision if end is None else _at_latest(decision, end.tell_at)


def _standing(session: Observation, why: NoAction) -> IdleAction | None:
    """Return the action of the user's notice while the running work is too short to withdraw it; None: no notice."""
    notice = session.notice
    if why is not NoAction.GPU_BUSY or notice is None or notice.use is None or session.short_work is None:
        return None
    cause = notice.cause or IdleCause.IDLE
    return IdleAction(
        notice.tier, notice.effective_units, notice.at, notice.after_seconds, cause, session.short_work.rule
    )


def _sooner(due: Due | NoAction, reclaim: Due | None, session: Observation, now: float) -> Due | NoAction:
    """Return the earlier action: the template's, or the action for a spawn in quota."""
    if reclaim is None:
        return due
    if isinstance(due, NoAction) or _comes(reclaim, session, now) <= _comes(due, session, now):
        return reclaim
    return due


def _comes(due: Due, session: Observation, now: float) -> float:
    """Return the time of an action if nothing changes."""
    notice = session.notice
    earliest = due.earliest(now)
    return (
        notice.at if notice is not None and _is_notice_of(notice, due) and notice.at <= earliest + _SLACK else earliest
    )


def _approach(due: Due, session: Observation, now: float) -> Decision:
    notice = session.notice
    earliest = due.earliest(now)
    if notice is None or not _is_notice_of(notice, due) or notice.at > earliest + _SLACK:
        coming = _coming(due, session, earliest)
        if now < due.tell_at:
            return _stay(session, NoAction.NOT_YET, upcoming=coming, decide_again_at=due.tell_at)
        return _stay(session, NoAction.NOTICE_PERIOD, notice=coming, upcoming=coming, decide_again_at=coming.at)
    at = max(notice.at, due.at)
    if now >= at and (later := due.quiet_until(due.tier, now)) > now:
        # the service comes too late: quiet hours have begun
        coming = _coming(due, session, later)
        return _stay(session, NoAction.NOTICE_PERIOD, notice=coming, upcoming=coming, decide_again_at=later)
    coming = _coming(due, session, notice.at)
    if now < at:
        return _stay(session, NoAction.NOTICE_PERIOD, notice=coming, upcoming=coming, decide_again_at=at)
    return Decision(
        due.tier, due.units, None, coming, coming, session.gpu_idle_since, session.gpu_quiet_since, decide_again_at=None
    )


def _coming(due: Due, session: Observation, at: float) -> IdleAction:
    counts_use = due.cause is IdleCause.IDLE and due.tier is not Tier.STOPPED
    short_of = session.short_work.rule if counts_use and session.short_work is not None else None
    return IdleAction(due.tier, due.units, at, due.after, due.cause, short_of)


def _is_notice_of(notice: Notice, due: Due) -> bool:
    """Return whether the notice is of this action. Later work makes a notice of an earlier time out of date."""
    # an older agent keeps no cause
    same_cause = notice.cause in (None, due.cause)
    same_action = notice.tier is due.tier and notice.effective_units == due.units
    if due.cause is IdleCause.RECLAIM and due.tier is not Tier.STOPPED:
        # a session that keeps more than its notice says needs no later notice
        same_action = is_reclaim_notice(notice) and notice.effective_units <= due.units
    return same_action and same_cause and notice.at >= due.at - _SLACK


def _stay(
    session: Observation,
    why: NoAction,
    notice: IdleAction | None = None,
    upcoming: IdleAction | None = None,
    decide_again_at: float | None = None,
) -> Decision:
    idle_since, worked_at = session.gpu_idle_since, session.gpu_quiet_since
    return Decision(
        session.tier, session.effective_units, why, notice, upcoming, idle_since, worked_at, decide_again_at
    )


def _at_latest(decision: Decision, instant: float) -> Decision:
    if decision.decide_again_at is None or decision.decide_again_at <= instant:
        return decision
    return replace(decision, decide_again_at=instant)


@dataclass(frozen=True)
class Overdue:
    """Reason to stop a server or to delete a user."""

    cause: IdleCause
    seconds: float
    """Time without activity, or age."""


def overdue(
    last_activity: float | None, started: float | None, now: float, timeout: float, max_age: float
) -> Overdue | None:
    """Return the reason to stop a server (or to delete a user); None: no reason.

    The limits are ``timeout`` seconds without activity, and an age of ``max_age`` seconds; 0: no limit. Without a
    known activity the start counts; without either, the result is None. Instants are seconds since the epoch.
    """
    seen = last_activity if last_activity is not None else started
    if timeout > 0 and seen is not None and now - seen >= timeout:
        return Overdue(IdleCause.IDLE, now - seen)
    if max_age > 0 and started is not None and now - started >= max_age:
        return Overdue(IdleCause.MAX_AGE, now - started)
    return None
