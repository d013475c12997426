"""The next step of a session, and when it would be due if nothing happens."""

from __future__ import annotations

from dataclasses import dataclass

from gpushare_spawner.idle import sentences
from gpushare_spawner.idle.notice import fair_notice
from gpushare_spawner.idle.observation import Observation
from gpushare_spawner.model.idle_cause import IdleCause
from gpushare_spawner.model.template import Idle
from gpushare_spawner.model.tier import Tier


@dataclass(frozen=True)
class Due:
    """A step down that nothing but time keeps from happening."""

    tier: Tier
    units: int
    """What the session holds after it, on each of its GPUs."""
    at: float
    """Seconds since the epoch; an announcement that comes late delays the step beyond this."""
    notice: float
    """Seconds that the user is told before."""
    reason: str
    after: float
    """Seconds of idleness, or of the server's life, at which it comes."""
    cause: IdleCause = IdleCause.IDLE

    @property
    def tell_at(self) -> float:
        """When the announcement is due."""
        return self.at - self.notice


@dataclass(frozen=True)
class NotDue:
    """Why there is no step at all as things are: a sentence."""

    reason: str


def idle_step(idle: Idle, session: Observation) -> Due | NotDue:
    """The one step that comes next for an idle session: the next deeper tier that its template names.

    Downgrade and release count from the last GPU work, whatever else goes on in the notebook; stop counts from the last
    activity of any kind, and never comes while a kernel is busy.
    """
    if session.gpu_busy:
        return NotDue("its GPU is busy")
    previous = 0.0  # idle seconds at which the step before this one came
    for tier in Tier:
        after = idle.after(tier)
        if after is None:
            continue
        units = idle.units(tier, session.share)
        # a downgrade to what the session holds already would take nothing: the template has changed since it was opened
        pointless = tier is Tier.DOWNGRADED and units >= session.effective_units
        if tier.depth > session.tier.depth and not pointless:
            return _due(tier, units, after, fair_notice(idle.warn_before, after - previous), session)
        previous = after
    return NotDue("its template has no further step")


def age_step(idle: Idle, session: Observation, max_age: float) -> Due:
    """The end of a server that may live for ``max_age`` seconds, busy or not."""
    notice = fair_notice(idle.warn_before, max_age)
    return Due(
        Tier.STOPPED, 0, session.opened_at + max_age, notice, sentences.too_old(max_age), max_age, IdleCause.MAX_AGE
    )


def _due(tier: Tier, units: int, after: float, notice: float, session: Observation) -> Due | NotDue:
    if tier is not Tier.STOPPED:
        reason = (
            sentences.downgrade(session.share, units, after)
            if tier is Tier.DOWNGRADED
            else sentences.release(session.share, after)
        )
        return Due(tier, units, session.gpu_idle_since + after, notice, reason, after)
    if session.kernels_busy:
        return NotDue("a kernel is busy")
    if session.quiet_since is None:
        return NotDue("the hub has not said when its server was last active")
    return Due(tier, units, session.quiet_since + after, notice, sentences.stop(after), after)
