"""Next idle action of a session with its time, and the idle actions that template and admin's policy define. Pure.

policy.py decides whether an action is due.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from gpushare_spawner.idle.use import Observation
from gpushare_spawner.model.idle_policy import IdlePolicy, IdleTimes
from gpushare_spawner.model.share import IdleCause, Share, Tier, units_from_fraction
from gpushare_spawner.model.template import Idle, KeepLimits, Template

PRESSURE_NOTICE = 60.0
"""Seconds. Maximum of the notice period while a spawn waits for the share of a session that is idle for long enough.
Equals the default of quotas' `reclaim.notice`: nothing is lost, and the spawn waits for as long."""

FIRST_WORK = 300.0
"""Seconds in which a session without GPU work loses no units: its user reads before the first cell runs. It is the
shortest time of the shipped templates, so it delays only shorter times, for example in the demo."""
FIRST_WORK_TIMES = 5
"""Maximum factor of the delayed time: an admin can try times of some seconds and see the effect."""

QuietUntil = Callable[[Tier, float], float]
"""Function that returns the first instant, from the given instant on, for an idle action into a tier."""


def never_quiet(tier: Tier, instant: float) -> float:
    """Return the instant: there are no quiet hours."""
    return instant


class NoAction(StrEnum):
    """Reasons why no idle action is due. Words for it: `wording.idle_decisions`."""

    GPU_BUSY = "gpu-busy"
    KERNEL_BUSY = "kernel-busy"
    NO_FURTHER_ACTION = "no-further-action"
    """The session is in the deepest tier of its template."""
    ACTIVITY_UNKNOWN = "activity-unknown"
    """The hub has not reported the server's last activity."""
    TEMPLATE_GONE = "template-gone"
    NOT_YET = "not-yet"
    """The session has not been idle for long enough."""
    NOTICE_PERIOD = "notice-period"
    """The user has a notice, and the notice period is running."""
    NOT_NEEDED = "not-needed"
    """No waiting spawn can use the session's units, and its idle share is taken only then."""
    KEPT = "kept"
    """The user keeps the share for a time."""
    EXEMPT = "exempt"
    """An admin has exempted the session from all idle actions."""
    YIELDS = "yields"
    """The session made way for a spawn in quota that still waits."""


@dataclass(frozen=True)
class Due:
    """Idle action that time brings unless the session works."""

    tier: Tier
    units: int
    """Units of the session after the action, on each of its GPUs."""
    at: float
    """Seconds since the epoch; a late notice delays the action beyond this."""
    notice: float
    """The notice period in seconds."""
    after: float
    """Idle seconds, or age of the server in seconds, at which the action comes."""
    cause: IdleCause = IdleCause.IDLE
    quiet_until: QuietUntil = never_quiet

    def earliest(self, now: float) -> float:
        """Return the earliest time of the action if its notice is sent now."""
        return self.quiet_until(self.tier, max(self.at, now + self.notice))

    def outside(self, quiet_until: QuietUntil) -> Due:
        """Return the action moved to the end of quiet hours."""
        return replace(self, at=quiet_until(self.tier, self.at), quiet_until=quiet_until)

    @property
    def tell_at(self) -> float:
        """Time at which the notice is due."""
        return self.at - self.notice


