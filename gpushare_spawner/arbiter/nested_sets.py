"""Nested sets: chooses which of the sessions that fit into the GPU's memory together run now.

The hardware gives equal time slices to all processes that have work, regardless of weights. Therefore, in each short
period, all sessions run until the session with the smallest need has had its part, then all but this session, and so
on. The session with the greatest need is never held back, so the GPU is never idle. After A. Parekh and R. Gallager's
generalized processor sharing, 1993. See docs/explanation/arbiter.md. Sessions that do not fit together: schedule.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpushare_spawner.arbiter.accounting import Accounts
from gpushare_spawner.arbiter.session import ArbiterSettings

OVERRUN_MEMORY = 0.5
"""Weight of the old estimate after another overrun (moving average)."""
LONGEST_PATIENCE = 0.05
"""Maximum seconds for which a quiet holder keeps its place."""
LONGEST_OVERRUN = 10.0
"""Maximum expected overrun in seconds."""


@dataclass
class _Place:
    held_back: bool = False
    overrun: float = 0.0
    """GPU seconds of queued work that the session typically receives after the order to stop."""
    had: float = 0.0
    """GPU seconds received by the start of the current period, or by the time the session joined."""
    stopped_at: float | None = None
    """GPU seconds received by the time of the order to stop; None after the stop."""


class NestedSets:
    """Sessions held back because they have had their part of the current period. Times are in seconds."""

    def __init__(self, accounts: Accounts, settings: ArbiterSettings) -> None:
        self._accounts = accounts
        self._settings = settings
        self._places: dict[str, _Place] = {}
        self._period_end = float("-inf")
        self.due: float | None = None
        """Next instant at which the set of held-back sessions changes without another event; None: no such instant."""
        self._present: frozenset[str] = frozenset()

    def forget(self, session: str) -> None:
        """Remove a session."""
        self._places.pop(session, None)

    @property
    def patience(self) -> float:
        """Seconds for which a quiet holder keeps its place before held-back sessions run.

        A quarter of those sessions' expected overrun, because they cannot be stopped earlier.
        """
        overruns = [place.overrun for place in self._places.values() if place.held_back]
        return min(LONGEST_PATIENCE, max(overruns, default=0.0) / 4)

    def held_back(
        self, now: float, processes: Mapping[str, int], alternating: frozenset[str] | None = None
    ) -> frozenset[str]:
        """Choose the sessions that must not run now.

        `processes`: the number of processes that would run, for each session with work that may be on the GPU.
        `alternating`: if not all sessions fit into memory, the sessions whose time slices alternate with others'. They
        share the GPU time that the other sessions leave. The time slices correct their lags.
        """
        for session, place in self._places.items():
            if session not in processes:
                place.held_back = False
        self.due = None
        if len(processes) < 2 or not self._accounts.saturated:
            for session in processes:
                self._place(session).held_back = False
            return frozenset()
        settings = self._settings
        if now >= self._period_end - 1e-6:
            self._period_end = now + settings.period
            self._present = frozenset()
        for session in processes.keys() - self._present:
            self._place(session).had = self._accounts.received(session)
        self._present = frozenset(processes)
        left = self._period_end - now
        needs = self._needs(processes, left, alternating)
        top = max(processes, key=lambda session: needs[session] / processes[session])
        for session in processes:
            place = self._place(session)
            if session == top:
                place.held_back = False
            elif place.held_back:
                place.held_back = needs[session] < settings.shortest_run
            else:
                place.held_back = needs[session] <= 1e-6 and left >= settings.shortest_hold
        chosen = frozenset(session for session in processes if self._places[session].held_back)
        running = {session: count for session, count in processes.items() if session not in chosen}
        total = sum(running.values())
        ends = [
            needs[session] / count * total
            for session, count in running.items()
            if session != top and 0 < needs[session] / count * total <= left - settings.shortest_hold
        ]
        if not ends and not chosen and _even(needs, processes):
            # even division may also give each session its part after this period
            parts = self._accounts.parts(self._accounts.working | processes.keys())
            self.due = None if _even(parts, processes) else self._period_end
        else:
            self.due = now + max(0.001, min(ends, default=left))
        return chosen

    def stopped(self, session: str) -> None:
        """Record the order to stop a session, so that others can run."""
        self._place(session).stopped_at = self._accounts.received(session)

    def drained(self, session: str) -> None:
        """Learn a session's overrun when it has no work left on the GPU."""
        place = self._place(session)
        if place.stopped_at is None:
            return
        overran = min(LONGEST_OVERRUN, max(0.0, self._accounts.received(session) - place.stopped_at))
        place.overrun = OVERRUN_MEMORY * place.overrun + (1 - OVERRUN_MEMORY) * overran
        place.stopped_at = None

    def _place(self, session: str) -> _Place:
        return self._places.setdefault(session, _Place())

    def _needs(self, processes: Mapping[str, int], left: float, alternating: frozenset[str] | None) -> dict[str, float]:
        """Return the GPU seconds that each session should still receive in this period."""
        if alternating is None:
            parts = self._accounts.parts(processes)
            lags = {session: self._accounts.lag(session) for session in processes}
            surplus = sum(lags.values())
            needs = {session: part * left + lags[session] - surplus * part for session, part in parts.items()}
        else:
            needs = self._needs_in_a_time_slice(processes, left, alternating)
        # Subtract half of the expected overrun to let errors average out.
        return {session: need - self._place(session).overrun / 2 for session, need in needs.items()}

    def _needs_in_a_time_slice(
        self, processes: Mapping[str, int], left: float, alternating: frozenset[str]
    ) -> dict[str, float]:
        period = self._settings.period
        of_all = self._accounts.parts(self._accounts.working | processes.keys())
        beside = {session: of_all[session] for session in processes if session not in alternating}
        needs = {
            session: part * left + min(period, max(-period, self._accounts.lag(session)))
            for session, part in beside.items()
        }
        taking = [session for session in processes if session in alternating]
        rest = max(0.0, 1.0 - sum(beside.values()))
        for session, part in self._accounts.parts(taking).items() if taking else ():
            had = self._accounts.received(session) - self._place(session).had
            needs[session] = part * rest * period - had
        return needs


def _even(seconds: Mapping[str, float], processes: Mapping[str, int]) -> bool:
    """Return whether the sessions' processes have equal parts of the seconds."""
    return len({round(seconds[session] / count, 9) for session, count in processes.items()}) == 1
