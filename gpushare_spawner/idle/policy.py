"""The policy that decides a session's tier and its user's notice, and finds overdue servers and users.

The service downgrades, releases and stops sessions, one action at a time, each after a notice. The agent itself
restores a share when GPU work counts as use. Decisions depend only on the tier and the notice in the agent's report, so
a decision that is lost or repeated does no harm. quota/reclaim.py chooses the sessions that make way for spawns in
quota. The texts for actions and causes are in `wording.idle_decisions`.

The module also computes a session's next idle action with its time, and the idle actions that the template and the
admin's policy define.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeGuard

from gpushare_spawner.idle.keep import KeepRule, exempts, keep_in_force
from gpushare_spawner.idle.use import Observation
from gpushare_spawner.model.idle_policy import PRESSURE_NOTICE, IdlePolicy, IdleTimes
from gpushare_spawner.model.quota import Reclaim
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import IdleCause, Share, Tier, UseRule, units_from_fraction
from gpushare_spawner.model.template import Idle, KeepLimits, Template

FIRST_WORK = 300.0
"""Seconds in which a session without GPU work loses no units, because its user may read before running the first cell.
No time in the shipped templates is shorter, so only shorter times, such as the demo's, are delayed."""
FIRST_WORK_TIMES = 5
"""Maximum factor by which a time is delayed, so that an admin can test with times of a few seconds."""

QuietUntil = Callable[[Tier, float], float]
"""Function that returns the first instant, not before the given one, at which an idle action into a tier is allowed."""


def never_quiet(tier: Tier, instant: float) -> float:
    """Return the instant unchanged: there are no quiet hours."""
    return instant


class NoAction(StrEnum):
    """Reasons why no idle action is due. Their texts are in `wording.idle_decisions`."""

    GPU_BUSY = "gpu-busy"
    KERNEL_BUSY = "kernel-busy"
    NO_FURTHER_ACTION = "no-further-action"
    """The session is in the deepest tier of its template."""
    ACTIVITY_UNKNOWN = "activity-unknown"
    """The hub has not yet reported the server's last activity."""
    TEMPLATE_GONE = "template-gone"
    NOT_YET = "not-yet"
    """The session has not been idle for long enough."""
    NOTICE_PERIOD = "notice-period"
    """The user has a notice, and the notice period has not ended."""
    NOT_NEEDED = "not-needed"
    """The idle share is taken only for a waiting spawn that can use it, and no such spawn waits."""
    KEPT = "kept"
    """The user keeps the share."""
    EXEMPT = "exempt"
    """An admin has exempted the session from all idle actions."""
    YIELDS = "yields"
    """The session has made way for a spawn in quota, which still waits."""
    USED_UP = "used-up"
    """The session has no units, because its budget is used up."""


@dataclass(frozen=True)
class IdleAction:
    """A downgrade, release or stop that becomes due unless the session works."""

    tier: Tier
    units: int
    """The session's units after the action, on each of its GPUs."""
    at: float
    """Seconds since the epoch. A notice that is not yet sent can delay the action further."""
    after: float
    """Idle seconds, or the server's age in seconds, after which the action is due."""
    cause: IdleCause = IdleCause.IDLE
    short_of: UseRule | None = None
    """The rule that the session's GPU work in that time did not satisfy. None if there was no GPU work."""
    notice: float = 0.0
    """The notice period in seconds."""
    quiet_until: QuietUntil = field(default=never_quiet, compare=False)

    def earliest(self, now: float) -> float:
        """Return the earliest time of the action if the notice is sent now."""
        return self.quiet_until(self.tier, max(self.at, now + self.notice))

    def outside(self, quiet_until: QuietUntil) -> IdleAction:
        """Return the action postponed to the end of quiet hours."""
        return replace(self, at=quiet_until(self.tier, self.at), quiet_until=quiet_until)

    @property
    def tell_at(self) -> float:
        """Time at which the notice is due."""
        return self.at - self.notice


