"""Accounts of the GPU time that each session on one GPU is entitled to and has received. schedule.py decides.

While several sessions have work, the delivered GPU time is divided by weight. Each session is *entitled* to its part.
The *received* time is estimated first (the hardware divides time evenly between the processes that have work) and then
corrected by the driver's samples. The difference is the session's *lag* in seconds: a session with a positive lag is
owed time, and one with a negative lag owes time. A lag belongs to the session, not to its processes.

`Charging` updates the accounts from the roster: sessions with work, and sessions with processes on the GPU.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from gpushare_spawner.arbiter.gpu_time_limits import NONE, TimeLimits
from gpushare_spawner.arbiter.recent_use import RecentGpuUse, User, UseSpan
from gpushare_spawner.arbiter.roster import Roster
from gpushare_spawner.arbiter.session import ArbiterSettings, ArbitratedSession, Client

TOLERANCE = 1e-9
"""Seconds below which lags count as equal, because sums of floats are not exact."""
MEMORY = 3.0
"""Seconds for which the estimate is retained, so that late samples can correct it."""
SATURATED = 0.92
"""Fraction of the time for which a saturated GPU is busy: no program launches kernels without gaps."""
ROUNDING = 0.005
"""Fraction of the GPU by which a session's use can exceed what the sample shows: NVML gives a process's utilization in
whole percent. 50 processes of 2 % each showed 84 % in total."""
LOAD_LIMIT = 0.9
"""Fraction of the possible time from which a session counts as able to use all of it."""
SHORT = 0.02
"""Seconds on the GPU below which a session's demand cannot be inferred."""
UNUSED = 0.5
"""Fraction of the possible slices below which a session did not need them."""
GROWTH, FLOOR = 1.25, 0.02
"""Allowance beyond a session's recent demand, as a factor and as a fraction of the GPU: its demand may grow."""


@dataclass
class _Account:
    weight: int
    lag: float = 0.0
    demand: float = 1.0
    """Fraction of the GPU that the session could use, from 0 to 1; 1 if unknown."""
    deadline: float = 0.0
    """Virtual time at which its current time slice should be complete."""
    working: bool = False
    absent: float = 0.0
    """Seconds for which the session has had no work."""
    entitled: float = 0.0
    delivered: float = 0.0
    received: float = 0.0
    """Total estimated GPU seconds received, with or without competition."""


@dataclass
class _Span:
    """Interval during which the same sessions worked."""

    since: float
    until: float
    received: dict[str, float]
    """Estimated GPU seconds, by session."""
    entitled: dict[str, float]
    """Entitled GPU seconds, by session; empty without competition."""
    held_back: bool
    memory_short: bool


