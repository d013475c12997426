"""Records the history: measures GPU time and spawns' waits, and passes the amounts to `store` once a minute.

`Meter` converts the agents' reports to amounts of GPU time. A report has counters that increase while a session is
open, and the meter adds their increase since the last report, with its price and CO2 (`model.quota.Prices`). If the
service or an agent pauses, only the use of sessions that end during the pause is lost. `SpawnWatch` measures spawns'
waits. Both are pure: instants come with the reports. `History` runs them and calls the database (`store`) in a thread;
`queries` reads the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import ValidationError
from sqlalchemy import Connection

from gpushare_spawner.clocks import since_boot
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.quota import Prices
from gpushare_spawner.model.report import Burst, GpuReport, Report, SessionReport
from gpushare_spawner.model.share import UNITS_PER_GPU, Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.quota.budgets import GpuTimeUse, Grant
from gpushare_spawner.service.history.queries import budget_uses, group_of_session, group_of_user
from gpushare_spawner.service.history.store import (
    DAY,
    HOUR,
    Action,
    AdviceRecord,
    BegunRestart,
    BurstRecord,
    GpuTimeAmounts,
    HistoryFailed,
    HistoryStore,
    SessionCounters,
    Subject,
    Wait,
    WaitOutcome,
)
from gpushare_spawner.service.hub.client import HubServer, HubUser
from gpushare_spawner.service.reports import NodeSnapshot, answered
from gpushare_spawner.service.waiting import waiting_spawns
from gpushare_spawner.wording.service import restored

LONGEST = 31.0 * DAY
"""Maximum counted time between two reports, in seconds; equals the time for which hours are stored. Otherwise, a node's
clock that starts in 1970 would produce half a million hours."""
SET_BACK = 300.0
"""Seconds. If a report is older than the previous one by more than this, the node's clock was set back; otherwise the
report is only late."""

MOST_WATTS = 10_000.0
"""Maximum power of a GPU that is believed, whatever its node reports: several times that of any GPU today."""
JOULES_PER_KWH = 3.6e6
_FIGURES = ("clock_moved", "effective_units", "tier_since", "gpu_seconds", "energy_joules", "delivered")
"""The figures of a session at its end."""
OLDEST = 120.0
"""Seconds by which counted time can exceed the time that has passed here. Our choice: a report of this age still counts
(`model.kubernetes.objects.REPORT_STALE_SECONDS`)."""

GroupOf = Callable[[SessionReport], str | None]
"""Function that returns the group to which a session's GPU time is charged; empty: none; None: not known yet."""
LASTING = {
    *("id", "user", "server", "template", "quota", "gpus", "layer", "gpu_use_known", "share_units", "last_units"),
    *("borrowed_units", "effective_units", "guaranteed_units", "tier", "tier_since", "opened_at"),
}
"""Fields of a session's report with which its time is counted when it has ended."""


