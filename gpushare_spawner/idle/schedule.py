"""The next idle action of a session, and when it is due if the session stays idle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from gpushare_spawner.idle.observation import Observation
from gpushare_spawner.model.idle_cause import IdleCause
from gpushare_spawner.model.template import Idle
from gpushare_spawner.model.tier import Tier

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
    notice, see `FIRST_WORK`. A stop counts from the last activity of any kind, and never comes while a kernel is busy.
    ``held``: neither a downgrade nor a release comes now.
    ``leaves``: the units that a spawn which waits leaves the session; None: no spawn needs them. Then the action comes
    that takes as much, without one between, and not one that takes less than the user has a notice of: another notice
    would put the spawn off.
    """
    if session.gpu_busy:
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