class Accounts:
    """Accounts of the sessions on one GPU. Times are in seconds; unknown sessions raise KeyError."""

    def __init__(self, settings: ArbiterSettings) -> None:
        self._settings = settings
        self.time_limits = TimeLimits(settings)
        self._accounts: dict[str, _Account] = {}
        self._working: frozenset[str] | None = frozenset()
        """Sessions with work; None: must be recomputed."""
        self._sums: tuple[int, float] | None = (0, 0.0)
        """Sums of the weights and lags of sessions with work; None: must be recomputed."""
        self._clock = 0.0
        """Virtual time: seconds of service per unit of weight of the working sessions."""
        self._spans: deque[_Span] = deque()
        self._sampled = float("-inf")
        self._measured: frozenset[str] = frozenset()
        self.saturated = True
        """Whether the working sessions need at least the whole GPU. True until the driver's samples show less."""

    # -- the sessions -----------------------------------------------------------------------------------------------

    def add(self, session: str, weight: int) -> None:
        """Add a session without work and without a limit. `weight` is at least 1."""
        self._accounts[session] = _Account(weight, deadline=self._clock)

    def remove(self, session: str) -> None:
        """Remove the session with its lag and its limit."""
        del self._accounts[session]
        self.time_limits.set(session, NONE)
        self.time_limits.set_background(session, False)
        self._working = self._sums = None

    def set_weight(self, session: str, weight: int) -> None:
        """Change the weight. The lag in seconds stays."""
        self._accounts[session].weight = weight
        self._sums = None

    def work(self, session: str, time_slice: float, memory_short: bool = False) -> None:
        """Record that the session has work, for a time slice in seconds. No effect if it already has work.

        The session keeps its debt. After a pause it keeps at most one time slice of owed time: unused time is not
        saved. A new request immediately after the return of a lease is not a pause. The session then keeps all owed
        time if the memory of all sessions fits, and two time slices if sessions take turns (`memory_short`). Thus a job
        that gives way to a user every few seconds receives its part, and long jobs that wait for each other do not save
        time that would delay users.
        """
        account = self._accounts[session]
        if account.working:
            return
        account.working = True
        self._working = self._sums = None
        self.saturated = self.saturated or self._total_demand() >= SATURATED
        if account.absent >= self._settings.pause:
            account.lag = min(account.lag, time_slice)
        elif memory_short:
            account.lag = min(account.lag, 2 * time_slice)
        account.deadline = self._virtual(account, self._surplus()) + time_slice / account.weight

    def rest(self, session: str) -> None:
        """Record that the session has no work left."""
        account = self._accounts[session]
        if account.working:
            account.working = False
            self._working = self._sums = None

    @property
    def working(self) -> frozenset[str]:
        """Sessions with work."""
        if self._working is None:
            self._working = frozenset(name for name, account in self._accounts.items() if account.working)
        return self._working

    @property
    def total_weight(self) -> int:
        """Sum of the weights of the sessions with work."""
        return self._summed()[0]

    # -- figures ----------------------------------------------------------------------------------------------------

    def entitled(self, session: str) -> float:
        """Return the GPU seconds to which the session was entitled while others also had work."""
        return self._accounts[session].entitled

    def delivered(self, session: str) -> float:
        """Return the GPU seconds that the session received while others also had work."""
        return self._accounts[session].delivered

    def received(self, session: str) -> float:
        """Return the session's estimated GPU seconds in total."""
        return self._accounts[session].received

    def demand(self, session: str) -> float:
        """Return the fraction of the GPU that the session can use, by the driver's last sample; 1 if unknown."""
        return self._accounts[session].demand

    def lag(self, session: str) -> float:
        """Return the seconds that the session is owed; negative: it owes them.

        The lags of working sessions sum to 0.
        """
        account = self._accounts[session]
        return account.lag - self._surplus() * account.weight

    def parts(self, sessions: Iterable[str]) -> dict[str, float]:
        """Return each session's fraction of the GPU: by weight, at most its limit and its demand.

        The sum is 1.
        """
        accounts = {session: self._accounts[session] for session in sessions}
        return divide(
            {session: account.weight for session, account in accounts.items()},
            {
                session: min(self.time_limits.part(session), account.demand * GROWTH + FLOOR)
                for session, account in accounts.items()
            },
        )

    def measured(self, session: str, now: float) -> bool:
        """Return whether a recent driver sample shows the session's GPU time."""
        return session in self._measured and now - self._sampled < MEMORY

    # -- elapsed time -----------------------------------------------------------------------------------------------

    def advance(
        self,
        now: float,
        elapsed: float,
        processes: Mapping[str, int],
        time_slices: Mapping[str, float],
        held_back: bool = False,
        memory_short: bool = False,
    ) -> None:
        """Account for `elapsed` seconds up to `now`. `processes`: each session's number of processes on the GPU.

        `time_slices`: seconds of each session's time slice if not all sessions fit into memory; the limit on a lag is
        at least two time slices. `held_back`: a session was kept off the GPU so that another could run. `memory_short`:
        not all sessions fit into the GPU's memory.
        """
        total = sum(processes.values())
        concerned = self.working | processes.keys()
        served = elapsed if total else 0.0
        received = {session: served * count / total for session, count in processes.items() if count}
        for session, seconds in received.items():
            self._accounts[session].received += seconds
        self.time_limits.advance(elapsed, received)
        entitled: dict[str, float] = {}
        if len(concerned) < 2:
            self.saturated = True  # the next competition is unknown
        else:
            entitled = {session: served * part for session, part in self.parts(concerned).items()}
            self._book(entitled, received)
        self._repay(concerned, elapsed, served)
        self._bound(concerned, time_slices)
        weights = sum(self._accounts[session].weight for session in concerned)
        self._clock += served / weights if weights else 0.0
        if total:
            self._spans.append(_Span(now - elapsed, now, received, entitled, held_back, memory_short))
            while self._spans[0].until < now - MEMORY:
                self._spans.popleft()

    def sample(self, since: float, until: float, busy: Mapping[str, float]) -> None:
        """Correct the accounts with a driver sample: the GPU seconds of each session's processes in an interval.

        Sessions that the driver does not show are absent from `busy` and keep their estimate. Samples may be up to
        `MEMORY` seconds late; older parts of the interval are ignored. Sessions that kept others out of memory are
        charged for the GPU's idle time.
        """
        length = until - since
        if length <= 0:
            return
        self._sampled, self._measured = until, frozenset(busy)
        received: dict[str, float] = {}
        entitled: dict[str, float] = {}
        allowed: dict[str, float] = {}
        booked: dict[str, float] = {}
        # short: seconds for which sessions on the GPU kept others out of its memory
        covered = contended = held_back = short = 0.0
        for span in self._spans:
            overlap = min(until, span.until) - max(since, span.since)
            if overlap <= 0:
                continue
            part = overlap / (span.until - span.since)
            covered += overlap
            contended += overlap if span.entitled else 0.0
            held_back += overlap if span.held_back else 0.0
            short += overlap if span.memory_short else 0.0
            ran = dict.fromkeys(span.received, overlap / part)
            in_lags = span.received if span.entitled else {}
            for sums, seconds in (
                (received, span.received),
                (entitled, span.entitled),
                (allowed, ran),
                (booked, in_lags),
            ):
                for session, amount in seconds.items():
                    sums[session] = sums.get(session, 0.0) + amount * part
        self._forget_until(until)
        measured = {session: seconds for session, seconds in busy.items() if session in self._accounts}
        received = {session: seconds for session, seconds in received.items() if session in self._accounts}
        entitled = {session: seconds for session, seconds in entitled.items() if session in self._accounts}
        shown = sum({**received, **measured}.values())
        load, memory_short = shown / length, short > 0
        on_gpu = sum(seconds > 0 or session in received for session, seconds in measured.items())
        idle = load + on_gpu * ROUNDING < SATURATED
        if memory_short:
            for session in measured:
                self._accounts[session].demand = 1.0
            self.saturated = True
        else:
            self._learn_demand(measured, received, allowed, idle, held_back > 0.05 * length)
        self.time_limits.correct({name: seconds - received.get(name, 0.0) for name, seconds in measured.items()})
        if not contended:
            return
        errors = {
            session: (measured[session] - received.get(session, 0.0)) * contended / max(covered, TOLERANCE)
            for session in measured
        }
        if self.saturated or memory_short or held_back > 0:
            idled = self._idled(measured, received, max(0.0, covered - shown) * min(short, contended) / covered)
            surplus, whole = sum(errors.values()) + sum(idled.values()), sum(entitled.values())
            charged = {session: error + idled.get(session, 0.0) for session, error in errors.items()}
            self._book(
                {session: surplus * seconds / whole for session, seconds in entitled.items()} if whole else {}, charged
            )
            for session, unused in idled.items():
                # the session owes that time, but did not receive it
                self._accounts[session].entitled -= unused
                self._accounts[session].delivered -= unused
            if idle and not memory_short:
                for name, used in measured.items():
                    if used + SHORT < UNUSED * received.get(name, 0.0):
                        self._forfeit(name)
            return
        # The GPU was partly idle: each session received its demand, and none owes time for it.
        for session in {*entitled, *errors}:
            account = self._accounts[session]
            estimate, right, error = booked.get(session, 0.0), entitled.get(session, 0.0), errors.get(session, 0.0)
            account.lag -= right - estimate
            self._sums = None
            account.entitled += estimate + error - right
            account.delivered += error

    # -- order -------------------------------------------------------------------------------------------------------

    def eligible(self, session: str) -> bool:
        """Return whether the session has received no more than its part."""
        return self.lag(session) >= -TOLERANCE

    def order(self, sessions: Iterable[str], time_slices: Mapping[str, float]) -> list[str]:
        """Return the sessions in service order: earliest eligible virtual deadline first.

        Ineligible sessions follow by deadline. A completed time slice is renewed with the seconds in `time_slices`.
        Ties keep their order. After I. Stoica and H. Abdel-Wahab, "Earliest Eligible Virtual Deadline First", TR-95-22,
        1995.
        """
        surplus = self._surplus()
        keys: dict[str, tuple[bool, float]] = {}
        for session in sessions:
            account = self._accounts[session]
            virtual = self._virtual(account, surplus)
            if virtual >= account.deadline - TOLERANCE:
                account.deadline = virtual + time_slices[session] / account.weight
            eligible = account.lag - surplus * account.weight >= -TOLERANCE
            keys[session] = not eligible, round(account.deadline, 9)
        return sorted(keys, key=keys.__getitem__)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _surplus(self) -> float:
        """Return the sum of the working sessions' lags per unit of weight: the debts of sessions that have left."""
        weights, lags = self._summed()
        return lags / weights if weights else 0.0

    def _summed(self) -> tuple[int, float]:
        if self._sums is None:
            weights, lags = 0, 0.0
            for account in self._accounts.values():
                if account.working:
                    weights += account.weight
                    lags += account.lag
            self._sums = weights, lags
        return self._sums

    def _virtual(self, account: _Account, surplus: float) -> float:
        return self._clock - (account.lag / account.weight - surplus)

    def _book(self, entitled: Mapping[str, float], received: Mapping[str, float]) -> None:
        self._sums = None
        for session, seconds in entitled.items():
            account = self._accounts[session]
            account.lag += seconds
            account.entitled += seconds
        for session, seconds in received.items():
            account = self._accounts[session]
            account.lag -= seconds
            account.delivered += seconds

    def _repay(self, concerned: Iterable[str], elapsed: float, served: float) -> None:
        """Fade lags in the absence of competition, and reduce absent sessions' debts as if they were waiting.

        Sessions absent for less than `long_pause` are excluded: a session that always returns within seconds would
        otherwise never repay.
        """
        present = set(concerned)
        weights = sum(self._accounts[session].weight for session in present)
        owed = owing = just_left = 0.0
        for session, account in self._accounts.items():
            if session in present:
                account.absent = 0.0
                continue
            recent = min(elapsed, max(0.0, self._settings.long_pause - account.absent))
            account.absent += elapsed
            if recent > 0 and account.lag:
                just_left = max(just_left, recent)
                owed += max(0.0, account.lag)
                owing += max(0.0, -account.lag)
            if not present:
                account.lag = faded(account.lag, elapsed - recent)
            elif account.lag < 0:
                # the served time can begin long before this interval: a kernel is charged when it ends
                counted = served * (1.0 - recent / elapsed) if recent else served
                account.lag = faded(account.lag, counted * account.weight / (weights + account.weight))
        if len(present) == 1:
            account = self._accounts[present.pop()]
            if account.lag:
                remaining = owing if account.lag > 0 else owed
                account.lag = faded(faded(account.lag, just_left, remaining), elapsed - just_left)
                self._sums = None

    @staticmethod
    def _idled(measured: Mapping[str, float], received: Mapping[str, float], unused: float) -> dict[str, float]:
        """Divide the `unused` seconds of the GPU among the sessions on it, by their estimates.

        They kept others out of memory, so they are charged for that time: they paged in, or their programs did not use
        it.
        """
        present = {session: received[session] for session in measured if received.get(session, 0.0) > 0}
        whole = sum(present.values())
        return {session: unused * seconds / whole for session, seconds in present.items()} if whole else {}

    def _forfeit(self, session: str) -> None:
        """Remove the time owed to a session that left the GPU idle, and the corresponding debt of the others."""
        owed = self.lag(session)
        others = [account for name, account in self._accounts.items() if account.working and name != session]
        weights = sum(account.weight for account in others)
        if owed <= 0 or not weights:
            return
        self._accounts[session].lag -= owed
        self._sums = None
        for account in others:
            account.lag += owed * account.weight / weights

    def _bound(self, concerned: Iterable[str], time_slices: Mapping[str, float]) -> None:
        present = [(session, self._accounts[session]) for session in concerned]
        weights = sum(account.weight for _, account in present)
        for session, account in present:
            limit = max(2 * time_slices.get(session, 0.0), self._settings.max_debt * account.weight / weights)
            if abs(account.lag) > limit:
                account.lag = min(limit, max(-limit, account.lag))
                self._sums = None

    def _forget_until(self, until: float) -> None:
        while self._spans and self._spans[0].until <= until:
            self._spans.popleft()
        if self._spans and self._spans[0].since < until:
            span = self._spans[0]
            rest = (span.until - until) / (span.until - span.since)
            span.since = until
            span.received = {session: seconds * rest for session, seconds in span.received.items()}
            span.entitled = {session: seconds * rest for session, seconds in span.entitled.items()}

    def _learn_demand(
        self,
        busy: Mapping[str, float],
        expected: Mapping[str, float],
        allowed: Mapping[str, float],
        idle: bool,
        held_back: bool,
    ) -> None:
        """Learn the sessions' demands from a sample.

        `expected`: seconds that each session should have received. `allowed`: seconds for which each could run. `idle`:
        the GPU was partly idle.
        """
        for session, seconds in busy.items():
            account = self._accounts[session]
            # on a partly idle GPU, each session gets its demand while it can run
            could = allowed.get(session, 0.0) if idle else expected.get(session, 0.0)
            if could < SHORT:
                continue  # it was kept off the GPU for nearly all of the interval: no information
            demand = min(1.0, seconds / could)
            if idle and not held_back:
                account.demand = demand
                continue
            if demand >= LOAD_LIMIT:
                demand = 1.0
            account.demand = max(demand, (account.demand + demand) / 2)
        if idle and not held_back:
            self.saturated = False
        else:
            self.saturated = not idle or self._total_demand() >= SATURATED

    def _total_demand(self) -> float:
        """Return the total demand of the working sessions as a fraction of the GPU."""
        return sum(account.demand for account in self._accounts.values() if account.working)