def next_idle_action(
    idle: Idle,
    session: Observation,
    only_if_needed: bool = False,
    quiet_until: QuietUntil = never_quiet,
    units_left: int | None = None,
) -> IdleAction | NoAction:
    """Return an idle session's next action.

    The action leads to the template's next deeper tier, or to the tier after that if quiet hours delay the next tier
    longer. The time of a downgrade or release counts from the last use of the GPU. A session without GPU work has a
    longer first notice, see `FIRST_WORK`. The time of a stop counts from the last activity of any kind, and a session
    is never stopped while the GPU or a kernel is busy. ``only_if_needed``, ``units_left``: see `decide`. The action
    takes all needed units in one step, and at least as many as the user's notice states, because another notice would
    delay the spawn.
    """
    if session.gpu_in_use:
        return NoAction.GPU_BUSY
    sent = session.notice
    if units_left is not None and sent is not None and sent.cause is IdleCause.IDLE and sent.tier is not Tier.STOPPED:
        units_left = min(units_left, sent.effective_units)
    none = NoAction.NO_FURTHER_ACTION
    soonest: IdleAction | None = None
    previous = 0.0  # idle seconds at which the preceding action was due
    for tier in Tier:
        after = idle.after(tier)
        if after is None:
            continue
        units = idle.units(tier, session.share)
        # the template has changed since the session was opened, and a downgrade would take no units
        pointless = tier is Tier.DOWNGRADED and units >= session.effective_units
        too_little = units_left is not None and tier is not Tier.STOPPED and units > units_left
        further = tier.depth > session.tier.depth and not pointless and not too_little
        if further and only_if_needed and units_left is None and tier is not Tier.STOPPED:
            none = NoAction.NOT_NEEDED
        elif further:
            notice = fair_notice(idle.warn_before, after - previous)
            later = first_work_delay(idle, session) if tier is not Tier.STOPPED else 0.0
            if not previous:
                notice += later
            if units_left is not None and tier is not Tier.STOPPED:
                notice = min(notice, PRESSURE_NOTICE)
            due = _due(tier, units, after + later, notice, session)
            if isinstance(due, NoAction):
                none = due
            elif soonest is None or due.outside(quiet_until).at <= soonest.at:
                soonest = due.outside(quiet_until)
        previous = after
    return soonest if soonest is not None else none


def first_work_delay(idle: Idle, session: Observation) -> float:
    """Return the seconds by which downgrade and release are delayed for a session without GPU work."""
    first = idle.first_after
    if session.has_worked or first is None:
        return 0.0
    return max(0.0, min(FIRST_WORK, FIRST_WORK_TIMES * first) - first)


def max_age_action(idle: Idle, session: Observation, max_age: float) -> IdleAction:
    """Return the stop of a server at the age of ``max_age`` seconds, even if it is busy."""
    notice = fair_notice(idle.warn_before, max_age)
    return IdleAction(Tier.STOPPED, 0, session.opened_at + max_age, max_age, IdleCause.MAX_AGE, notice=notice)


def _due(tier: Tier, units: int, after: float, notice: float, session: Observation) -> IdleAction | NoAction:
    if tier is not Tier.STOPPED:
        return IdleAction(tier, units, session.gpu_idle_since + after, after, notice=notice)
    if session.gpu_busy:
        return NoAction.GPU_BUSY
    if session.kernels_busy:
        return NoAction.KERNEL_BUSY
    if session.quiet_since is None:
        return NoAction.ACTIVITY_UNKNOWN
    return IdleAction(tier, units, session.quiet_since + after, after, notice=notice)


def fair_notice(warn_before: float, wait: float) -> float:
    """Return the notice period in seconds of an action that is due ``wait`` seconds after the previous action or work.

    The period is ``warn_before``, but at most half of ``wait``, so that the notice coincides neither with the end of
    the work nor with the action.
    """
    return warn_before if warn_before <= wait else wait / 2


FIELDS = tuple(IdleTimes.model_fields)
_AFTER = ("downgrade_after", "release_after", "stop_after")


def effective_idle(template: Template, policy: IdlePolicy, groups: Collection[str] | None = ()) -> Idle:
    """Return the idle actions of a session with this template and a user in these groups.

    Fields that the template does not set come from the policy's defaults. The policy's first group that contains the
    user overrides both. The policy's limits bound the result. If ``groups`` is None, the groups are unknown, and the
    most generous values apply.
    """
    own = _given(policy.defaults) | _given(template.idle)
    if groups is None:
        values = _most_generous([own, *(_over(own, _given(times)) for times in policy.groups.values())])
    else:
        group = group_of(policy, groups)
        values = _over(own, _given(policy.groups[group])) if group is not None else own
    values["keep"] = _bounded_keep(values.get("keep"), policy.limits.keep)
    for name, share_needed in (("release_after", True), ("stop_after", False)):
        limit = getattr(policy.limits, name)
        if limit is not None and (template.gpu is not None or not share_needed):
            values[name] = _earlier(values.get(name), limit)
    if policy.limits.warn_before is not None:
        values["warn_before"] = min(_notice(values), policy.limits.warn_before)
    return template.idle.model_copy(update=_consistent(template, values))


