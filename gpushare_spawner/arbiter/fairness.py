"""Weighted fair order of sessions: earliest eligible virtual deadline first.

After I. Stoica and H. Abdel-Wahab, "Earliest Eligible Virtual Deadline First: A Flexible and Accurate Mechanism for
Proportional Share Resource Allocation", Old Dominion University TR-95-22, 1995.

Each session has a virtual time: the service it was charged, divided by its weight. The common virtual time V is the
weighted average over those that compete, so the lags (what somebody is owed, in seconds) always add up to nothing.
Eligible is who is owed something (its virtual time is not past V); among the eligible the one whose request is due
first comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

TOLERANCE = 1e-9
"""Virtual times closer than this are the same: sums of floats."""


@dataclass
class _Entry:
    weight: int
    virtual: float = 0.0
    deadline: float = 0.0
    competing: bool = False
    owed: float = 0.0
    """Lag in seconds at the time it stopped to compete, if it was owed something."""


class FairOrder:
    """Virtual time of the sessions on one GPU. Unknown sessions raise KeyError."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._last_virtual = 0.0
        self._sums: tuple[int, float] | None = None
        """Total weight and V, until something changes."""

    def add(self, session: str, weight: int) -> None:
        """A new session; it does not compete yet. `weight` is at least 1."""
        self._entries[session] = _Entry(weight, virtual=self._last_virtual, deadline=self._last_virtual)

    def remove(self, session: str) -> None:
        """The session is gone, with all that it is owed or owes."""
        self.leave(session)
        del self._entries[session]

    @property
    def total_weight(self) -> int:
        """Sum of the weights of those that compete."""
        return self._summed()[0]

    @property
    def virtual_time(self) -> float:
        """V; where nobody competes, what it was last."""
        return self._summed()[1]

    def _summed(self) -> tuple[int, float]:
        if self._sums is None:
            competing = [entry for entry in self._entries.values() if entry.competing]
            total = sum(entry.weight for entry in competing)
            if total:
                self._last_virtual = sum(entry.weight * entry.virtual for entry in competing) / total
            self._sums = total, self._last_virtual
        return self._sums

    def lag(self, session: str) -> float:
        """Seconds of service that a competing session is owed; negative: it had too much. 0 for one that does not
        compete."""
        entry = self._entries[session]
        return (self.virtual_time - entry.virtual) * entry.weight if entry.competing else 0.0

    def eligible(self, session: str) -> bool:
        """Whether it has had no more than its part."""
        return self._entries[session].virtual <= self.virtual_time + TOLERANCE

    def set_weight(self, session: str, weight: int) -> None:
        """Change the weight; the lag stays."""
        entry = self._entries[session]
        if entry.weight == weight:
            return
        others = self.total_weight - entry.weight
        if not entry.competing or not others:
            entry.weight = weight
            self._sums = None
            return
        lag = self.lag(session)
        self._take_out(entry)
        entry.weight = weight
        self._put_in(entry, lag)

    def join(self, session: str, request: float) -> None:
        """It has work now, of `request` seconds to begin with. Nothing for one that competes already."""
        entry = self._entries[session]
        if entry.competing:
            return
        virtual = self.virtual_time
        if entry.owed > 0:
            self._put_in(entry, min(entry.owed, request))
        else:
            # Back where it was, unless the others have come further meanwhile: then its debt is paid off.
            entry.virtual = max(virtual, entry.virtual) if self.total_weight else virtual
            entry.competing = True
            self._sums = None
        entry.owed = 0.0
        entry.deadline = entry.virtual + request / entry.weight

    def leave(self, session: str) -> None:
        """It has no work any more. What it is owed is kept for its return; what it owes is paid off meanwhile."""
        entry = self._entries[session]
        if not entry.competing:
            return
        entry.owed = max(0.0, self.lag(session))
        self._take_out(entry)

    def charge(self, session: str, seconds: float) -> None:
        """It had the GPU for so long; negative: a refund."""
        entry = self._entries[session]
        entry.virtual += seconds / entry.weight
        self._sums = None

    def forgive(self, session: str, seconds: float) -> None:
        """Let nobody owe more than `seconds` of service."""
        entry = self._entries[session]
        entry.virtual = min(entry.virtual, self.virtual_time + seconds / entry.weight)
        self._sums = None

    def forget(self, session: str, seconds: float) -> None:
        """Let a session that was not kept waiting be owed no more than `seconds` of service.

        It had what it could use; were it owed the rest, all others would seem to have had too much, and alike.
        """
        entry = self._entries[session]
        others = self.total_weight - entry.weight
        if entry.competing and others:
            theirs = (self.virtual_time * self.total_weight - entry.virtual * entry.weight) / others
            entry.virtual = max(entry.virtual, theirs - seconds / entry.weight)
            self._sums = None

    def order(self, sessions: Iterable[str], requests: Mapping[str, float]) -> list[str]:
        """The sessions, next one first: the eligible by deadline, then the others by deadline. Ties stay as they came.

        A request that has been served in full is renewed, with the seconds that `requests` names.
        """
        candidates = list(sessions)
        for session in candidates:
            entry = self._entries[session]
            if entry.virtual >= entry.deadline - TOLERANCE:
                entry.deadline = entry.virtual + requests[session] / entry.weight
        return sorted(candidates, key=lambda name: (not self.eligible(name), self._entries[name].deadline))

    def _take_out(self, entry: _Entry) -> None:
        self._last_virtual = self.virtual_time
        entry.competing = False
        self._sums = None

    def _put_in(self, entry: _Entry, lag: float) -> None:
        """So that the lag is `lag` after V has moved because of the newcomer."""
        virtual, others = self.virtual_time, self.total_weight
        if others:
            lag *= (others + entry.weight) / others
        else:
            lag = 0.0
        entry.virtual = virtual - lag / entry.weight
        entry.competing = True
        self._sums = None
