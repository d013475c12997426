"""Recent GPU time of sessions and their clients, for display. It affects no decisions: accounting.py does the charging.

Bursts give an estimate: the hardware divides time evenly between the processes that have work. Clients' reports of
their bursts and the driver's samples correct the estimate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from gpushare_spawner.arbiter.session import ClientId

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
class _Span:
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

    def __init__(self) -> None:
        self._spans: deque[_Span] = deque()
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
            self._spans.append(_Span(since, until, dict.fromkeys(users, each)))
        while self._spans[0].until < until - RETAINED:
            self._spans.popleft()

    def burst_ended(self, user: User, since: float, busy: float) -> None:
        """Correct the use during a client's burst: its start, and an upper bound on its GPU-busy seconds."""
        spans = [span for span in self._latest(since) if user in span.used]
        estimate = sum(span.used[user] for span in spans)
        if estimate > max(busy, NOTHING):
            for span in spans:
                span.used[user] *= busy / estimate

    def sample(self, since: float, until: float, busy: Mapping[str, float]) -> None:
        """Correct the use with a driver sample: the GPU seconds of each session's processes in an interval.

        Sessions that are not in `busy` keep their estimate.
        """
        if until <= since:
            return
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
            self._insert(_Span(since, until, unexpected))

    def of(self, session: str, last: float, now: float, working: Iterable[User]) -> Use:
        """Return a session's use in the last `WINDOW`.

        `working`: clients that have worked since `last`, the end of the last `advance`.
        """
        spans = list(self._latest(now - WINDOW))
        users = list(working)
        since = max(last, now - WINDOW)
        if users and now > since:
            spans.append(_Span(since, now, dict.fromkeys(users, (now - since) / len(users))))
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

    def _latest(self, since: float) -> Iterator[_Span]:
        """Yield the spans that end after an instant, latest first."""
        for span in reversed(self._spans):
            if span.until <= since:
                return
            yield span

    def _insert(self, span: _Span) -> None:
        """Insert a span by its end: samples arrive late."""
        place = len(self._spans)
        while place and self._spans[place - 1].until > span.until:
            place -= 1
        self._spans.insert(place, span)