class Meter:
    """Amounts by hour and subject since the last `take`."""

    def __init__(self, counted: Iterable[SessionCounters] = (), steady: Callable[[], float] | None = None) -> None:
        """Continue from the counters of an earlier service process.

        ``steady``: seconds on a clock that cannot be set; None if the nodes' clocks are trusted.
        """
        self._steady = steady
        self._counted_to: dict[tuple[str, str], float] = {}
        """Time on `steady` up to which time is counted, so that a node's reports cannot claim more time."""
        self._counted = {(counters.node, counters.session): counters for counters in counted}
        self._clock_moved: dict[tuple[str, str], float] = {}
        """`SessionReport.clock_moved` of the last report."""
        self._amounts: dict[tuple[int, Subject], GpuTimeAmounts] = {}
        self._changed: set[tuple[str, str]] = set()
        self._ended: set[tuple[str, str]] = set()
        self.bursts: list[tuple[Subject, BurstRecord]] = []
        """Bursts that are not yet stored."""
        self._fresh: list[GpuTimeUse] = []
        self._sessions: dict[tuple[str, str], SessionReport] = {}
        """The last report of each counted session."""
        self.prices: Callable[[], Prices | None] = lambda: None
        """Function that returns the price list in force."""

    def fresh(self) -> list[GpuTimeUse]:
        """Return the amounts since the last call, for budgets."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def unstored(self) -> list[GpuTimeUse]:
        """Return the amounts since the last `take`, for budgets."""
        return [
            GpuTimeUse(subject.account, subject.user, hour, HOUR, amounts.held, amounts.used)
            for (hour, subject), amounts in self._amounts.items()
        ]

    def observe(self, report: Report, group_of: GroupOf) -> None:
        """Count the use of a node's sessions since its last report. A late report counts nothing.

        See also `LONGEST` and `SET_BACK`.
        """
        gpus = {gpu.uuid: gpu for gpu in report.gpus}
        # before the open ones, because a restarted server has the same session id
        open_now = self._observe_ended(report, gpus, group_of)
        for session in report.sessions:
            key = (report.node, session.id)
            open_now.add(key)
            if session.confirmed:
                self._observe_session(key, session, report.published_at, gpus, group_of)
        for key in [key for key in self._counted if key[0] == report.node and key not in open_now]:
            if not _is_late(report.published_at, self._counted[key]):
                del self._counted[key]
                self._clock_moved.pop(key, None)
                self._sessions.pop(key, None)
                self._counted_to.pop(key, None)
                self._changed.discard(key)
                self._ended.add(key)

    def _observe_ended(self, report: Report, gpus: dict[str, GpuReport], group_of: GroupOf) -> set[tuple[str, str]]:
        """Count the last seconds of sessions that have ended. Only sessions that were observed while open count.

        Return those that cannot be counted yet, because their groups are not known.
        """
        not_yet = set()
        for ended in report.ended:
            key = (report.node, ended.id)
            before = self._counted.get(key)
            session = self._sessions.get(key) or _session_of(before)
            if before is None or session is None or before.opened_at != ended.opened_at:
                continue
            if group_of(session) is None:
                not_yet.add(key)
                continue
            end = min(ended.ended_at, report.published_at)
            figures = {name: getattr(ended, name) for name in _FIGURES}
            at_end = session.model_copy(update=figures)
            self._observe_session(key, at_end, max(end, before.seen_at), gpus, group_of)
        return not_yet

    def take(self) -> tuple[dict[tuple[int, Subject], GpuTimeAmounts], list[SessionCounters], list[tuple[str, str]]]:
        """Return the amounts by (start of the hour, subject), the changed counters, and the ended sessions.

        All are since the last `take`. Sessions are identified by node and id.
        """
        counted = [self._stored(key) for key in sorted(self._changed)]
        taken = (self._amounts, counted, sorted(self._ended))
        self._amounts, self._changed, self._ended = {}, set(), set()
        return taken

    def _stored(self, key: tuple[str, str]) -> SessionCounters:
        """Return a session's counters with the lasting fields of its last report."""
        lasting = self._sessions[key].model_dump_json(include=LASTING, exclude_defaults=True)
        return replace(self._counted[key], session_report=lasting)

    def give_back(
        self, taken: tuple[dict[tuple[int, Subject], GpuTimeAmounts], list[SessionCounters], list[tuple[str, str]]]
    ) -> None:
        """Take back amounts that could not be stored, so that the next `take` returns them again."""
        amounts, changed, ended = taken
        for (hour, subject), amount in amounts.items():
            self._add(hour, subject, amount)
        self._changed |= {(counters.node, counters.session) for counters in changed} & set(self._counted)
        self._ended |= set(ended) - set(self._counted)

    def _observe_session(
        self, key: tuple[str, str], session: SessionReport, now: float, gpus: dict[str, GpuReport], group_of: GroupOf
    ) -> None:
        group = group_of(session)
        if group is None:
            return  # its counters keep growing, and count later
        before, moved = self._counted.get(key), self._clock_moved.get(key, session.clock_moved)
        self._clock_moved[key] = session.clock_moved
        if before is not None and moved != session.clock_moved:
            # a step of the node's clock is not elapsed time
            before = replace(before, seen_at=before.seen_at + session.clock_moved - moved)
        if before is None or before.opened_at != session.opened_at:
            # not yet measured: the session held its full share until the last change of its tier
            before = SessionCounters(key[0], key[1], session.opened_at, session.opened_at, session.share_units)
        elif _is_late(now, before):
            return
        # if the clock was set back, no time has passed; the next report counts from here
        before = replace(before, seen_at=min(max(before.seen_at, now - self._longest(key, now - before.seen_at)), now))
        self._counted[key] = after = SessionCounters(
            node=key[0],
            session=key[1],
            opened_at=session.opened_at,
            seen_at=now,
            effective_units=session.effective_units,
            gpu_seconds=session.gpu_seconds,
            entitled=session.delivered.entitled_seconds,
            delivered=session.delivered.delivered_seconds,
            waits=session.delivered.waits,
            bursts_to=max([before.bursts_to, *(burst.ended_at for burst in session.bursts if _is_past(burst, now))]),
            energy=session.energy_joules,
        )
        self._sessions[key] = session
        self._changed.add(key)
        self._ended.discard(key)
        count = len(session.gpus)
        if not count:
            return
        for uuid in session.gpus:
            amounts = _amounts(session.on(uuid), before, after)
            gpu = gpus.get(uuid)
            # the GPU that another layer provides is unknown
            named = uuid if session.layer is LayerName.NATIVE else str(session.layer)
            subject = Subject(
                session.user,
                session.server,
                session.template,
                group,
                key[0],
                named,
                gpu.model if gpu else "",
                session.quota,
            )
            prices = self.prices()
            for hour, part in _by_hour(before.seen_at, after.seen_at):
                amount = amounts.times(part)
                if prices is not None:
                    amount = _priced(amount, prices, subject.model, hour)
                self._add(hour, subject, amount)
                use = GpuTimeUse(subject.account, subject.user, hour, HOUR, amount.held, amount.used)
                self._fresh.append(use)
            if count == 1:
                self.bursts += ((subject, burst) for burst in _new_bursts(session, before, now))

    def _longest(self, key: tuple[str, str], passed: float) -> float:
        """Return the maximum countable part of the time that has passed on the node's clock, in seconds."""
        if self._steady is None:
            return LONGEST
        now = self._steady()
        if key not in self._counted_to:
            # the time before this service saw the session is unknown here
            self._counted_to[key] = now - OLDEST
            return LONGEST
        longest = min(LONGEST, max(0.0, now - self._counted_to[key]))
        self._counted_to[key] += min(max(0.0, passed), longest)
        return longest

    def _add(self, hour: int, subject: Subject, amounts: GpuTimeAmounts) -> None:
        previous = self._amounts.get((hour, subject))
        self._amounts[hour, subject] = amounts if previous is None else previous.plus(amounts)


