"""Which GPU work counts as use of a share, by the agents' reports. Pure.

A session's GPU work that is too short runs all the same, and neither keeps nor restores a share.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from gpushare_spawner.idle.observation import Observation
from gpushare_spawner.idle.short_work import ShortWork, UseCount
from gpushare_spawner.model.tier import UseRule

LOST_COUNT = 1.0
"""GPU seconds. A count of GPU time that falls by more began anew; by less it was corrected after a burst."""
CLOCKS_DIFFER = 10.0
"""Seconds. A report that is older than the last one by more comes from a clock that was set back."""


@dataclass
class _Reported:
    """The use of one session by its reports. All instants are seconds since the epoch."""

    opened_at: float
    count: UseCount
    used_at: float
    """The end of the last GPU work that counted as use."""
    ended: float | None
    """The end of the last GPU work of any length."""
    rule: UseRule
    times: int = 0
    """How often GPU work since the last use was too short."""
    longest_gap: float = 0.0

    @classmethod
    def begin(cls, seen: Observation, at: float, rule: UseRule) -> _Reported:
        """All GPU work before the first report counts as use: nothing is known of its length."""
        count = UseCount(at, seen.gpu_seconds, seen.last_gpu_activity)
        return cls(seen.opened_at, count, seen.gpu_idle_since, seen.last_gpu_activity, rule)

    def continues(self, seen: Observation, at: float) -> bool:
        """Return whether a report is of the same session and count, by a clock that was not set back."""
        counted = seen.gpu_seconds >= self.count.gpu_seconds - LOST_COUNT
        return seen.opened_at == self.opened_at and counted and at >= self.count.at - CLOCKS_DIFFER

    def advance(self, seen: Observation, at: float, rule: UseRule) -> None:
        """Add a later report."""
        end = seen.last_gpu_activity
        ended = end is not None and (self.ended is None or end > self.ended)
        used = self.count.add(at, seen.gpu_seconds, seen.gpu_busy, end, rule)
        work = at if end is None or seen.gpu_busy else end
        if used and (seen.gpu_busy or ended):
            self.used_at = max(self.used_at, work)
            self.times, self.longest_gap = 0, 0.0
        elif seen.gpu_busy or ended:
            before = self.used_at if not self.times or self.ended is None else self.ended
            self.longest_gap = max(self.longest_gap, work - before)
            self.times += 1
        self.ended, self.rule = end, rule


class RecentUse:
    """The last use of each session's share, by the session's id.

    What is not known counts as use: all GPU work before the first report, also of a service that was restarted.
    """

    def __init__(self) -> None:
        self._reported: dict[str, _Reported] = {}

    def update(self, session: str, seen: Observation, at: float, rule: UseRule) -> None:
        """Add a report on a session, made at that instant. A report older than the last changes nothing."""
        reported = self._reported.get(session)
        if rule.min_use <= 0:
            self._reported.pop(session, None)
        elif reported is None or not reported.continues(seen, at):
            self._reported[session] = _Reported.begin(seen, at, rule)
        elif at >= reported.count.at:
            reported.advance(seen, at, rule)

    def observe(self, session: str, seen: Observation) -> Observation:
        """Return what is known of a session, with its last use and the work that counts as the next one."""
        reported = self._reported.get(session)
        if reported is None or seen.opened_at != reported.opened_at:
            return seen
        seen = replace(seen, use_rule=reported.rule, use_from_gpu_seconds=reported.count.counts_from(reported.rule))
        if not reported.times:
            return seen
        work = ShortWork(reported.times, reported.rule, reported.longest_gap)
        return replace(seen, used_at=reported.used_at, short_work=work)

    def keep(self, sessions: Collection[str]) -> None:
        """Forget all other sessions: they have ended."""
        for session in [name for name in self._reported if name not in sessions]:
            del self._reported[session]
