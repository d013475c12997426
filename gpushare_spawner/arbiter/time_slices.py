"""The cost of a hand-off, the length of a time slice, and the credit for time slices that end early.

How long the others wait for a session's answer to REVOKE, learned from its answers. Has no clock.

Which sessions a user waits for, and which time slices may end early for them: least attained service first.

What a session has attained is the time for which it held a lease and worked since its last pause, on the arbiter's
clock. A session that returns after a pause has attained nothing, and may take the place of those that have attained
most. This changes the order in which sessions are served and how often, never how much: only sessions that have had no
more than their part are preferred.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from gpushare_spawner.arbiter.memory import VramBudget
from gpushare_spawner.arbiter.session import ArbitratedSession, Client
from gpushare_spawner.arbiter.settings import ArbiterSettings

SLOWEST, FASTEST = 1e7, 2e12
"""Bytes per second. Measurements outside are errors of a clock, not of a bus: NVLink-C2C has 0.4e12."""


TRUST = 4.0
"""Factor by which the measurements of one session alone may differ from the guess: a process may claim any figure, and
a wrong one would lengthen all time slices, or make the GPU do nothing but move memory."""


class Bandwidth:
    """Bytes per second of bulk paging in one direction, as the sessions measured it.

    Each session has a moving average of its own. The estimate is their median: with three sessions or more no single
    one moves it beyond what the others measured. Of two, the guess is the third. One alone is believed up to `TRUST`.
    """

    def __init__(self, settings: ArbiterSettings) -> None:
        self._settings = settings
        self._measured: dict[str, float] = {}
        """Seconds per byte, by session, because costs add up times."""
        self.value = self._settings.bandwidth_guess
        """The estimate; before the first measurement the guess of the settings."""

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
        """The session is gone."""
        if self._measured.pop(session, None) is not None:
            self.value = self._estimate()


@dataclass
class _Moves:
    """Moving averages of a session's moves."""

    amount: float
    """Bytes."""
    seconds: float


class WholeMoves:
    """Seconds of suspensions, or of resumptions, as the agent measured them: no process claims them.

    A move takes a time for each byte and a time that does not depend on the size. Of the sessions only sums are known,
    so a session's own time counts: what exceeds the common rate is taken not to depend on its size.
    """

    def __init__(self, settings: ArbiterSettings) -> None:
        self._settings = settings
        self._measured: dict[str, _Moves] = {}

    @property
    def rate(self) -> float:
        """Bytes per second of all sessions together; before the first measurement the guess of the settings."""
        if not self._measured:
            return self._settings.bandwidth_guess
        moves = self._measured.values()
        return sum(move.amount for move in moves) / sum(move.seconds for move in moves)

    def learn(self, session: str, amount: int, seconds: float) -> None:
        """Record a move of the session: `amount` in bytes, `seconds`. One of nothing says nothing."""
        if amount <= 0 or seconds <= 0:
            return
        memory = self._settings.bandwidth_memory
        before = self._measured.get(session, _Moves(amount, seconds))
        self._measured[session] = _Moves(
            memory * before.amount + (1 - memory) * amount, memory * before.seconds + (1 - memory) * seconds
        )

    def forget(self, session: str) -> None:
        """The session is gone."""
        self._measured.pop(session, None)

    def seconds(self, session: str, amount: int) -> float:
        """Return the seconds of a move of so many bytes of the session."""
        rate, own = self.rate, self._measured.get(session)
        if own is None or amount <= 0:
            return amount / rate
        fixed = max(0.0, own.seconds - own.amount / rate)
        return fixed + amount * (own.seconds - fixed) / own.amount


class HandOffCost:
    """Seconds that it takes to bring bytes in and out again."""

    def __init__(self, settings: ArbiterSettings) -> None:
        self._settings = settings
        self.bandwidth_in = Bandwidth(settings)
        self.bandwidth_out = Bandwidth(settings)
        self.suspend = WholeMoves(settings)
        self.resume = WholeMoves(settings)

    def forget(self, session: str) -> None:
        """The session is gone, with what it measured."""
        for measured in (self.bandwidth_in, self.bandwidth_out, self.suspend, self.resume):
            measured.forget(session)

    def one_after_the_other(self, amount: int) -> float:
        """Seconds to bring so many bytes in and out again, if nothing overlaps: what a time slice must be worth."""
        return self._settings.switch_seconds + amount / self.bandwidth_in.value + amount / self.bandwidth_out.value

    def of_whole(self, session: str, amount: int) -> float:
        """The same for a session that is resumed and suspended."""
        moves = self.resume.seconds(session, amount) + self.suspend.seconds(session, amount)
        return self._settings.switch_seconds + moves

    def of_session(self, working_sets: Iterable[int], most: int) -> float:
        """Seconds of a session's hand-offs in a round: of all its clients together, and for at most `most` bytes."""
        return self.one_after_the_other(min(sum(working_sets), most))

    def both_ways_at_once(self, amount: int) -> float:
        """Seconds that the GPU stands still while so many bytes come in and as many of others' go out."""
        slower = min(self.bandwidth_in.value, self.bandwidth_out.value)
        return self._settings.switch_seconds + amount / slower


