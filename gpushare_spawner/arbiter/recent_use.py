"""GPU time of sessions and their clients, for display. It affects no decisions: accounting.py does the charging.

Bursts give an estimate: the hardware divides time evenly between the processes that have work. Clients' reports of
their bursts and the driver's samples correct the estimate. Use older than `RETAINED` is settled: it does not change.
`BurstRecorder` records the bursts of one session, from which right_size.py predicts the effect of another share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from gpushare_spawner.arbiter.session import ClientId
from gpushare_spawner.model.report import MOST_BURSTS, Burst

WINDOW = 1.0
"""Seconds over which GPU use is summed."""
RETAINED = 2 * WINDOW
"""Seconds for which GPU use is retained: the driver's samples arrive late."""
LONGEST_SPAN = 0.1
"""Maximum span in seconds. A longer span is divided, so that it leaves the window in steps."""
NOTHING = 1e-9
"""Seconds below which a time counts as zero and cannot be a divisor."""

User = tuple[str, ClientId | None]
"""Session and client; None: the session's processes that are not clients."""


@dataclass(frozen=True)
class Use:
    """One session's GPU seconds within the last `WINDOW`."""

    seconds: float = 0.0
    by_client: tuple[tuple[ClientId, float], ...] = ()


@dataclass
class UseSpan:
    """An interval in which the same users had work."""

    since: float
    until: float
    used: dict[User, float]
    """GPU seconds, by user."""

    def within(self, since: float, until: float) -> float:
        """Return the part of the span inside the interval, from 0 to 1."""
        overlap = min(until, self.until) - max(since, self.since)
        return max(0.0, overlap) / (self.until - self.since)


class RecentGpuUse:
    """Recent use of one GPU. Times are in seconds."""

    def __init__(self, settled: Callable[[UseSpan], None] | None = None) -> None:
        """Start without use. `settled` is called with each span that is settled, oldest first."""
        self._settled = settled
        self._spans: deque[UseSpan] = deque()
        """Spans, oldest first."""

    def advance(self, since: float, until: float, working: Iterable[User]) -> None:
        """Add the next interval, with the clients that had work on the GPU."""
        users = list(working)
        if not users or until <= since:
            return
        last = self._spans[-1] if self._spans else None
        each = (until - since) / len(users)
        if last is not None and last.until == since and until - last.since <= LONGEST_SPAN and [*last.used] == users:
            last.until = until
            for user in users:
                last.used[user] += each
        else:
            self._spans.append(UseSpan(since, until, dict.fromkeys(users, each)))
        while self._spans[0].until < until - RETAINED:
            span = self._spans.popleft()
            if self._settled is not None:
                self._settled(span)

    def burst_ended(self, user: User, since: float, busy: float, until: float | None = None) -> None:
        """Correct the use during a client's burst: its start, and an upper bound on its GPU-busy seconds.

        `until`: the end of its last work; the client reports it later. None: unknown.
        """
        if until is not None:
            self._divide(until)
            for span in self._latest(max(since, until)):
                span.used.pop(user, None)
        spans = [span for span in self._latest(since) if user in span.used]
        estimate = sum(span.used[user] for span in spans)
        if estimate > max(busy, NOTHING):
            for span in spans:
                span.used[user] *= busy / estimate

    def sample(self, since: float, until: float, busy: Mapping[str, float]) -> dict[str, float]:
        """Correct the use with a driver sample: the GPU seconds of each session's processes in an interval.

        Sessions that are not in `busy` keep their estimate. Returns the seconds by which the others' changed.
        """
        if until <= since:
            return {}
        spans = [(span, part) for span in self._latest(since) if (part := span.within(since, until)) > 0]
        estimates: dict[str, float] = {}
        for span, part in spans:
            for (session, _), seconds in span.used.items():
                estimates[session] = estimates.get(session, 0.0) + seconds * part
        for span, part in spans:
            for user, seconds in span.used.items():
                session = user[0]
                if session in busy:
                    factor = busy[session] / estimates[session] if estimates[session] > NOTHING else 0.0
                    span.used[user] = seconds * (1 - part + part * factor)
        unexpected: dict[User, float] = {
            (name, None): seconds for name, seconds in busy.items() if seconds and estimates.get(name, 0.0) <= NOTHING
        }
        if unexpected:
            self._insert(UseSpan(since, until, unexpected))
        return {
            session: busy[session] - seconds
            for session, seconds in estimates.items()
            if session in busy and seconds > NOTHING
        }

    def of(self, session: str, last: float, now: float, working: Iterable[User]) -> Use:
        """Return a session's use in the last `WINDOW`.

        `working`: clients that have worked since `last`, the end of the last `advance`.
        """
        spans = list(self._latest(now - WINDOW))
        spans += self._since(max(last, now - WINDOW), now, working)
        sums: dict[ClientId | None, float] = {}
        for span in spans:
            part = span.within(now - WINDOW, now)
            for (name, client), seconds in span.used.items():
                if name == session:
                    sums[client] = sums.get(client, 0.0) + seconds * part
        return Use(
            min(sum(sums.values()), WINDOW),
            tuple((client, used) for client, used in sums.items() if client is not None),
        )

    def unsettled(self, last: float, now: float, working: Iterable[User]) -> list[UseSpan]:
        """Return the use that is not settled, earliest first. `last`, `working`: see `of`."""
        return [*self._spans, *self._since(last, now, working)]

    @staticmethod
    def _since(since: float, now: float, working: Iterable[User]) -> list[UseSpan]:
        users = list(working)
        return [UseSpan(since, now, dict.fromkeys(users, (now - since) / len(users)))] if users and now > since else []

    def _latest(self, since: float) -> Iterator[UseSpan]:
        """Yield the spans that end after an instant, latest first."""
        for span in reversed(self._spans):
            if span.until <= since:
                return
            yield span

    def _divide(self, at: float) -> None:
        """Divide the span around an instant into two."""
        for place in range(len(self._spans) - 1, -1, -1):
            span = self._spans[place]
            if span.until <= at:
                return
            if span.since < at:
                part = (at - span.since) / (span.until - span.since)
                before = UseSpan(span.since, at, {user: used * part for user, used in span.used.items()})
                span.since, span.used = at, {user: used * (1 - part) for user, used in span.used.items()}
                self._spans.insert(place, before)
                return

    def _insert(self, span: UseSpan) -> None:
        """Insert a span by its end: samples arrive late."""
        place = len(self._spans)
        while place and self._spans[place - 1].until > span.until:
            place -= 1
        self._spans.insert(place, span)