def _amounts(session: SessionReport, before: SessionCounters, after: SessionCounters) -> GpuTimeAmounts:
    """Return a session's amounts on one of its GPUs between two reports. ``session``: with its units there."""
    passed, count = after.seen_at - before.seen_at, len(session.gpus)
    share, borrowed = session.share_units / UNITS_PER_GPU, session.borrowed_units / UNITS_PER_GPU
    # regardless of its node's report, a session cannot work for longer than the elapsed time, plus a clock's step back
    longest = max(passed, SET_BACK)
    worked = min(_growth(before.gpu_seconds, after.gpu_seconds) / count, longest)
    # the report has only the last tier change, so an earlier change that was undone is not counted
    since = min(max(session.tier_since, before.seen_at), after.seen_at)
    held_before, held_after = (
        min(session_then.effective_units, session.share_units) for session_then in (before, after)
    )
    held = held_before * (since - before.seen_at) + held_after * (after.seen_at - since)
    return GpuTimeAmounts(
        reserved=share * passed,
        idle=share * max(0.0, passed - worked) if session.gpu_use_known else 0.0,
        recovered=max(0.0, share * passed - held / UNITS_PER_GPU),
        borrowed=borrowed * passed,
        used=worked,
        entitled=min(_growth(before.entitled, after.entitled) / count, longest),
        delivered=min(_growth(before.delivered, after.delivered) / count, longest),
        waits=_growth(before.waits, after.waits) / count,
        # an agent that was killed continues from an earlier figure
        energy=min(max(0.0, after.energy - before.energy) / count, MOST_WATTS * longest),
    )