def next_idle_action(
    idle: Idle,
    session: Observation,
    held: bool = False,
    quiet_until: QuietUntil = never_quiet,
    leaves: int | None = None,
) -> Due | NoAction:
    """Return an idle session's next action.

    The action leads into the next deeper tier of the template, or the tier after that if quiet hours delay the first
    for longer. Downgrade and release count from the last use of the GPU alone. A session without GPU work has a longer
    first notice, see `FIRST_WORK`. A stop counts from the last activity of any kind, and never comes while the GPU or a
    kernel is busy.
    ``held``: neither a downgrade nor a release comes now.
    ``leaves``: the units that a waiting spawn leaves the session; None: no spawn needs them. The action then takes as
    much in one step, and never less than the user's notice says: another notice would delay the spawn.
    """
    if session.gpu_in_use:
        return NoAction.GPU_BUSY
    sent = session.notice
    if leaves is not None and sent is not None and sent.cause is IdleCause.IDLE and sent.tier is not Tier.STOPPED:
        leaves = min(leaves, sent.effective_units)
    none = NoAction.NO_FURTHER_ACTION
    soonest: Due | None = None
    previous = 0.0  # idle seconds at which the action before this one came
    for tier in Tier:
        after = idle.after(tier)
        if after is None:
            continue
        units = idle.units(tier, session.share)
        # the template has changed since the session was opened: a downgrade would take no units
        pointless = tier is Tier.DOWNGRADED and units >= session.effective_units
        too_little = leaves is not None and tier is not Tier.STOPPED and units > leaves
        further = tier.depth > session.tier.depth and not pointless and not too_little
        if further and held and tier is not Tier.STOPPED:
            none = NoAction.NOT_NEEDED
        elif further:
            notice = fair_notice(idle.warn_before, after - previous)
            later = first_work_delay(idle, session) if tier is not Tier.STOPPED else 0.0
            if not previous:
                notice += later
            if leaves is not None and tier is not Tier.STOPPED:
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


def max_age_action(idle: Idle, session: Observation, max_age: float) -> Due:
    """Return the stop of a server at the age of ``max_age`` seconds, busy or not."""
    notice = fair_notice(idle.warn_before, max_age)
    return Due(Tier.STOPPED, 0, session.opened_at + max_age, notice, max_age, IdleCause.MAX_AGE)


def _due(tier: Tier, units: int, after: float, notice: float, session: Observation) -> Due | NoAction:
    if tier is not Tier.STOPPED:
        return Due(tier, units, session.gpu_idle_since + after, notice, after)
    if session.gpu_busy:
        return NoAction.GPU_BUSY
    if session.kernels_busy:
        return NoAction.KERNEL_BUSY
    if session.quiet_since is None:
        return NoAction.ACTIVITY_UNKNOWN
    return Due(tier, units, session.quiet_since + after, notice, after)


def fair_notice(warn_before: float, wait: float) -> float:
    """Return the notice period (seconds) of an action ``wait`` seconds after the previous action or after work.

    It is ``warn_before``, or half of a shorter wait: then the notice comes neither with the end of the work nor with
    the action.
    """
    return warn_before if warn_before <= wait else wait / 2


FIELDS = tuple(IdleTimes.model_fields)
_AFTER = ("downgrade_after", "release_after", "stop_after")


def effective_idle(template: Template, policy: IdlePolicy, groups: Collection[str] | None = ()) -> Idle:
    """Return the idle actions of a session of this template whose user is in these groups.

    Fields that the template does not set come from the policy's defaults. The entry of the user's first group in the
    policy overrides both. Limits bound the result. ``groups`` None: unknown groups, and the most generous values count.
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
    """Return the policy's first group that contains the user; None: no group does."""
    return next((name for name in policy.groups if name in groups), None)


def _given(times: Idle | IdleTimes) -> dict[str, Any]:
    """Return the fields that were written, with a keep as its own written fields."""
    written = {name: getattr(times, name) for name in FIELDS if name in times.model_fields_set}
    for name in ("warn_before", "when", "min_use", "keep"):
        if name in written and written[name] is None:
            del written[name]  # only for times None has a meaning: never
    return written


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields ``below`` overridden by ``above``."""
    merged = {**below, **above}
    if "keep" in below and "keep" in above:
        written = above["keep"].model_dump(include=above["keep"].model_fields_set)
        merged["keep"] = below["keep"].model_copy(update=written)
    return merged


def _most_generous(choices: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return for each field the value that takes least from a session."""
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
    """Return a template's limits of keeps within the policy's. Unset fields come from the service's options."""
    if keep is None or limit is None:
        return keep
    bounds = limit.model_dump(exclude_none=True)
    given = keep.model_dump(exclude_none=True)
    return keep.model_copy(update={name: min(value, bounds.get(name, value)) for name, value in given.items()})


def _consistent(template: Template, values: dict[str, Any]) -> dict[str, Any]:
    """Leave out impossible idle actions: without a share, or after a deeper action."""
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