def group_of(policy: IdlePolicy, groups: Collection[str]) -> str | None:
    """Return the policy's first group that contains the user; None if no group does."""
    return next((name for name in policy.groups if name in groups), None)


def _given(times: Idle | IdleTimes) -> dict[str, Any]:
    """Return the fields that were set explicitly, also within a keep."""
    written = {name: getattr(times, name) for name in FIELDS if name in times.model_fields_set}
    for name in ("warn_before", "when", "min_use", "keep"):
        if name in written and written[name] is None:
            del written[name]  # None has a meaning only for times: never
    return written


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``below``, overridden by those of ``above``."""
    merged = {**below, **above}
    if "keep" in below and "keep" in above:
        written = above["keep"].model_dump(include=above["keep"].model_fields_set)
        merged["keep"] = below["keep"].model_copy(update=written)
    return merged


def _most_generous(choices: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the value of each field that takes the least from a session."""
    every = list(choices)
    values = dict(every[0])
    for name in _AFTER:
        times = [choice[name] for choice in every if choice.get(name) is not None]
        values[name] = max(times) if len(times) == len(every) else None
    values["warn_before"] = max(map(_notice, every))
    values["downgrade_to"] = max(
        (choice["downgrade_to"] for choice in every if choice.get("downgrade_to")), default=None
    )
    values["min_use"] = min((choice["min_use"] for choice in every if "min_use" in choice), default=None)
    values["when"] = "pressure" if any(choice.get("when") == "pressure" for choice in every) else values.get("when")
    return values


def _notice(values: Mapping[str, Any]) -> float:
    given: float | None = values.get("warn_before")
    return Idle().warn_before if given is None else given


def _earlier(time: float | None, limit: float) -> float:
    return limit if time is None else min(time, limit)


def _bounded_keep(keep: KeepLimits | None, limit: KeepLimits | None) -> KeepLimits | None:
    """Return a template's limits on keeps within the policy's, which also bound the defaults of `KeepRule`."""
    given, bounds = ({} if limits is None else limits.model_dump(exclude_none=True) for limits in (keep, limit))
    lower = {name: bound for name, bound in bounds.items() if bound < given.get(name, getattr(KeepRule, name))}
    return (keep or KeepLimits()).model_copy(update=lower) if lower else keep


def _consistent(template: Template, values: dict[str, Any]) -> dict[str, Any]:
    """Remove impossible idle actions: those without a share, or after a deeper action."""
    share = template.share
    values = {name: value for name, value in values.items() if value is not None or name in (*_AFTER, "downgrade_to")}
    release, stop = values.get("release_after"), values.get("stop_after")
    if share is None or (release is not None and stop is not None and release >= stop):
        values["release_after"] = release = None
    deeper = min((time for time in (release, stop) if time is not None), default=None)
    if not _downgrades(share, values, deeper):
        values["downgrade_after"] = values["downgrade_to"] = None
    if release is None:
        values["release_resources"] = None
    return values


def _downgrades(share: Share | None, values: Mapping[str, Any], deeper: float | None) -> bool:
    after, smaller = values.get("downgrade_after"), values.get("downgrade_to")
    if share is None or after is None or smaller is None or units_from_fraction(smaller) >= share.units:
        return False
    return deeper is None or after < deeper


@dataclass(frozen=True)
class UnitsNeeded:
    """The units of a session over quota that waiting spawns in quota need, or all of one whose budget is used up."""

    units: int
    """Units that the session keeps, on each of its GPUs."""
    rules: Reclaim
    """The quotas' rules in force."""
    cause: IdleCause = IdleCause.RECLAIM


def reclaim_action(reclaimed: UnitsNeeded, session: Observation) -> IdleAction | None:
    """Return the action by which the session makes way; None if it has made way and no more may be taken.

    A busy session makes way too, because it loses no data. A stop is due only after that, and never while a kernel is
    busy.
    """
    rules = reclaimed.rules
    if session.effective_units > reclaimed.units:
        units = _units_left(reclaimed, session)
        tier = Tier.DOWNGRADED if units else Tier.RELEASED
        return IdleAction(tier, units, session.opened_at, 0.0, reclaimed.cause, notice=rules.notice)
    quiet = session.quiet_since
    may_stop = session.yields and not session.gpu_busy and not session.kernels_busy
    if rules.stop_after is None or quiet is None or not may_stop:
        return None
    stop_at, after = quiet + rules.stop_after, rules.stop_after
    return IdleAction(Tier.STOPPED, 0, stop_at, after, IdleCause.RECLAIM, notice=rules.stop_notice)


