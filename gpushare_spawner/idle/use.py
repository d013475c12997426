"""GPU work that counts as use of a share, from the agents' reports, and the policy's observation of a session.

GPU work that is too short runs, but neither keeps nor restores a share. `DryRun` holds the tiers and notices that
sessions would have after a dry run's idle actions. Pure: time is an argument. The policy is in policy.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from gpushare_spawner.model.controls import Exemption, Keep
from gpushare_spawner.model.report import Notice, SessionReport
from gpushare_spawner.model.share import Share, Tier, UseRule
from gpushare_spawner.model.template import Idle

REGULAR = 3
"""Minimum number of short pieces of GPU work that form a pattern; fewer are coincidence."""
WAIT_FORGETS = 0.25
"""Fraction of the usual decay rate of GPU time that applies while GPU work waits for other sessions. It is above 0,
because otherwise a session that always waits could keep its share while rarely using the GPU."""
ROUNDING = 1e-6
"""Seconds."""

LEAST_USE = 1 / 60
"""The fraction of its first idle time for which a session must use the GPU to keep its share. Our choice is 5 s in 5
minutes. A session that uses the GPU for less than 0.1 % of 4 hours then keeps its full share for less than 10 % of that
time: its GPU seconds suffice for the initial period and for two more."""
MOST_MIN_USE = 15.0
"""GPU seconds. Our choice: a returning user of a template with long idle times waits no longer than this for the full
share, and 0.1 % of 4 hours is 14.4 s."""


def use_rule(idle: Idle) -> UseRule:
    """Return how much GPU work counts as use for a template."""
    first = idle.first_after or UseRule().window
    least = idle.min_use if idle.min_use is not None else min(MOST_MIN_USE, first * LEAST_USE)
    return UseRule(min_use=least, window=first)


class UseCount:
    """Sum of a session's GPU work until it counts as use of its share, see `UseRule`."""

    def __init__(self, at: float, gpu_seconds: float) -> None:
        """Start at the instant ``at`` (seconds since the epoch), when the session had used ``gpu_seconds``."""
        self.at = at
        self.gpu_seconds = gpu_seconds
        self.busy = False
        self._completed = 0.0
        """GPU seconds without work in progress, which is only estimated until it ends. They never decrease, unless the
        agent loses them."""
        self._sum = 0.0

    def add(self, at: float, gpu_seconds: float, busy: bool, rule: UseRule) -> bool:
        """Add the GPU work until ``at``. Return whether it counts as use.

        ``busy``: work runs or waits. It is unknown when work ran since the last call, so it counts in full and decays
        only from ``at`` on. Waiting does not count.
        """
        lost = gpu_seconds < self._completed - ROUNDING
        grown = 0.0 if lost else gpu_seconds - self.gpu_seconds
        forgotten = max(0.0, at - self.at) * rule.min_use / rule.window
        if busy and self.busy and grown <= 0:
            forgotten *= WAIT_FORGETS
        enough = self._sum + grown >= min(rule.min_use, rule.window) - ROUNDING
        self._sum = min(rule.min_use, max(0.0, max(0.0, self._sum - forgotten) + grown))
        if lost or not busy:
            self._completed = gpu_seconds
        self.at, self.gpu_seconds, self.busy = at, gpu_seconds, busy
        return enough

    def counts_from(self, rule: UseRule) -> float:
        """Return the session's GPU seconds at which its work counts as use."""
        return self.gpu_seconds + max(0.0, min(rule.min_use, rule.window) - self._sum)


@dataclass(frozen=True)
class ShortWork:
    """GPU work since the last use of a share that was too short to count as use."""

    times: int
    rule: UseRule
    longest_gap: float
    """The longest gap in seconds between two pieces of short work, or between the last use and the first piece."""

    def would_keep(self, after: float, idle: float) -> bool:
        """Return whether the work would have kept a share that is taken after ``after`` seconds without GPU work.

        ``idle``: seconds since the last use.
        """
        return self.times >= REGULAR and idle >= after > self.longest_gap


