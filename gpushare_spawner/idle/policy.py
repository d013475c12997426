"""Which tier a session should be in now, and which notice its user should have.

The service downgrades, releases and stops, one announced action at a time. The agent restores a share by itself, as
soon as GPU work counts as use of it. Decisions depend only on the agent's report (tier and notice), so a decision can
be lost, or made twice. Words for actions and causes: `wording.idle_decisions`.

The action by which a session over quota makes way for a spawn in quota. Which session it is: quota/reclaim.py.

When servers without a GPU share, and users, are idle for too long, by the hub's list.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeGuard

from gpushare_spawner.idle.keep import exempts, holds
from gpushare_spawner.idle.schedule import (
    Due,
    NoAction,
    QuietUntil,
    max_age_action,
    never_quiet,
    next_idle_action,
)
from gpushare_spawner.idle.use import Observation
from gpushare_spawner.model.quota import Reclaim
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import IdleCause, Tier, UseRule
from gpushare_spawner.model.template import Idle


@dataclass(frozen=True)
class UnitsNeeded:
    """What spawns in quota that wait need of a session over quota."""

    units: int
    """What the session keeps, on each of its GPUs."""
    rules: Reclaim
    """Of the quotas in force."""


def reclaim_action(claim: UnitsNeeded, session: Observation) -> Due | None:
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


def _kept(claim: UnitsNeeded, session: Observation) -> int:
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


_SLACK = 1.0
"""Seconds by which a notice's time can differ from the exact time before users get a new notice."""


@dataclass(frozen=True)
class IdleAction:
    """A downgrade, release or stop, with its time (seconds since the epoch)."""

    tier: Tier
    units: int
    at: float
    after: float
    """Seconds of idleness, or of the server's life, at which it comes."""
    cause: IdleCause = IdleCause.IDLE
    short_of: UseRule | None = None
    """The session did GPU work in that time, less than this rule asks for. None: it did none."""


@dataclass(frozen=True)
class Decision:
    """The state that a session should be in now. The caller compares it with the actual state."""

    tier: Tier
    """The tier that the session should be in: its present one, or a deeper one."""
    units: int
    """Units (per GPU) that it should hold there."""
    no_action: NoAction | None
    """Why the session stays in its tier; None: the action is due now."""
    notice: IdleAction | None
    """The action that the user should have a notice of; None: no notice, and one that stands is withdrawn."""
    upcoming: IdleAction | None
    """The next action if the session stays idle, announced or not; None: there is none."""
    idle_since: float
    """The last use of the GPU."""
    worked_at: float
    """The last GPU work, even if it is too short to count as use; later work invalidates the decision."""
    decide_again_at: float | None
    """When time alone changes the decision; None: never."""


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

    ``idle`` is that of its template, None where the template is gone. ``now`` and all instants are seconds since the
    epoch. ``max_age`` (seconds, 0: none) stops older servers even if they are busy, as jupyterhub-idle-culler's option
    of that name does. ``claim``: what spawns in quota need of the session; None: nothing. ``held``: its idle share is
    taken only while a spawn waits that can use it, and none does. ``quiet_until``: when an idle action can come at the
    earliest; ``claim`` does not wait for it. ``leaves``: the units that a spawn which waits leaves a session whose
    share is taken only then; None: no spawn needs it, or the share is taken in any case.

    An action is due only after a notice: the notice's time has come, and there was no work since it was sent. A late
    notice delays the action, so that users always have their notice period. Instants in the future, or a clock that
    was set back, make a session count as less idle, never as more.

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
        # its units are what the spawns need, so no tier between is of use; its template can still stop it
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
    """Return the action of the user's notice where work runs that is too short yet to withdraw it; None: no notice."""
    told = session.notice
    if why is not NoAction.GPU_BUSY or told is None or told.use is None or session.short_work is None:
        return None
    cause = told.cause or IdleCause.IDLE
    return IdleAction(told.tier, told.effective_units, told.at, told.after_seconds, cause, session.short_work.rule)


def _sooner(due: Due | NoAction, reclaim: Due | None, session: Observation, now: float) -> Due | NoAction:
    """Return the action that comes first: of the template, or for a spawn in quota."""
    if reclaim is None:
        return due
    if isinstance(due, NoAction) or _comes(reclaim, session, now) <= _comes(due, session, now):
        return reclaim
    return due


def _comes(due: Due, session: Observation, now: float) -> float:
    """Return when an action comes if nothing changes."""
    told = session.notice
    earliest = due.earliest(now)
    return told.at if told is not None and _announces(told, due) and told.at <= earliest + _SLACK else earliest


def _approach(due: Due, session: Observation, now: float) -> Decision:
    told = session.notice
    earliest = due.earliest(now)
    if told is None or not _announces(told, due) or told.at > earliest + _SLACK:
        coming = _coming(due, session, earliest)
        if now < due.tell_at:
            return _stay(session, NoAction.NOT_YET, upcoming=coming, decide_again_at=due.tell_at)
        return _stay(session, NoAction.NOTICE_PERIOD, notice=coming, upcoming=coming, decide_again_at=coming.at)
    at = max(told.at, due.at)
    if now >= at and (later := due.quiet_until(due.tier, now)) > now:
        # the service comes too late: quiet hours have begun
        coming = _coming(due, session, later)
        return _stay(session, NoAction.NOTICE_PERIOD, notice=coming, upcoming=coming, decide_again_at=later)
    coming = _coming(due, session, told.at)
    if now < at:
        return _stay(session, NoAction.NOTICE_PERIOD, notice=coming, upcoming=coming, decide_again_at=at)
    return Decision(
        due.tier, due.units, None, coming, coming, session.gpu_idle_since, session.gpu_quiet_since, decide_again_at=None
    )


def _coming(due: Due, session: Observation, at: float) -> IdleAction:
    counts_use = due.cause is IdleCause.IDLE and due.tier is not Tier.STOPPED
    short_of = session.short_work.rule if counts_use and session.short_work is not None else None
    return IdleAction(due.tier, due.units, at, due.after, due.cause, short_of)


def _announces(told: Notice, due: Due) -> bool:
    """Return whether the notice is of this action; a notice for an earlier time is out of date by work since."""
    # an older agent keeps no cause
    same_cause = told.cause in (None, due.cause)
    same_action = told.tier is due.tier and told.effective_units == due.units
    if due.cause is IdleCause.RECLAIM and due.tier is not Tier.STOPPED:
        # who keeps more than the notice says needs no later one
        same_action = tells_of_reclaim(told) and told.effective_units <= due.units
    return same_action and same_cause and told.at >= due.at - _SLACK


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
    """Why a server is stopped, or a user is deleted."""

    cause: IdleCause
    seconds: float
    """Time without activity, or age."""


def overdue(
    last_activity: float | None, started: float | None, now: float, timeout: float, max_age: float
) -> Overdue | None:
    """Return why a server is stopped (or a user is deleted); None: no reason.

    The limits are ``timeout`` seconds without activity, and an age of ``max_age`` seconds; 0: no limit. Without a
    known activity the start counts; without either, the result is None. Instants are seconds since the epoch.
    """
    seen = last_activity if last_activity is not None else started
    if timeout > 0 and seen is not None and now - seen >= timeout:
        return Overdue(IdleCause.IDLE, now - seen)
    if max_age > 0 and started is not None and now - started >= max_age:
        return Overdue(IdleCause.MAX_AGE, now - started)
    return None
