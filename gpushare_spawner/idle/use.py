"""Which GPU work counts as use of a share: enough GPU time in a sliding window, by the agents' reports. Pure.

A session's GPU work that is too short keeps no share. It restores a released share all the same: the agent does that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from gpushare_spawner.idle.observation import Observation
from gpushare_spawner.idle.short_work import ShortWork, UseRule
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.tier import Tier

LOST_COUNT = 1.0
"""GPU seconds. A count of GPU time that falls by more began anew; by less it was corrected after a burst."""
WAITED = 10.0
"""Seconds. GPU work that waits for a lease for this long counts as use: its length cannot be known."""
SAMPLES = 30
"""In a window at most, about. Ours: with 5,000 sessions they stay below 20 MB however often reports come."""
ROUNDING = 1e-6
"""Seconds."""
CLOCKS_DIFFER = 10.0
"""Seconds. A report that is older than the last one by more comes from a clock that was set back."""


@dataclass
class _Known:
    """One session by its reports."""

    opened_at: float
    at: float
    """The time of the last report; all instants are seconds since the epoch."""
    used_at: float
    """The end of the last GPU work that counted as use."""
    ended: float | None
    """The end of the last GPU work of any length."""
    tier: Tier
    """The deepest tier since the last use."""
    samples: deque[tuple[float, float]]
    """Instants and GPU seconds: the last one before the window, and those in it."""
    notice: Notice | None = None
    waiting_since: float | None = None
    times: int = 0
    longest_gap: float = 0.0
    rule: UseRule = field(default_factory=UseRule)

    @classmethod
    def begin(cls, seen: Observation, at: float) -> _Known:
        """All GPU work before the first report counts as use: nothing is known of its length."""
        return cls(
            opened_at=seen.opened_at,
            at=at,
            used_at=seen.gpu_idle_since,
            ended=seen.last_gpu_activity,
            tier=seen.tier,
            samples=deque([(at, seen.gpu_seconds)]),
        )

    def continues(self, seen: Observation, at: float) -> bool:
        """Return whether a report is of the same session and count, by a clock that was not set back."""
        counted = seen.gpu_seconds >= self.samples[-1][1] - LOST_COUNT
        return seen.opened_at == self.opened_at and counted and at >= self.at - CLOCKS_DIFFER

    def advance(self, seen: Observation, at: float, rule: UseRule) -> None:
        """Take note of a later report. GPU time between two reports can have come at any time between them: the window
        reaches back from the earlier one."""
        # with a sample left out an earlier one begins the window, which counts more and not less
        if seen.gpu_seconds != self.samples[-1][1] and at - self.samples[-1][0] >= rule.window / SAMPLES:
            self.samples.append((at, seen.gpu_seconds))
        while len(self.samples) > 1 and self.samples[1][0] <= self.at - rule.window:
            self.samples.popleft()
        end = seen.last_gpu_activity
        ended = end is not None and (self.ended is None or end > self.ended)
        if not seen.gpu_busy or ended:
            self.waiting_since = None
        if seen.gpu_busy and self.waiting_since is None:
            self.waiting_since = at
        waits_long = self.waiting_since is not None and at - self.waiting_since >= WAITED
        enough = seen.gpu_seconds - self.samples[0][1] >= min(rule.min_use, rule.window) - ROUNDING
        if not seen.gpu_busy and not ended:
            # no work has withdrawn the notice
            self.notice = seen.notice
            self.tier = max(self.tier, seen.tier, key=lambda tier: tier.depth)
        elif enough or waits_long:
            self.used_at = max(self.used_at, at if seen.gpu_busy or end is None else end)
            self.tier, self.notice, self.times, self.longest_gap = seen.tier, seen.notice, 0, 0.0
        else:
            work = at if end is None or seen.gpu_busy else end
            before = self.used_at if not self.times or self.ended is None else self.ended
            self.longest_gap = max(self.longest_gap, work - before)
            self.times += 1
            # the agent withdraws the notice of a session that works, and restores its share
            self.notice = seen.notice or self.notice
            self.tier = max(self.tier, seen.tier, key=lambda tier: tier.depth)
        self.at, self.ended, self.rule = at, end, rule


class RecentUse:
    """The use of each session, by the session's id, over the window.

    What is not known counts as use: all GPU work before the first report, also of a service that was restarted.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def update(self, session: str, seen: Observation, at: float, rule: UseRule) -> None:
        """Take note of a session by a report made at that instant. A report older than the last changes nothing."""
        known = self._known.get(session)
        if rule.min_use <= 0:
            self._known.pop(session, None)
        elif known is None or not known.continues(seen, at):
            self._known[session] = _Known.begin(seen, at)
        elif at >= known.at:
            known.advance(seen, at, rule)

    def notified(self, session: str, notice: Notice | None) -> None:
        """Take note of a notice that a session's user was sent, or that was withdrawn: short GPU work can withdraw it
        before the next report."""
        known = self._known.get(session)
        if known is not None:
            known.notice = notice

    def acted(self, session: str, tier: Tier) -> None:
        """Take note that an idle action took a session to this tier: short GPU work can restore it before the next
        report."""
        known = self._known.get(session)
        if known is not None:
            known.tier, known.notice = tier, None

    def observe(self, session: str, seen: Observation) -> Observation:
        """Return what is known of a session, with its last use where short GPU work came after that.

        Such work has withdrawn no notice, and the tier before it is in `settled`.
        """
        known = self._known.get(session)
        if known is None or not known.times or seen.opened_at != known.opened_at:
            return seen
        work = ShortWork(known.times, known.rule, known.longest_gap)
        notice = seen.notice or known.notice
        return replace(seen, used_at=known.used_at, short_work=work, settled=known.tier, notice=notice)

    def keep(self, sessions: Collection[str]) -> None:
        """Forget all other sessions: they have ended."""
        for session in [one for one in self._known if one not in sessions]:
            del self._known[session]
