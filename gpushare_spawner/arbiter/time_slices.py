"""Cost of a hand-off, length of time slices, credit for early ends, REVOKE time-outs, and interactive sessions.

schedule.py uses these to choose the sessions, and has the current `TimeSlice`; gpu_arbiter.py grants the leases and
marks a holder that keeps a revoked lease too long as overdue (`_decide`). This module has no clock.

Time slices may end early for interactive sessions, by least attained service. Attained service is the time for which a
session has held a lease and worked since its last pause. A session that returns after a pause has an attained service
of 0 and may replace the sessions with the most. This changes the order and frequency of service, never the amount: only
sessions that have received no more than their part are preferred.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from gpushare_spawner.arbiter.memory import VramBudget
from gpushare_spawner.arbiter.session import ArbiterSettings, ArbitratedSession, Client

SLOWEST, FASTEST = 1e7, 2e12
"""Bytes per second. Values outside this range are clock errors: NVLink-C2C has 0.4e12."""


TRUST = 4.0
"""Maximum factor between a single session's measurements and the guess: a process can report any figure, and a false
figure would lengthen all time slices or fill the GPU's time with memory moves."""


class Bandwidth:
    """Bytes per second of bulk paging in one direction, as measured by the sessions.

    Each session has a moving average. The estimate is their median: with three or more sessions, no single session
    moves it beyond the others' values. With two sessions, the guess is the third value. `TRUST` limits a single
    session.
    """

    def __init__(self, settings: ArbiterSettings) -> None:
        self._settings = settings
        self._measured: dict[str, float] = {}
        """Seconds per byte (costs are sums of times), by session."""
        self.value = self._settings.bandwidth_guess
        """Estimate; before the first measurement, the guess from the settings."""

    def _estimate(self) -> float:
        guess = self._settings.bandwidth_guess
        measured = list(self._measured.values())
        if len(measured) > 1:
            return 1 / median(measured if len(measured) > 2 else [*measured, 1 / guess])
        return min(guess * TRUST, max(guess / TRUST, 1 / measured[0])) if measured else guess

    def learn(self, session: str, amount: int, seconds: float) -> None:
        """Record a transfer of the session: `amount` in bytes, `seconds`."""
        if amount < self._settings.measured_from or seconds <= 0:
            return
        now = 1 / min(FASTEST, max(SLOWEST, amount / seconds))
        memory = self._settings.bandwidth_memory
        before = self._measured.get(session, now)
        self._measured[session] = memory * before + (1 - memory) * now
        self.value = self._estimate()

    def forget(self, session: str) -> None:
        """Remove a session."""
        if self._measured.pop(session, None) is not None:
            self.value = self._estimate()


@dataclass
class _Moves:
    """Moving averages of a session's moves."""

    amount: float
    """Bytes."""
    seconds: float


class SuspensionTimes:
    """Seconds that suspensions, or resumptions, take. The agent measures them itself.

    A move takes a time per byte plus a time that does not depend on the size. Only sums over the sessions are
    available, so a session's time beyond the common rate counts as independent of its size.
    """

    def __init__(self, settings: ArbiterSettings) -> None:
        self._settings = settings
        self._measured: dict[str, _Moves] = {}

    @property
    def rate(self) -> float:
        """Bytes per second of all sessions together; before the first measurement, the guess from the settings."""
        if not self._measured:
            return self._settings.bandwidth_guess
        moves = self._measured.values()
        return sum(move.amount for move in moves) / sum(move.seconds for move in moves)

    def learn(self, session: str, amount: int, seconds: float) -> None:
        """Record a move of the session: `amount` in bytes, `seconds`. Empty moves are ignored."""
        if amount <= 0 or seconds <= 0:
            return
        memory = self._settings.bandwidth_memory
        before = self._measured.get(session, _Moves(amount, seconds))
        self._measured[session] = _Moves(
            memory * before.amount + (1 - memory) * amount, memory * before.seconds + (1 - memory) * seconds
        )

    def forget(self, session: str) -> None:
        """Remove a session."""
        self._measured.pop(session, None)

    def seconds(self, session: str, amount: int) -> float:
        """Return the seconds for moving `amount` bytes of the session."""
        rate, own = self.rate, self._measured.get(session)
        if own is None or amount <= 0:
            return amount / rate
        fixed = max(0.0, own.seconds - own.amount / rate)
        return fixed + amount * (own.seconds - fixed) / own.amount


class HandOffCost:
    """Cost in seconds to move bytes in and out again."""

    def __init__(self, settings: ArbiterSettings) -> None:
        self._settings = settings
        self.bandwidth_in = Bandwidth(settings)
        self.bandwidth_out = Bandwidth(settings)
        self.suspend = SuspensionTimes(settings)
        self.resume = SuspensionTimes(settings)

    def forget(self, session: str) -> None:
        """Remove a session and its measurements."""
        for measured in (self.bandwidth_in, self.bandwidth_out, self.suspend, self.resume):
            measured.forget(session)

    def sequential(self, amount: int) -> float:
        """Return the seconds to move `amount` bytes in and out again without overlap: the cost of a time slice."""
        return self._settings.switch_seconds + amount / self.bandwidth_in.value + amount / self.bandwidth_out.value

    def suspend_and_resume(self, session: str, amount: int) -> float:
        """Return the seconds to resume and suspend a session with `amount` bytes."""
        moves = self.resume.seconds(session, amount) + self.suspend.seconds(session, amount)
        return self._settings.switch_seconds + moves

    def overlapped(self, amount: int) -> float:
        """Return the seconds that the GPU is idle while `amount` bytes move in and as many others move out."""
        slower = min(self.bandwidth_in.value, self.bandwidth_out.value)
        return self._settings.switch_seconds + amount / slower


