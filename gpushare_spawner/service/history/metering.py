"""Turns the agents' reports into amounts of GPU time. Pure: instants come with the reports.

A report has counters that grow while a session is open. The meter adds what they grew by since the last report, so a
service that was down, or an agent that was unavailable, loses only what sessions did that ended meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import GpuReport, Report, SessionReport
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.service.history.use import DAY, HOUR, Amounts, Counters, Subject

LONGEST = 31.0 * DAY
"""Seconds that are counted at most between two reports: as long as hours are kept. A node's clock that started in 1970
would otherwise make a million hours."""
SET_BACK = 300.0
"""Seconds. A report that is older than the last one by more is no late report: the node's clock was set back."""

OLDEST = 120.0
"""Seconds. Ours: what is counted is at most so much longer than the time that passes here. A report that counts can be
so old (`model.kubernetes.REPORT_STALE_SECONDS`)."""

GroupOf = Callable[[SessionReport], str]
"""Returns the group that a session's GPU time counts for; empty: none."""


class Meter:
    """Amounts by hour and subject, since they were taken last."""

    def __init__(self, counted: Iterable[Counters] = (), steady: Callable[[], float] | None = None) -> None:
        """``counted``: what was counted before, by an earlier service. ``steady``: seconds of a clock that nobody sets;
        None: nodes are believed how much time has passed."""
        self._steady = steady
        self._counted_to: dict[tuple[str, str], float] = {}
        """By `steady`: up to when time is counted. A node cannot make more of it by the instants of its reports."""
        self._counted = {(one.node, one.session): one for one in counted}
        self._clock_moved: dict[tuple[str, str], float] = {}
        """`SessionReport.clock_moved` of the last report."""
        self._amounts: dict[tuple[int, Subject], Amounts] = {}
        self._changed: set[tuple[str, str]] = set()
        self._ended: set[tuple[str, str]] = set()

    def observe(self, report: Report, group_of: GroupOf) -> None:
        """Count what a node's sessions did since its last report. A late report counts nothing.

        See also `LONGEST` and `SET_BACK`.
        """
        gpus = {gpu.uuid: gpu for gpu in report.gpus}
        open_now = set()
        for session in report.sessions:
            key = (report.node, session.id)
            open_now.add(key)
            if session.confirmed:
                self._observe_session(key, session, report.published_at, gpus, group_of)
        for key in [key for key in self._counted if key[0] == report.node and key not in open_now]:
            if not _is_late(report.published_at, self._counted[key]):
                del self._counted[key]
                self._clock_moved.pop(key, None)
                self._counted_to.pop(key, None)
                self._changed.discard(key)
                self._ended.add(key)

    def take(self) -> tuple[dict[tuple[int, Subject], Amounts], list[Counters], list[tuple[str, str]]]:
        """Return the amounts by (start of the hour, subject), the counters that changed, and the sessions that ended.

        All since the last `take`. Sessions are named by node and id.
        """
        taken = (self._amounts, [self._counted[key] for key in sorted(self._changed)], sorted(self._ended))
        self._amounts, self._changed, self._ended = {}, set(), set()
        return taken

    def give_back(
        self, taken: tuple[dict[tuple[int, Subject], Amounts], list[Counters], list[tuple[str, str]]]
    ) -> None:
        """Take back what could not be stored: it comes with the next `take`."""
        amounts, changed, ended = taken
        for (hour, subject), amount in amounts.items():
            self._add(hour, subject, amount)
        self._changed |= {(one.node, one.session) for one in changed} & set(self._counted)
        self._ended |= set(ended) - set(self._counted)

    def _observe_session(
        self,
        key: tuple[str, str],
        session: SessionReport,
        now: float,
        gpus: dict[str, GpuReport],
        group_of: GroupOf,
    ) -> None:
        before, moved = self._counted.get(key), self._clock_moved.get(key, session.clock_moved)
        self._clock_moved[key] = session.clock_moved
        if before is not None and moved != session.clock_moved:
            # the step of the node's clock is no time that passed
            before = replace(before, seen_at=before.seen_at + session.clock_moved - moved)
        if before is None or before.opened_at != session.opened_at:
            # nothing of it is counted; while nobody counted it had what its tier leaves it
            before = Counters(key[0], key[1], session.opened_at, session.opened_at, session.share_units)
        elif _is_late(now, before):
            return
        # after a clock was set back no time has passed, and the next report counts from here
        before = replace(before, seen_at=min(max(before.seen_at, now - self._longest(key, now - before.seen_at)), now))
        self._counted[key] = after = Counters(
            node=key[0],
            session=key[1],
            opened_at=session.opened_at,
            seen_at=now,
            effective_units=session.effective_units,
            gpu_seconds=session.gpu_seconds,
            entitled=session.delivered.entitled_seconds,
            delivered=session.delivered.delivered_seconds,
            waits=session.delivered.waits,
        )
        self._changed.add(key)
        self._ended.discard(key)
        count = len(session.gpus)
        if not count:
            return
        amounts = _amounts(session, before, after)
        group = group_of(session)
        for uuid in session.gpus:
            gpu = gpus.get(uuid)
            # which GPU another layer gives is not known
            named = uuid if session.layer is LayerName.NATIVE else str(session.layer)
            subject = Subject(
                session.user, session.server, session.template, group, key[0], named, gpu.model if gpu else ""
            )
            for hour, part in _by_hour(before.seen_at, after.seen_at):
                self._add(hour, subject, amounts.times(part))

    def _longest(self, key: tuple[str, str], passed: float) -> float:
        """Return how much of the time that has passed by its node's clock counts at most."""
        if self._steady is None:
            return LONGEST
        now = self._steady()
        if key not in self._counted_to:
            # what went by before this service saw the session is not known here
            self._counted_to[key] = now - OLDEST
            return LONGEST
        longest = min(LONGEST, max(0.0, now - self._counted_to[key]))
        self._counted_to[key] += min(max(0.0, passed), longest)
        return longest

    def _add(self, hour: int, subject: Subject, amounts: Amounts) -> None:
        known = self._amounts.get((hour, subject))
        self._amounts[hour, subject] = amounts if known is None else known.plus(amounts)