PAUSE = 1.0
"""Seconds without work after which the next work is another burst; equals `ArbiterSettings.pause`. Shorter pauses are
part of a program."""
LONGEST_BURST = 600.0
"""Seconds after which the next work is another burst even without a pause: a training run pauses rarely, and its waits
must not appear only when it ends."""


@dataclass
class _OpenBurst:
    began_at: float
    ended_at: float | None = None
    """None: work runs or waits."""
    gpu_seconds: float = 0.0
    gap_seconds: float = 0.0
    contended_seconds: float = 0.0
    demand: float = 1.0
    """Part of the GPU's time that the work can use, by the last driver sample."""
    rate: float = 0.0
    """Part of the GPU's time in the last interval."""
    memory_bytes: int = 0


class BurstRecorder:
    """The bursts of one session on one GPU, since they were last taken. Instants are on the arbiter's clock."""

    def __init__(self) -> None:
        self._open: _OpenBurst | None = None
        self._ended: deque[Burst] = deque(maxlen=MOST_BURSTS)

    def begin(self, now: float) -> None:
        """Record that the session launches or requests work and had none before."""
        burst = self._open
        if burst is not None and burst.ended_at is not None:
            pause = now - burst.ended_at
            if pause < PAUSE and now - burst.began_at < LONGEST_BURST:
                burst.gap_seconds += pause
                burst.ended_at = None
                return
            self._close(burst, burst.ended_at)
        if self._open is None:
            self._open = _OpenBurst(now)

    def advance(self, seconds: float, rate: float, contended: bool) -> None:
        """Add an interval with work. `rate`: the session's estimated part of the GPU's time in it, 0 while it waits."""
        burst = self._open
        if burst is not None and burst.ended_at is None:
            burst.rate = rate
            burst.gpu_seconds += seconds * rate
            burst.contended_seconds += seconds * contended

    def correct(self, seconds: float, demand: float) -> None:
        """Add GPU seconds by which a driver sample exceeds the estimate; negative: it shows less.

        `demand`: part of the GPU's time that the session can use.
        """
        if self._open is not None:
            self._open.gpu_seconds = max(0.0, self._open.gpu_seconds + seconds)
            self._open.demand = demand

    def end(self, since: float, now: float, memory_bytes: int) -> None:
        """Record at `now` that the session has had no work since an instant. `memory_bytes`: its allocated memory."""
        burst = self._open
        if burst is not None and burst.ended_at is None:
            burst.ended_at = max(burst.began_at, since)
            burst.gpu_seconds = max(0.0, burst.gpu_seconds - burst.rate * (now - burst.ended_at))
            burst.memory_bytes = max(burst.memory_bytes, memory_bytes)

    def take(self, now: float) -> tuple[Burst, ...]:
        """Return the bursts that have ended for certain since the last call, earliest first."""
        burst = self._open
        if burst is not None and burst.ended_at is not None and now - burst.ended_at >= PAUSE:
            self._close(burst, burst.ended_at)
        taken = tuple(self._ended)
        self._ended.clear()
        return taken

    def _close(self, burst: _OpenBurst, ended_at: float) -> None:
        seconds = ended_at - burst.began_at
        used = min(burst.gpu_seconds, seconds - burst.gap_seconds)
        # a program that can use half of the GPU needs as long alone for a second of GPU time as two seconds
        own = used * (1 / burst.demand - 1) if burst.demand > NOTHING else 0.0
        gaps = min(burst.gap_seconds + own, seconds - used)
        # in a cluster, the report with all sessions' bursts is limited to 1 MiB
        seconds, used, gaps = round(seconds, 3), round(used, 3), round(gaps, 3)
        self._ended.append(Burst(ended_at, seconds, used, gaps, round(burst.contended_seconds, 3), burst.memory_bytes))
        self._open = None