def _new_bursts(session: SessionReport, before: SessionCounters, now: float) -> Iterator[BurstRecord]:
    """Yield the session's bursts since an earlier report. ``now``: the time of its report, in seconds."""
    for burst in session.bursts:
        if before.bursts_to < burst.ended_at and _is_past(burst, now):
            # regardless of the report, no burst begins before the session, and its parts are within it
            seconds = min(burst.seconds, max(0.0, burst.ended_at - session.begun))
            used = min(burst.gpu_seconds, seconds)
            gaps, contended = min(burst.gap_seconds, seconds - used), min(burst.contended_seconds, seconds)
            memory, units = burst.memory_bytes, session.share_units
            yield BurstRecord(burst.ended_at, seconds, used, gaps, contended, memory, units)


def _is_past(burst: Burst, now: float) -> bool:
    return burst.ended_at <= now + SET_BACK


def _priced(amounts: GpuTimeAmounts, prices: Prices, model: str, hour: int) -> GpuTimeAmounts:
    """Return the amounts of an hour with their price, and the CO2 for their energy."""
    price, kwh = prices.gpu_hour(model, hour), amounts.energy / JOULES_PER_KWH
    recovered = min(amounts.recovered, amounts.reserved)
    return replace(
        amounts,
        cost=price * amounts.held / HOUR + prices.energy * kwh,
        saved=price * recovered / HOUR,
        co2=prices.co2 * kwh,
    )


def _session_of(counters: SessionCounters | None) -> SessionReport | None:
    """Return a session by its stored counters; None: an earlier version has stored them, or a later one."""
    if counters is None or not counters.session_report:
        return None
    try:
        return SessionReport.model_validate_json(counters.session_report)
    except ValidationError:
        return None


def _is_late(published_at: float, counted: SessionCounters) -> bool:
    return counted.seen_at - SET_BACK <= published_at <= counted.seen_at


def _growth(before: float, after: float) -> float:
    """Return the increase of a counter. A smaller counter has restarted at 0 because its agent lost its state."""
    return after - before if after >= before else after