@dataclass(frozen=True)
class TimeSliceLengths:
    """Lengths of time slices in a weighted round.

    A round with one hand-off per session must last T = (sum of the hand-off costs) / e for an overhead of at most e.
    Each session's time slice is its part of T by weight, so no session waits longer than T.
    """

    round_seconds: float
    by_session: Mapping[str, float]
    """Seconds of each session's time slice, including its own hand-off."""

    @classmethod
    def plan(
        cls, weights: Mapping[str, int], costs: Mapping[str, float], settings: ArbiterSettings, bound: float
    ) -> TimeSliceLengths:
        """Plan the lengths. `costs`: hand-off cost of each competing session in seconds. `bound`: e."""
        round_seconds = sum(costs.values()) / bound
        total = sum(weights.values())
        by_session = {
            session: max(round_seconds * weight / total, costs[session] + settings.min_time_slice)
            for session, weight in weights.items()
        }
        return cls(round_seconds, by_session)


class HandOffCredit:
    """Token bucket of hand-off seconds, refilled at the rate of an overhead bound.

    It can go below 0 after a forced hand-off.
    """

    def __init__(self, settings: ArbiterSettings, rate: float) -> None:
        """Create a full bucket. `rate`: seconds of hand-offs per second."""
        self._rate = rate
        self._capacity = settings.hand_off_credit
        self.seconds = settings.hand_off_credit

    def refill(self, elapsed: float) -> None:
        """Refill the bucket for elapsed seconds."""
        if self.seconds < self._capacity:
            self.seconds = min(self._capacity, self.seconds + elapsed * self._rate)

    def spend(self, seconds: float) -> None:
        """Spend the cost of a forced hand-off."""
        self.seconds -= seconds

    def wait_for(self, seconds: float) -> float:
        """Return the wait until `seconds` may be spent; 0: now; infinite for a bucket of capacity 0.

        A full bucket allows more than its capacity.
        """
        if seconds > 0 and not self._capacity:
            return float("inf")
        return max(0.0, min(seconds, self._capacity) - self.seconds) / self._rate


SHORTENED = 1 / 4
"""Factor after an ignored REVOKE: one step leads from the usual time to the shortest."""
LENGTHENED = 2.0
"""Factor after a timely answer: after one very long kernel, two answers restore the usual time."""


def revoke_timeout(session: ArbitratedSession, running: int, settings: ArbiterSettings) -> float:
    """Return the seconds after which others get leases while `running` sessions share the GPU evenly."""
    own = session.revoke_timeout
    return (settings.usual_revoke_timeout if own is None else own) * max(1, running)


def learn_revoke_timeout(session: ArbitratedSession, received: float, settings: ArbiterSettings) -> None:
    """Learn from an answer to REVOKE or from a disconnect. `received`: GPU seconds that the session received meanwhile.

    Only working processes are counted: quiet processes prove nothing. An answer within the usual time counts as timely
    even if the time-out was shorter: a kernel cannot be interrupted.
    """
    before = revoke_timeout(session, 1, settings)
    if received > settings.usual_revoke_timeout:
        session.revoke_timeout = max(settings.shortest_revoke_timeout, before * SHORTENED)
    else:
        session.revoke_timeout = min(settings.usual_revoke_timeout, before * LENGTHENED)


def is_interactive(session: ArbitratedSession, settings: ArbiterSettings) -> bool:
    """Return whether a user seems to be waiting for the session: it just returned, or has worked only briefly since.

    A session with typically long bursts counts only after `returning_pause`: programs also pause for seconds between
    phases.
    """
    short = (session.bursts.typical or 0.0) <= settings.short_burst
    return session.attained <= settings.short_burst and (short or session.pause >= settings.returning_pause)


def bound(waiting: Iterable[Client], settings: ArbiterSettings) -> float:
    """Return the fraction of the GPU's time that hand-offs may cost now."""
    if any(is_interactive(session, settings) for session in {client.session for client in waiting}):
        return settings.interactive_overhead_bound
    return settings.overhead_bound


def newcomers(waiting: Iterable[Client], settings: ArbiterSettings) -> list[Client]:
    """Return the first client of each session that may end a time slice early, least attained service first.

    These sessions have paused.
    """
    first: dict[ArbitratedSession, Client] = {}
    for client in waiting:
        first.setdefault(client.session, client)
    returned = [client for session, client in first.items() if session.paused and is_interactive(session, settings)]
    return sorted(returned, key=lambda client: client.session.attained)


def group_with(newcomer: Client, holders: Iterable[Client], budget: VramBudget) -> list[Client]:
    """Return the newcomer and the holders that stay next to it, by least attained service."""
    return budget.fill(sorted(holders, key=lambda client: client.session.attained), [newcomer])


def part_of_gpu(moving: Iterable[Client], beside: Iterable[Client]) -> float:
    """Return the fraction of the GPU that is idle while `moving` clients' memory moves and `beside` clients work.

    The fraction is by weight: the GPU's work for the sessions that stay is not lost.
    """
    moved = {client.session for client in moving}
    others = {client.session for client in beside if client.bursting or client.parked} - moved
    weight = sum(session.weight for session in moved)
    return weight / (weight + sum(session.weight for session in others)) if weight else 1.0