def _units_left(reclaimed: UnitsNeeded, session: Observation) -> int:
    """Return the units that the session keeps, at least those in its notice.

    The units that the spawn needs from the session change with those of neighboring sessions. If each increase caused a
    new notice, such changes could delay the action forever. So the session first makes way as its notice states, and
    then gets a notice for the rest.
    """
    notice = session.notice
    if not is_reclaim_notice(notice) or notice.effective_units >= session.effective_units:
        return reclaimed.units
    return max(reclaimed.units, notice.effective_units)


def is_reclaim_notice(notice: Notice | None) -> TypeGuard[Notice]:
    """Return whether the notice is for a session that makes way."""
    makes_way = notice is not None and notice.cause is not None and notice.cause.makes_way
    return makes_way and notice is not None and notice.tier is not Tier.STOPPED


_SLACK = 1.0
"""Maximum difference in seconds between a notice's time and the exact time. A larger one causes a new notice."""


@dataclass(frozen=True)
class Decision:
    """The desired state of a session. The caller compares it with the actual state."""

    tier: Tier
    """Desired tier: the current tier or a deeper one."""
    units: int
    """Desired units (per GPU) in that tier."""
    no_action: NoAction | None
    """Why the session stays in its tier; None if an action is due now."""
    notice: IdleAction | None
    """The action that the user should have a notice of; None: no notice, and an existing notice is withdrawn."""
    upcoming: IdleAction | None
    """The next action if the session stays idle, with or without a notice; None if there is none."""
    idle_since: float
    """The last use of the GPU."""
    worked_at: float
    """The last GPU work, even if too short to count as use. Later work invalidates the decision."""
    decide_again_at: float | None
    """Time at which the decision changes without any event; None: never."""


def decide(
    idle: Idle | None,
    session: Observation,
    now: float,
    max_age: float = 0.0,
    reclaimed: UnitsNeeded | None = None,
    only_if_needed: bool = False,
    quiet_until: QuietUntil = never_quiet,
    units_left: int | None = None,
) -> Decision:
    """Decide the tier and the notice of one session.

    ``idle``: idle actions of its template; None if the template was removed. ``now`` and all instants are seconds since
    the epoch. ``max_age`` (seconds, 0: none) stops older servers even if they are busy, like jupyterhub-idle-culler's
    option of the same name. ``reclaimed``: the session's units that spawns in quota need, or None. ``only_if_needed``:
    the idle share is taken only for a waiting spawn that can use it. ``units_left``: the units that such a spawn leaves
    to the session; None if no spawn needs the share, or if it is taken in any case. ``quiet_until``: the earliest time
    of an idle action; it does not apply to ``reclaimed``.

    An action is due only when its notice's time has come and no work has run since the notice. A late notice delays the
    action, so users always have their notice period. Instants in the future, or a clock that was set back, make a
    session appear less idle, never more.

    A keep prevents the template's idle actions, but not those due to ``max_age`` and ``reclaimed``. An exemption
    prevents all idle actions.
    """
    if session.exemption is not None and exempts(session.exemption, now):
        return _no_action(session, NoAction.EXEMPT, decide_again_at=session.exemption.until)
    made_way = reclaimed is not None and session.yields and session.effective_units <= reclaimed.units
    due: IdleAction | NoAction = NoAction.TEMPLATE_GONE
    kept_until: float | None = None
    if session.keep is not None and keep_in_force(session.keep, now) and idle is not None:
        due, kept_until = NoAction.KEPT, session.keep.until
    elif idle is not None:
        due = next_idle_action(idle, session, only_if_needed, quiet_until, units_left)
    stops = isinstance(due, IdleAction) and due.tier is Tier.STOPPED and now >= due.tell_at
    if made_way and not stops:
        # the spawns need these units, so a tier in between does not help; the template can still stop the session
        used_up = reclaimed is not None and reclaimed.cause is IdleCause.BUDGET
        due, kept_until = NoAction.USED_UP if used_up else NoAction.YIELDS, None
    if reclaimed is not None:
        due = _sooner(due, reclaim_action(reclaimed, session), session, now)
    if idle is None:
        return _no_action(session, due) if isinstance(due, NoAction) else _notice_then_act(due, session, now)
    end = max_age_action(idle, session, max_age).outside(quiet_until) if max_age > 0 else None
    if end is not None and (isinstance(due, NoAction) or now >= end.tell_at):
        due, end = end, None
    if isinstance(due, NoAction):
        return _no_action(session, due, notice=_notice_to_keep(session, due), decide_again_at=kept_until)
    decision = _notice_then_act(due, session, now)
    if end is None or decision.decide_again_at is None:
        return decision
    return replace(decision, decide_again_at=min(decision.decide_again_at, end.tell_at))