@dataclass(frozen=True)
class Observation:
    """A session as its agent and the hub report it. Instants are seconds since the epoch."""

    share: Share
    """The share that the session is entitled to."""
    tier: Tier
    tier_since: float
    effective_units: int
    """Units that the tier leaves the session now, on each of its GPUs."""
    opened_at: float
    gpu_busy: bool = False
    """Whether a burst runs or waits for a lease."""
    waits_in_vain: bool = False
    """Whether GPU work has run or waited for so long without counting as use that it no longer delays idle actions."""
    last_gpu_activity: float | None = None
    """End of the last burst; None if there is none yet."""
    gpu_seconds: float = 0.0
    """Seconds with a burst on the GPU since the session was opened."""
    used_at: float | None = None
    """End of the last GPU work that counted as use. None: `last_gpu_activity` counts."""
    short_work: ShortWork | None = None
    """Later GPU work that did not count as use. None if there was none."""
    use_rule: UseRule | None = None
    """Amount of GPU work that counts as use. None if any amount counts."""
    use_from_gpu_seconds: float | None = None
    """GPU seconds at which the session's work counts as use again. None: all work counts."""
    kernels_busy: int = 0
    """Kernels that run a cell; 0 also if the notebook server has not reported them."""
    last_kernel_activity: float | None = None
    hub_last_activity: float | None = None
    """The server's last activity, from the hub. None: unknown; the server is then not stopped."""
    yields: bool = False
    """Whether the units that its tier took are reserved for spawns in quota."""
    notice: Notice | None = None
    """The current notice of the session's user."""
    keep: Keep | None = None
    """The user's last keep, possibly expired."""
    exemption: Exemption | None = None
    """An admin's last exemption, possibly expired."""

    @classmethod
    def of(cls, session: SessionReport, hub_last_activity: float | None = None) -> Observation:
        """Return the observation from the agent's report and the server's last activity as the hub knows it."""
        return cls(
            share=session.share,
            tier=session.tier,
            tier_since=session.tier_since,
            effective_units=session.effective_units,
            opened_at=session.begun,
            gpu_busy=session.gpu_busy or session.waiting,
            last_gpu_activity=session.last_gpu_activity,
            gpu_seconds=session.gpu_seconds,
            kernels_busy=session.kernels_busy or 0,
            last_kernel_activity=session.last_kernel_activity,
            hub_last_activity=hub_last_activity,
            yields=session.yields,
            notice=session.notice,
            keep=session.keep,
            exemption=session.exemption,
        )

    @property
    def has_worked(self) -> bool:
        """Whether the session has done GPU work. A restored share proves it, even if the agent has restarted."""
        restored = self.tier is Tier.ACTIVE and self.tier_since > self.opened_at
        return restored or self.last_gpu_activity is not None or self.gpu_seconds > 0

    @property
    def gpu_in_use(self) -> bool:
        """Whether running or waiting GPU work can still count as use. Such a session is not idle."""
        return self.gpu_busy and not self.waits_in_vain

    @property
    def gpu_idle_since(self) -> float:
        """End of the session's last GPU work that counts as use. The GPU can still be busy, see `gpu_busy`.

        For a session without GPU work, the time at which it was opened.
        """
        return self.gpu_quiet_since if self.used_at is None else max(self.opened_at, self.used_at)

    @property
    def gpu_quiet_since(self) -> float:
        """End of the session's last GPU work of any length.

        For an active session, at least its last change of tier: GPU work restored its share, even if a restarted agent
        has lost that work.
        """
        since = self.opened_at if self.last_gpu_activity is None else max(self.opened_at, self.last_gpu_activity)
        return max(since, self.tier_since) if self.tier is Tier.ACTIVE else since

    @property
    def quiet_since(self) -> float | None:
        """Last activity of GPU, kernels and notebook. None if the hub has not reported the notebook's activity."""
        if self.hub_last_activity is None:
            return None
        return max(self.gpu_quiet_since, self.hub_last_activity, self.last_kernel_activity or 0.0)


LONGEST_WAIT = 120.0
"""Maximum seconds for which GPU work that is too short, or that waits, delays downgrade and release, summed since the
last use. Our choice: one wait for a lease is shorter, and the work keeps the weight of the share even if the session
loses the share in the meantime."""
CLOCKS_DIFFER = 10.0
"""Seconds. A report that is older than the previous one by more than this comes from a clock that was set back."""