def _amounts(session: SessionReport, before: Counters, after: Counters) -> Amounts:
    """Return what a session did between two reports, on each of its GPUs."""
    passed, count = after.seen_at - before.seen_at, len(session.gpus)
    share, borrowed = session.share_units / UNITS_PER_GPU, session.borrowed_units / UNITS_PER_GPU
    # no session works longer than time passes, whatever its node reports; a clock that was set back counts a little
    longest = max(passed, SET_BACK)
    worked = min(_growth(before.gpu_seconds, after.gpu_seconds) / count, longest)
    # the tier changed once at most as far as is known: an earlier change and its return are not in the report
    since = min(max(session.tier_since, before.seen_at), after.seen_at)
    held = before.effective_units * (since - before.seen_at) + after.effective_units * (after.seen_at - since)
    return Amounts(
        reserved=share * passed,
        idle=share * max(0.0, passed - worked) if session.gpu_use_known else 0.0,
        recovered=max(0.0, share * passed - held / UNITS_PER_GPU),
        borrowed=borrowed * passed,
        used=worked,
        entitled=min(_growth(before.entitled, after.entitled) / count, longest),
        delivered=min(_growth(before.delivered, after.delivered) / count, longest),
        waits=_growth(before.waits, after.waits) / count,
    )


def _is_late(published_at: float, counted: Counters) -> bool:
    return counted.seen_at - SET_BACK <= published_at <= counted.seen_at


def _growth(before: float, after: float) -> float:
    """Return what a counter grew by; one that is smaller than before began again at 0: its agent lost its state."""
    return after - before if after >= before else after


def _by_hour(begin: float, end: float) -> Iterator[tuple[int, float]]:
    """Yield each hour (its start, seconds since the epoch) from ``begin`` to ``end``, and its part of that time."""
    if end <= begin:
        yield int(end // HOUR) * HOUR, 1.0
        return
    hour = int(begin // HOUR) * HOUR
    while hour < end:
        part = (min(end, hour + HOUR) - max(begin, hour)) / (end - begin)
        if part > 0:
            yield hour, part
        hour += HOUR