def _notice_to_keep(session: Observation, why: NoAction) -> IdleAction | None:
    """Return the action in the user's notice while the running work is too short to withdraw the notice.

    Return None if there is no notice.
    """
    notice = session.notice
    if why is not NoAction.GPU_BUSY or notice is None or notice.use is None or session.short_work is None:
        return None
    cause = notice.cause or IdleCause.IDLE
    return IdleAction(
        notice.tier, notice.effective_units, notice.at, notice.after_seconds, cause, session.short_work.rule
    )


def _sooner(
    due: IdleAction | NoAction, reclaim: IdleAction | None, session: Observation, now: float
) -> IdleAction | NoAction:
    """Return the earlier of two actions: the template's, and the action for a spawn in quota."""
    if reclaim is None:
        return due
    if isinstance(due, NoAction) or _due_at(reclaim, session, now) <= _due_at(due, session, now):
        return reclaim
    return due


def _due_at(due: IdleAction, session: Observation, now: float) -> float:
    """Return the time at which an action is due if nothing changes."""
    notice = session.notice
    earliest = due.earliest(now)
    return (
        notice.at if notice is not None and _is_notice_of(notice, due) and notice.at <= earliest + _SLACK else earliest
    )


def _notice_then_act(due: IdleAction, session: Observation, now: float) -> Decision:
    notice = session.notice
    earliest = due.earliest(now)
    if notice is None or not _is_notice_of(notice, due) or notice.at > earliest + _SLACK:
        coming = _as_notified(due, session, earliest)
        if now < due.tell_at:
            return _no_action(session, NoAction.NOT_YET, upcoming=coming, decide_again_at=due.tell_at)
        return _no_action(session, NoAction.NOTICE_PERIOD, notice=coming, upcoming=coming, decide_again_at=coming.at)
    at = max(notice.at, due.at)
    if now >= at and (later := due.quiet_until(due.tier, now)) > now:
        # the service is too late: quiet hours have begun
        coming = _as_notified(due, session, later)
        return _no_action(session, NoAction.NOTICE_PERIOD, notice=coming, upcoming=coming, decide_again_at=later)
    coming = _as_notified(due, session, notice.at)
    if now < at:
        return _no_action(session, NoAction.NOTICE_PERIOD, notice=coming, upcoming=coming, decide_again_at=at)
    return Decision(
        due.tier, due.units, None, coming, coming, session.gpu_idle_since, session.gpu_quiet_since, decide_again_at=None
    )


def _as_notified(due: IdleAction, session: Observation, at: float) -> IdleAction:
    counts_use = due.cause is IdleCause.IDLE and due.tier is not Tier.STOPPED
    short_of = session.short_work.rule if counts_use and session.short_work is not None else None
    return replace(due, at=at, short_of=short_of)


def _is_notice_of(notice: Notice, due: IdleAction) -> bool:
    """Return whether the notice is for this action. Later work makes a notice with an earlier time obsolete."""
    # an older agent does not store the cause
    same_cause = notice.cause in (None, due.cause)
    same_action = notice.tier is due.tier and notice.effective_units == due.units
    if due.cause.makes_way and due.tier is not Tier.STOPPED:
        # a session that keeps more than its notice states needs no new notice
        same_action = is_reclaim_notice(notice) and notice.effective_units <= due.units
    return same_action and same_cause and notice.at >= due.at - _SLACK


def _no_action(
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


@dataclass(frozen=True)
class Overdue:
    """The reason to stop a server or to delete a user."""

    cause: IdleCause
    seconds: float
    """Time without activity, or the age."""


def overdue(
    last_activity: float | None, started: float | None, now: float, timeout: float, max_age: float
) -> Overdue | None:
    """Return the reason to stop a server (or to delete a user), or None.

    The limits are ``timeout`` seconds without activity and an age of ``max_age`` seconds; 0: no limit. If the last
    activity is unknown, the start counts; if both are unknown, the result is None. Instants are seconds since the
    epoch.
    """
    seen = last_activity if last_activity is not None else started
    if timeout > 0 and seen is not None and now - seen >= timeout:
        return Overdue(IdleCause.IDLE, now - seen)
    if max_age > 0 and started is not None and now - started >= max_age:
        return Overdue(IdleCause.MAX_AGE, now - started)
    return None