def faded(lag: float, seconds: float, remaining: float = 0.0) -> float:
    """Return the lag moved toward 0 by `seconds`; `remaining` seconds of it remain."""
    size = max(min(abs(lag), remaining), abs(lag) - seconds)
    return math.copysign(size, lag)


def divide(weights: Mapping[str, int], limits: Mapping[str, float]) -> dict[str, float]:
    """Divide 1 by weight within limits. Unused parts go to the others, by weight.

    If the limits sum to less than 1, the rest is still divided by weight, so the parts always sum to 1.
    """
    parts = dict.fromkeys(weights, 0.0)
    unfilled, left = dict(weights), 1.0
    while unfilled and left > TOLERANCE:
        total = sum(unfilled.values())
        full = [name for name, weight in unfilled.items() if left * weight / total >= limits[name]]
        if not full:
            for name, weight in unfilled.items():
                parts[name] += left * weight / total
            return parts
        for name in full:
            left -= limits[name]
            parts[name] = limits[name]
            del unfilled[name]
    if left > TOLERANCE:
        total = sum(weights.values())
        return {name: part + left * weights[name] / total for name, part in parts.items()}
    scale = sum(parts.values())
    return {name: part / scale for name, part in parts.items()}


class Charging:
    """Updates the accounts from the roster."""

    def __init__(
        self, roster: Roster, settings: ArbiterSettings, use_settled: Callable[[UseSpan], None] | None = None
    ) -> None:
        self._roster = roster
        self._settings = settings
        self.accounts = Accounts(settings)
        self.recent_use = RecentGpuUse(use_settled)

    def advance(self, elapsed: float, time_slices: Mapping[str, float], memory_short: bool) -> None:
        """Account for the seconds since the last decision, up to the roster's `now`.

        `memory_short`: a waiting client does not fit next to the leaseholders. They keep it out even while quiet, so a
        lease counts for its entire duration. The driver's samples correct the computed time.
        """
        processes = {}
        for session in self._roster.sessions.values():
            count = self._left_behind(session, elapsed) if session.left_behind else 0
            for client in session.clients.values():
                if client.lease and (memory_short or self.on_device(client)):
                    count += 1
            if count:
                processes[session.id] = count
        self._advance_recent_use(self._roster.now - elapsed)
        held_back = any(
            client.parked and not client.session.at_limit and self._roster.now >= client.pausing_until
            for client in self._roster.clients
        )
        self.accounts.advance(self._roster.now, elapsed, processes, time_slices, held_back, memory_short)

    def update_working(self, time_slices: Mapping[str, float], memory_short: bool = False) -> None:
        """Update which sessions have work. `memory_short`: sessions take turns."""
        for session in self._roster.sessions.values():
            for client in session.clients.values():
                if client.waiting or (client.lease and self.on_device(client)):
                    time_slice = max(time_slices.get(session.id, 0.0), self._settings.period)
                    self.accounts.work(session.id, time_slice, memory_short)
                    break
            else:
                self.accounts.rest(session.id)

    @property
    def working(self) -> list[User]:
        """Clients that report work on the GPU."""
        now = self._roster.now
        return [user_of(client) for client in self._roster.clients if client.bursting and client.paging_until <= now]

    def _advance_recent_use(self, since: float) -> None:
        """Record the use of the working clients since an instant, in steps at which a page-in was expected to end.

        A page-in is no GPU use.
        """
        now, bursting = self._roster.now, [client for client in self._roster.clients if client.bursting]
        ends = {client.paging_until for client in bursting if since < client.paging_until < now}
        for begin, end in pairwise((since, *sorted(ends), now)) if ends else ((since, now),):
            self.recent_use.advance(
                begin, end, [user_of(client) for client in bursting if client.paging_until <= begin]
            )

    def burst_ended(self, client: Client, quiet: float = 0.0) -> None:
        """Record the reported GPU-busy time of a client's burst. `quiet`: seconds since the end of its last work."""
        busy = client.busy_reported - client.busy_before_burst
        self.recent_use.burst_ended(user_of(client), client.burst_since, busy, self._roster.now - quiet)

    def on_device(self, client: Client) -> bool:
        """Return whether a client with a lease may have work on the GPU.

        IDLE is believed only if the driver's samples would reveal a false report.
        """
        return client.bursting or not self.accounts.measured(client.session.id, self._roster.now)

    def _left_behind(self, session: ArbitratedSession, elapsed: float) -> int:
        """Return the number of disconnected processes that may still be computing."""
        session.left_behind = {
            client: until for client, until in session.left_behind.items() if until > self._roster.now - elapsed
        }
        return len(session.left_behind)


def user_of(client: Client) -> User:
    """Return the key of a client in `RecentGpuUse`."""
    return client.session.id, client.id