@dataclass(frozen=True)
class TimeSliceLengths:
    """Lengths of time slices in a weighted round.

    A round in which each session is handed in once has to last T = (sum of the hand-off costs) / e for its overhead to
    be at most e; each session's time slice is its part of it by weight, so no session waits longer than T.
    """

    round_seconds: float
    by_session: Mapping[str, float]
    """Seconds of each session's time slice, its own hand-off included."""

    @classmethod
    def plan(
        cls, weights: Mapping[str, int], costs: Mapping[str, float], settings: ArbiterSettings, bound: float
    ) -> TimeSliceLengths:
        """`costs`: each competing session's hand-off cost in seconds. `bound`: e."""
        round_seconds = sum(costs.values()) / bound
        total = sum(weights.values())
        by_session = {
            session: max(round_seconds * weight / total, costs[session] + settings.min_time_slice)
            for session, weight in weights.items()
        }
        return cls(round_seconds, by_session)


class HandOffCredit:
    """A token bucket of hand-off seconds, refilled at the rate of an overhead bound.

    May go below 0: what was spent was spent.
    """

    def __init__(self, settings: ArbiterSettings, rate: float) -> None:
        """`rate`: seconds of hand-offs for each second."""
        self._rate = rate
        self._capacity = settings.hand_off_credit
        self.seconds = settings.hand_off_credit

    def refill(self, elapsed: float) -> None:
        """Time went by, in seconds."""
        if self.seconds < self._capacity:
            self.seconds = min(self._capacity, self.seconds + elapsed * self._rate)

    def spend(self, seconds: float) -> None:
        """A forced hand-off took place that cost so much."""
        self.seconds -= seconds

    def wait_for(self, seconds: float) -> float:
        """Seconds until so much may be spent; 0: now; infinite for a bucket that holds nothing.

        More than the bucket holds may be spent when it is full.
        """
        if seconds > 0 and not self._capacity:
            return float("inf")
        return max(0.0, min(seconds, self._capacity) - self.seconds) / self._rate


SHORTENED = 1 / 4
"""Factor after an ignored REVOKE: the first one leads from the usual time to the shortest."""
LENGTHENED = 2.0
"""Factor after an answer in time: a session that had one very long kernel has the usual time again after two."""


class RevokeTimeouts:
    """The time-out of each session. Only REVOKEs that met a process at work teach: to be quiet proves nothing."""

    def __init__(self, settings: ArbiterSettings) -> None:
        self._settings = settings
        self._learned: dict[str, float] = {}
        """GPU seconds that a session may receive after REVOKE before the others are granted, by session."""

    def wall_seconds(self, session: str, running: int) -> float:
        """Seconds after which the others are granted, while `running` sessions share the GPU in even slices."""
        return self._of(session) * max(1, running)

    def learn(self, session: str, received: float) -> None:
        """The session answered a REVOKE, or left. `received`: GPU seconds that it received meanwhile.

        An answer in the usual time is obedience, also where the time-out was shorter: a kernel cannot be interrupted.
        """
        usual = self._settings.usual_revoke_timeout
        if received > usual:
            self._learned[session] = max(self._settings.shortest_revoke_timeout, self._of(session) * SHORTENED)
        elif session in self._learned:
            self._learned[session] = min(usual, self._of(session) * LENGTHENED)

    def forget(self, session: str) -> None:
        """The session is gone."""
        self._learned.pop(session, None)

    def _of(self, session: str) -> float:
        return self._learned.get(session, self._settings.usual_revoke_timeout)


def is_interactive(session: ArbitratedSession, settings: ArbiterSettings) -> bool:
    """Whether a user seems to wait for it: it has just returned, or has worked only for a short time since.

    A session whose bursts are typically long counts only after `returning_pause`: programs pause for seconds between
    their phases, too.
    """
    short = (session.bursts.typical or 0.0) <= settings.short_burst
    return session.attained <= settings.short_burst and (short or session.pause >= settings.returning_pause)


def bound(waiting: Iterable[Client], settings: ArbiterSettings) -> float:
    """The part of the GPU's time that hand-offs may cost now."""
    if any(is_interactive(session, settings) for session in {client.session for client in waiting}):
        return settings.interactive_overhead_bound
    return settings.overhead_bound


def newcomers(waiting: Iterable[Client], settings: ArbiterSettings) -> list[Client]:
    """The first client of each session that may take the GPU before the time slice is over, the least attained first:
    they have paused."""
    first: dict[ArbitratedSession, Client] = {}
    for client in waiting:
        first.setdefault(client.session, client)
    returned = [client for session, client in first.items() if session.paused and is_interactive(session, settings)]
    return sorted(returned, key=lambda client: client.session.attained)


def group_with(newcomer: Client, holders: Iterable[Client], budget: VramBudget) -> list[Client]:
    """The newcomer and the holders that stay beside it, chosen in the order of least attained service."""
    return budget.fill(sorted(holders, key=lambda client: client.session.attained), [newcomer])


def part_of_gpu(moving: Iterable[Client], beside: Iterable[Client]) -> float:
    """The part of the GPU that stands still while these clients' memory moves and the others beside them work on.

    By weight: what the GPU does meanwhile for the sessions that stay is not lost.
    """
    moved = {client.session for client in moving}
    others = {client.session for client in beside if client.bursting or client.parked} - moved
    weight = sum(session.weight for session in moved)
    return weight / (weight + sum(session.weight for session in others)) if weight else 1.0