@dataclass
class _Reported:
    """The use of a session's share according to its reports. All instants are seconds since the epoch."""

    opened_at: float
    count: UseCount
    used_at: float
    """The end of the last GPU work that counted as use."""
    ended: float | None
    """The end of the last GPU work of any length."""
    rule: UseRule
    times: int = 0
    """Number of pieces of GPU work since the last use that were too short."""
    longest_gap: float = 0.0
    busy_for: float = 0.0
    """Seconds for which GPU work has run or waited since the last use."""

    @classmethod
    def begin(cls, seen: Observation, at: float, rule: UseRule) -> _Reported:
        """Return the state after a first report. All earlier GPU work counts as use, because its length is unknown."""
        count = UseCount(at, seen.gpu_seconds)
        used_at = at if seen.gpu_busy else seen.gpu_idle_since
        return cls(seen.opened_at, count, used_at, seen.last_gpu_activity, rule)

    def continues(self, seen: Observation, at: float) -> bool:
        """Return whether a report is from the same session and the clock was not set back."""
        return seen.opened_at == self.opened_at and at >= self.count.at - CLOCKS_DIFFER

    def advance(self, seen: Observation, at: float, rule: UseRule) -> None:
        """Add a later report."""
        end = seen.last_gpu_activity
        ended = end is not None and (self.ended is None or end > self.ended)
        if seen.gpu_busy and self.count.busy:
            self.busy_for += at - self.count.at
        used = self.count.add(at, seen.gpu_seconds, seen.gpu_busy, rule)
        work = at if end is None or seen.gpu_busy else end
        if used and (seen.gpu_busy or ended):
            self.used_at = max(self.used_at, work)
            self.times, self.longest_gap, self.busy_for = 0, 0.0, 0.0
        elif seen.gpu_busy or ended:
            before = self.used_at if not self.times or self.ended is None else self.ended
            self.longest_gap = max(self.longest_gap, work - before)
            self.times += 1
        self.ended, self.rule = end, rule


class RecentUse:
    """The last use of each session's share, by session id.

    GPU work before the first report counts as use, even after a restart of the service, because its length is unknown.
    """

    def __init__(self) -> None:
        self._reported: dict[str, _Reported] = {}

    def update(self, session: str, seen: Observation, at: float, rule: UseRule) -> None:
        """Add a session's report from the instant ``at``. A report that is older than the previous one is ignored."""
        reported = self._reported.get(session)
        if rule.min_use <= 0:
            self._reported.pop(session, None)
        elif reported is None or not reported.continues(seen, at):
            self._reported[session] = _Reported.begin(seen, at, rule)
        elif at >= reported.count.at:
            reported.advance(seen, at, rule)

    def observe(self, session: str, seen: Observation) -> Observation:
        """Return the observation with the session's last use and the work that counts toward the next use."""
        reported = self._reported.get(session)
        if reported is None or seen.opened_at != reported.opened_at:
            return seen
        seen = replace(seen, use_rule=reported.rule, use_from_gpu_seconds=reported.count.counts_from(reported.rule))
        if not reported.times:
            return seen
        work = ShortWork(reported.times, reported.rule, reported.longest_gap)
        in_vain = reported.busy_for >= min(reported.rule.window, LONGEST_WAIT)
        return replace(seen, used_at=reported.used_at, short_work=work, waits_in_vain=in_vain)

    def retain(self, sessions: Collection[str]) -> None:
        """Remove all other sessions, which have ended."""
        for session in [name for name in self._reported if name not in sessions]:
            del self._reported[session]


@dataclass(frozen=True)
class _Supposed:
    opened_at: float
    since: float
    """The time of the simulated tier change or notice."""
    tier: Tier
    units: int
    notice: Notice | None


class DryRun:
    """Simulated tiers and notices, by session id.

    GPU work that counts as use removes a session's entry, as if the agent had restored the session.
    """

    def __init__(self) -> None:
        self._supposed: dict[str, _Supposed] = {}

    def observe(self, session: str, seen: Observation) -> Observation:
        """Return the observation with the simulated tier and notice."""
        supposed = self._supposed.get(session)
        if supposed is None:
            return seen
        busy = seen.gpu_busy and seen.use_rule is None
        worked = busy or seen.gpu_idle_since > supposed.since
        if worked or supposed.opened_at != seen.opened_at or supposed.tier.depth < seen.tier.depth:
            del self._supposed[session]
            return seen
        if supposed.tier is seen.tier:
            return replace(seen, notice=supposed.notice)
        return replace(
            seen, tier=supposed.tier, tier_since=supposed.since, effective_units=supposed.units, notice=supposed.notice
        )

    def notify(self, session: str, seen: Observation, notice: Notice | None, now: float) -> None:
        """Simulate a notice to the session's user, or its withdrawal. ``seen``: the result of `observe`."""
        self._supposed[session] = _Supposed(seen.opened_at, now, seen.tier, seen.effective_units, notice)

    def act(self, session: str, seen: Observation, tier: Tier, units: int, now: float) -> None:
        """Simulate a change of the session's tier and units."""
        self._supposed[session] = _Supposed(seen.opened_at, now, tier, units, None)

    def retain(self, sessions: Collection[str]) -> None:
        """Remove all other sessions, which have ended."""
        for session in [name for name in self._supposed if name not in sessions]:
            del self._supposed[session]