def _by_hour(begin: float, end: float) -> Iterator[tuple[int, float]]:
    """Yield the start of each hour from ``begin`` to ``end`` (seconds since the epoch), and its part of that time."""
    if end <= begin:
        yield int(end // HOUR) * HOUR, 1.0
        return
    hour = int(begin // HOUR) * HOUR
    while hour < end:
        part = (min(end, hour + HOUR) - max(begin, hour)) / (end - begin)
        if part > 0:
            yield hour, part
        hour += HOUR


_Server = tuple[str, str]
"""User and server name."""


class SpawnWatch:
    """The spawns that waited at the last observation, and the open sessions."""

    def __init__(self, group_of_user: Callable[[str], str]) -> None:
        self._group_of = group_of_user
        self._waiting: dict[_Server, tuple[float, str]] = {}
        self._open: dict[str, set[tuple[_Server, float]]] = {}

    def observe_report(self, report: Report, started: Mapping[_Server, float]) -> list[Wait]:
        """Return the waits of the sessions that were opened since the node's last report.

        ``started``: when the hub began to start each server (seconds since the epoch), if known. Sessions in a node's
        first report were opened before the watch began and are skipped.
        """
        before = self._open.get(report.node)
        self._open[report.node] = {((session.user, session.server), session.opened_at) for session in report.sessions}
        waits = []
        for session in report.sessions:
            server = (session.user, session.server)
            if before is None or (server, session.opened_at) in before:
                continue
            began, _ = self._waiting.pop(server, (started.get(server, session.opened_at), ""))
            waits.append(self._wait(server, session.template, began, session.opened_at, WaitOutcome.STARTED))
        return waits

    def observe_queue(self, waiting: Sequence[HubServer], now: float) -> list[Wait]:
        """Return the waits that ended without a session. ``waiting``: the servers that wait for a GPU now.

        All nodes must have reported. A spawn that neither waits nor has a session was then cancelled or has failed.
        ``now``: seconds since the epoch.
        """
        with_share = {server for sessions in self._open.values() for server, _ in sessions}
        still = {(server.user, server.name): server for server in waiting}
        waits = []
        for server in [server for server in self._waiting if server not in still]:
            began, template = self._waiting.pop(server)
            if server not in with_share:
                waits.append(self._wait(server, template, began, now, WaitOutcome.GAVE_UP))
        for server, spawn in still.items():
            if server not in with_share and server not in self._waiting:
                began = now if spawn.started is None else spawn.started
                self._waiting[server] = (began, spawn.profile or "")
        return waits

    def forget_nodes(self, present: Iterable[str]) -> None:
        """Discard nodes that have left the cluster. ``present``: the remaining nodes."""
        for node in set(self._open) - set(present):
            del self._open[node]

    def _wait(self, server: _Server, template: str, began: float, ended: float, outcome: WaitOutcome) -> Wait:
        user, name = server
        return Wait(began, max(0.0, ended - began), outcome, user, name, template, self._group_of(user))


log = logging.getLogger("gpushare.service.history")

OBSERVE_EVERY = 10.0
"""Seconds between observations of the reports. Use after a session's last observation is not counted."""
QUEUE_EVERY = 30.0
"""Seconds between requests for the hub's pending servers. Only spawns that end without a session need them."""
GROUPS_WITHIN = 600.0
"""Seconds for which a started service waits for the users' groups before it counts GPU time without a group."""
STORE_EVERY = 60.0
"""Seconds between writes. A killed service counts the missing time when it starts again; only the use of sessions that
ended before that is lost."""
THIN_EVERY = 6 * 3600.0
"""Seconds between deletions of old rows."""
PATIENCE = 60.0
"""Maximum seconds that a query waits for the database. It exceeds SQLite's wait for another process's lock."""
JOURNAL_PATIENCE = 5.0
"""Maximum seconds that a restart waits for the database. Our choice: a person waits for the answer."""
LAST_PATIENCE = 5.0
"""Maximum seconds that the shutdown waits for the last write, because the hub kills a service after 10 s."""
MOST_EVENTS = 100_000
"""Maximum number of actions, and of waits, buffered while the database does not answer. The oldest are dropped
first."""

T = TypeVar("T")


@dataclass(frozen=True)
class Retention:
    """Retention times of the history in seconds; 0: unlimited."""

    detail: float = 31.0 * DAY
    """GPU time by hour; older GPU time is stored by day. Our choice: the hours of the last month can be queried."""
    names: float = 400.0 * DAY
    """Names of users and of their servers."""
    keep: float = 3 * 365.0 * DAY
    """All entries."""


@dataclass(frozen=True)
class HistorySources:
    """The sources of the recorded data."""

    snapshots: Callable[[], Awaitable[Sequence[NodeSnapshot]]]
    users: Callable[[], Collection[HubUser] | None]
    """Function that returns the users in the hub's last answer; None: it has not answered yet, or not lately."""
    pending: Callable[[], Awaitable[Sequence[HubServer] | None]]
    """Returns the servers that the hub is starting; None: unknown."""
    templates: Callable[[], Mapping[str, Template]]
    clock: Callable[[], float] = time.time
    """Seconds since the epoch."""
    steady: Callable[[], float] = since_boot
    """Seconds on a clock that cannot be set."""
    waited: Callable[[Wait], None] = lambda wait: None
    """Function that is called with each spawn's wait when it has ended."""
    prices: Callable[[], Prices | None] = lambda: None
    """Returns the price list in force."""


class History:
    """The recorder of the history. A database that fails does not affect other parts of the service.

    One thread calls the database, so that a slow database does not block the event loop.
    """

    def __init__(self, store: HistoryStore, sources: HistorySources, retention: Retention | None = None) -> None:
        self._store = store
        self._sources = sources
        self._retention = retention or Retention()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="history")
        self._meter: Meter | None = None
        self._storing = asyncio.Lock()
        self._groups: dict[str, Collection[str]] = {}
        self._groups_known = False
        self._begun = sources.steady()
        self._spawns = SpawnWatch(lambda user: group_of_user(user, self._groups))
        self._tiers: dict[str, dict[tuple[str, float], Tier]] = {}
        """Tiers by node, then by session id and opening time."""
        self._actions: list[Action] = []
        self._waits: list[Wait] = []
        self.problem = ""
        """The reason why nothing can be stored now; empty: entries are stored."""
        self.counted: Callable[[Sequence[GpuTimeUse]], None] = lambda uses: None
        """Function that is called with the GPU time of each observation."""

    @property
    def currency(self) -> str:
        """The currency of the price list in force; empty: there is no price list."""
        prices = self._sources.prices()
        return prices.currency if prices is not None else ""

    async def run(self) -> None:
        """Observe, store and thin until cancelled, then store a last time."""
        work = (
            _repeat(self.observe, OBSERVE_EVERY),
            _repeat(self.observe_queue, QUEUE_EVERY),
            _repeat(self.store, STORE_EVERY),
            _repeat(self.thin, THIN_EVERY),
        )
        try:
            await asyncio.gather(*work)
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_PATIENCE):
                    await self.store()
            self._thread.shutdown(wait=False)
            self._store.close()

    async def observe(self) -> None:
        """Count the agents' reports."""
        snapshots = await self._sources.snapshots()
        users = self._sources.users()
        self._groups_known = self._groups_known or users is not None
        servers = [server for user in users or () for server in user.servers]
        # while the hub does not answer, users keep their last known groups
        self._groups |= {server.user: server.groups for server in servers if server.groups is not None}
        started = {(server.user, server.name): server.started for server in servers if server.started is not None}
        reports = answered(snapshots)
        for report in reports:
            if self._meter is not None:
                self._meter.observe(report, self.group_of)
            self._add_waits(self._spawns.observe_report(report, started))
            self._note_restored(report)
            if self._meter is not None:
                self.counted(self._meter.fresh())
            await asyncio.sleep(0)  # a node's sessions take milliseconds
        if len(reports) == len(snapshots):
            present = {report.node for report in reports}
            self._spawns.forget_nodes(present)
            self._tiers = {node: tiers for node, tiers in self._tiers.items() if node in present}

    async def observe_queue(self) -> None:
        """Count the spawns that ended without a session."""
        pending, snapshots = await self._sources.pending(), await self._sources.snapshots()
        reports = answered(snapshots)
        if pending is None or len(reports) < len(snapshots):
            return
        waiting = [spawn.server for spawn in waiting_spawns(pending, reports, self._sources.templates())]
        self._add_waits(self._spawns.observe_queue(waiting, self._sources.clock()))

    def record(self, action: Action) -> None:
        """Record an action. An action without a group gets the group of its user."""
        self._actions.append(replace(action, group=action.group or group_of_user(action.user, self._groups)))

    async def ask(self, query: Callable[[Connection], T]) -> T:
        """Return a query's result, including everything counted so far.

        Raises HistoryFailed, also after `PATIENCE`, because the database can hang.
        """
        try:
            async with asyncio.timeout(PATIENCE):
                # a write that hangs continues, and the amounts that it took are returned if it fails
                await self.store()
                return await self._in_thread(lambda: self._store.read(query))
        except TimeoutError:
            raise HistoryFailed(
                f"The database of the history did not answer in {PATIENCE:.0f} seconds. Ask again later, or for a "
                "shorter period."
            ) from None

    async def set_advice(self, advice: AdviceRecord) -> None:
        """Store advice on a share. Raises HistoryFailed."""
        await self._in_thread(lambda: self._store.set_advice(advice))

    async def read_uses(self, since: float, add: Callable[[Iterable[GpuTimeUse]], None]) -> None:
        """Pass the GPU time of accounts and users from an instant on to ``add``, in a thread. Raises HistoryFailed.

        What is counted later is passed to `counted`.
        """
        # no amounts are on their way to the database meanwhile, so each counts once
        async with self._storing:
            await self._opened(
                lambda: self._store.read(lambda connection: add(budget_uses(connection, since))), PATIENCE
            )
            assert self._meter is not None
            self._meter.fresh()
            add(self._meter.unstored())

    async def grants(self) -> list[Grant]:
        """Return the grants that have not ended. Raises HistoryFailed."""
        return await self._opened(lambda: self._store.grants(self._sources.clock()))

    async def grant(self, grant: Grant) -> None:
        """Store a grant, which replaces an earlier one. Raises HistoryFailed."""
        await self._opened(lambda: self._store.grant(grant))

    async def _opened(self, work: Callable[[], T], patience: float = JOURNAL_PATIENCE) -> T:
        def opened() -> T:
            self._open()
            return work()

        try:
            async with asyncio.timeout(patience):
                return await self._in_thread(opened)
        except TimeoutError:
            raise HistoryFailed("The database of the history does not answer.") from None

    async def begin_restart(self, restart: BegunRestart) -> None:
        """Store a restart that is in progress. Raises nothing; a database that fails or hangs is logged."""
        await self._journal(lambda: self._store.begin_restart(restart), None)

    async def end_restart(self, user: str, server: str) -> None:
        """Delete a finished restart. Raises nothing."""
        await self._journal(lambda: self._store.end_restart(user, server), None)

    async def begun_restarts(self) -> Sequence[BegunRestart]:
        """Return the restarts that are in progress; none if the database fails."""
        return await self._journal(self._store.begun_restarts, [])

    async def _journal(self, work: Callable[[], T], otherwise: T) -> T:
        try:
            return await self._opened(work)
        except HistoryFailed as error:
            log.error("A restart would not survive a kill of the service now. %s", error)
            return otherwise

    async def store(self) -> None:
        """Store the counted amounts. Amounts that cannot be stored are retained for the next call.

        Cancelling it does not end the write, which has taken the amounts: the next call waits for it.
        """
        await asyncio.shield(self._store_counted())

    async def _store_counted(self) -> None:
        async with self._storing:
            await self._store_taken()

    async def _store_taken(self) -> None:
        if self._meter is None and not await self._trying(self._open):
            self._limit()
            return
        assert self._meter is not None
        meter, actions, waits = self._meter, self._actions, self._waits
        taken, bursts = meter.take(), meter.bursts
        self._actions, self._waits, meter.bursts = [], [], []
        if not any((*taken, actions, waits, bursts)):
            return
        if not await self._trying(lambda: self._store.add(*taken, actions, waits, bursts)):
            meter.give_back(taken)
            meter.bursts = bursts + meter.bursts
            self._actions, self._waits = actions + self._actions, waits + self._waits
            self._limit()

    async def thin(self) -> None:
        """Merge and delete old rows."""
        if self._meter is not None:
            kept = self._retention
            await self._trying(lambda: self._store.thin(self._sources.clock(), kept.detail, kept.names, kept.keep))

    def _open(self) -> None:
        if self._meter is not None:
            # two calls can wait while the database does not answer; a second meter would count everything twice
            return
        self._store.upgrade()
        meter = Meter(self._store.counters(), self._sources.steady)
        meter.prices = self._sources.prices
        self._meter = meter

    async def _trying(self, work: Callable[[], None]) -> bool:
        """Run a database operation. Return whether it succeeded; a failure is logged once."""
        try:
            await self._in_thread(work)
        except HistoryFailed as error:
            if str(error) != self.problem:
                log.error("Nothing is added to the history. %s", error)
            self.problem = str(error)
            return False
        if self.problem:
            log.info("The history's database answers again")
        self.problem = ""
        return True

    async def _in_thread(self, work: Callable[[], T]) -> T:
        # amounts that were taken are stored even if the waiting task is cancelled
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work))

    def group_of(self, session: SessionReport) -> str | None:
        """Return the group to which the session is charged; empty: none; None: not known yet."""
        known = self._groups_known or self._sources.steady() - self._begun >= GROUPS_WITHIN
        group = group_of_session(session, self._groups)
        return group if known or group else None

    def _note_restored(self, report: Report) -> None:
        """Record that the agent restored a share, which it does by itself at the next burst."""
        before = self._tiers.get(report.node, {})
        self._tiers[report.node] = {(session.id, session.opened_at): session.tier for session in report.sessions}
        for session in report.sessions:
            was = before.get((session.id, session.opened_at))
            if was is not None and session.tier.depth < was.depth:
                group = self.group_of(session)
                entry = Action.on(session, report.node, session.tier_since, "restored", "agent", group or "")
                self.record(replace(entry, reason=restored(was)))

    def _add_waits(self, waits: Sequence[Wait]) -> None:
        self._waits += waits
        for wait in waits:
            self._sources.waited(wait)

    def _limit(self) -> None:
        lost = 0
        kept_lists: tuple[list[Any], ...] = (self._actions, self._waits, *([self._meter.bursts] if self._meter else []))
        for kept in kept_lists:
            more = max(0, len(kept) - MOST_EVENTS)
            del kept[:more]
            lost += more
        if lost:
            log.error("The history lost %d entries: its database does not answer", lost)


async def _repeat(work: Callable[[], Awaitable[None]], pause: float) -> None:
    while True:
        try:
            await work()
        except Exception:
            # a bad report must not end the recording
            log.exception("Cannot update the history")
        await asyncio.sleep(pause)
