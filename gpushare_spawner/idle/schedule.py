"""The next idle action of a session, and when it is due if the session stays idle.

The idle actions of a session: its template's, with what the admin's policy says for all templates. Pure.
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
"""Seconds. The notice period is at most this where a spawn waits for the share of a session that was idle for its time
already. As the default of quotas' `reclaim.notice`: nothing is lost, and the spawn waits for as long."""

FIRST_WORK = 300.0
"""Seconds in which a session that has never worked loses no units: its user reads before the first cell runs. It is the
shortest time of the shipped templates, so it delays only shorter times, like those of the demo."""
FIRST_WORK_TIMES = 5
"""The delayed time is at most so many times the template's: an admin tries times of seconds, and sees them act."""

QuietUntil = Callable[[Tier, float], float]
"""Returns the first instant, from the given one on, at which an idle action into a tier can come."""


def never_quiet(tier: Tier, instant: float) -> float:
    """Return the instant: there are no quiet hours."""
    return instant


class NoAction(StrEnum):
    """Why no idle action is due. Words for it: `wording.idle_decisions`."""

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
    """No spawn waits that can use the session's units, and its idle share is taken only then."""
    KEPT = "kept"
    """The user keeps the share for a time."""
    EXEMPT = "exempt"
    """An admin has decided that no idle action comes to the session."""
    YIELDS = "yields"
    """The session made way for a spawn in quota that still waits."""


@dataclass(frozen=True)
class Due:
    """An idle action that comes with time, unless the session works."""

    tier: Tier
    units: int
    """What the session holds after it, on each of its GPUs."""
    at: float
    """Seconds since the epoch; a late notice delays the action beyond this."""
    notice: float
    """The notice period in seconds."""
    after: float
    """Seconds of idleness, or of the server's life, at which it comes."""
    cause: IdleCause = IdleCause.IDLE
    quiet_until: QuietUntil = never_quiet

    def earliest(self, now: float) -> float:
        """Return when the action can come if its notice is sent now."""
        return self.quiet_until(self.tier, max(self.at, now + self.notice))

    def outside(self, quiet_until: QuietUntil) -> Due:
        """Return the action after the quiet hours that it would come in."""
        return replace(self, at=quiet_until(self.tier, self.at), quiet_until=quiet_until)

    @property
    def tell_at(self) -> float:
        """When the notice is due."""
        return self.at - self.notice


def next_idle_action(
    idle: Idle,
    session: Observation,
    held: bool = False,
    quiet_until: QuietUntil = never_quiet,
    leaves: int | None = None,
) -> Due | NoAction:
    """Return an idle session's next action: into the next deeper tier of its template, or the one after that if quiet
    hours put it off for longer.

    Downgrade and release count from the last use of the GPU alone. A session that has never worked has a longer first
    notice, see `FIRST_WORK`. A stop counts from the last activity of any kind, and never comes while the GPU or a
    kernel is busy.
    ``held``: neither a downgrade nor a release comes now.
    ``leaves``: the units that a spawn which waits leaves the session; None: no spawn needs them. Then the action comes
    that takes as much, without one between, and not one that takes less than the user has a notice of: another notice
    would put the spawn off.
    """
    if session.gpu_in_use:
        return NoAction.GPU_BUSY
    told = session.notice
    if leaves is not None and told is not None and told.cause is IdleCause.IDLE and told.tier is not Tier.STOPPED:
        leaves = min(leaves, told.effective_units)
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
    """Return by how many seconds downgrade and release come later because the session has never worked."""
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
    """Return the notice period in seconds of an action that comes ``wait`` seconds after the previous one, or after
    work.

    It is ``warn_before``, or half of the wait if the wait is shorter: then the notice comes neither at the moment when
    the work ends nor at the moment of the action.
    """
    return warn_before if warn_before <= wait else wait / 2


FIELDS = tuple(IdleTimes.model_fields)
_AFTER = ("downgrade_after", "release_after", "stop_after")


def effective_idle(template: Template, policy: IdlePolicy, groups: Collection[str] | None = ()) -> Idle:
    """Return the idle actions of a session of this template whose user is in these groups.

    What the template does not give comes from the policy's defaults; what the first of the user's groups in the policy
    gives counts instead of both; limits bound the result. ``groups`` None: they are not known; then the most generous
    of all that they can be.
    """
    own = _given(policy.defaults) | _given(template.idle)
    if groups is None:
        values = _most_generous([own, *(_over(own, _given(one)) for one in policy.groups.values())])
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
    """Return the group whose entry counts for a user in these groups: the first of the policy; None: none does."""
    return next((name for name in policy.groups if name in groups), None)


def _given(times: Idle | IdleTimes) -> dict[str, Any]:
    """Return the fields that were written; a keep as its own written fields."""
    found = {name: getattr(times, name) for name in FIELDS if name in times.model_fields_set}
    for name in ("warn_before", "when", "min_use", "keep"):
        if name in found and found[name] is None:
            del found[name]  # only of times does it mean something: never
    return found


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields with others above them."""
    merged = {**below, **above}
    if "keep" in below and "keep" in above:
        written = above["keep"].model_dump(include=above["keep"].model_fields_set)
        merged["keep"] = below["keep"].model_copy(update=written)
    return merged


def _most_generous(choices: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return, of each field, what takes least from a session."""
    every = list(choices)
    values = dict(every[0])
    for name in _AFTER:
        times = [one[name] for one in every if one.get(name) is not None]
        values[name] = max(times) if len(times) == len(every) else None
    values["warn_before"] = max(map(_notice, every))
    values["downgrade_to"] = max((one["downgrade_to"] for one in every if one.get("downgrade_to")), default=None)
    values["min_use"] = min((one["min_use"] for one in every if "min_use" in one), default=None)
    values["when"] = "pressure" if any(one.get("when") == "pressure" for one in every) else values.get("when")
    return values


def _notice(values: Mapping[str, Any]) -> float:
    given: float | None = values.get("warn_before")
    return Idle().warn_before if given is None else given


def _earlier(time: float | None, limit: float) -> float:
    return limit if time is None else min(time, limit)


def _bounded_keep(keep: KeepLimits | None, limit: KeepLimits | None) -> KeepLimits | None:
    """Return a template's limits of keeps within the policy's. What is not given comes from the service's options."""
    if keep is None or limit is None:
        return keep
    bounds = limit.model_dump(exclude_none=True)
    given = keep.model_dump(exclude_none=True)
    return keep.model_copy(update={name: min(value, bounds.get(name, value)) for name, value in given.items()})


def _consistent(template: Template, values: dict[str, Any]) -> dict[str, Any]:
    """Leave out idle actions that cannot be: of a share that is not there, or that come after a deeper one."""
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
