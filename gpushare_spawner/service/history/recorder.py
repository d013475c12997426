"""Keeps the history: counts each report, and stores what was counted once a minute."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from sqlalchemy import Connection

from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.template import Template
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.service.history.events import Action, BegunRestart, Wait
from gpushare_spawner.service.history.groups import group_of_session, group_of_user
from gpushare_spawner.service.history.metering import Meter
from gpushare_spawner.service.history.store import HistoryFailed, HistoryStore
from gpushare_spawner.service.history.use import DAY
from gpushare_spawner.service.history.waiting import SpawnWatch
from gpushare_spawner.service.hub.client import HubServer, HubUser
from gpushare_spawner.service.reports import NodeSnapshot
from gpushare_spawner.service.waiting_spawns import waiting_spawns
from gpushare_spawner.wall_clock import since_boot
from gpushare_spawner.wording.history import restored

log = logging.getLogger("gpushare.service.history")

OBSERVE_EVERY = 10.0
"""Seconds between two looks at the reports: what a session did after the last look before its end is not counted."""
QUEUE_EVERY = 30.0
"""Seconds between two questions to the hub for its pending servers: only for spawns that give up, so seldom."""
STORE_EVERY = 60.0
"""Seconds. A service that is killed counts the time since then when it starts again; only what sessions did that ended
in between is lost."""
THIN_EVERY = 6 * 3600.0
"""Seconds between two deletions of what is old."""
PATIENCE = 60.0
"""Seconds for which a question waits for the database: longer than SQLite waits for another process's lock."""
JOURNAL_PATIENCE = 5.0
"""Seconds for which a restart waits for the database. Ours: a person waits for the answer."""
LAST_PATIENCE = 5.0
"""Seconds for which the end of the service waits for the last storing: the hub kills a service after 10 s."""
MOST_EVENTS = 100_000
"""Actions, and waits, that are kept while the database does not answer; the oldest are given up first."""

T = TypeVar("T")


@dataclass(frozen=True)
class Retention:
    """How long the history is kept, in seconds; 0: without end."""

    detail: float = 31.0 * DAY
    """By the hour; afterwards by the day."""
    names: float = 400.0 * DAY
    """With the names of users."""
    keep: float = 3 * 365.0 * DAY
    """At all."""


@dataclass(frozen=True)
class HistorySources:
    """What is recorded, and where it comes from."""

    snapshots: Callable[[], Awaitable[Sequence[NodeSnapshot]]]
    users: Callable[[], Collection[HubUser]]
    """Returns the hub's users as far as they are known now."""
    pending: Callable[[], Awaitable[Sequence[HubServer] | None]]
    """Returns the servers that the hub is starting; None: unknown."""
    templates: Callable[[], Mapping[str, Template]]
    clock: Callable[[], float] = time.time
    """Seconds since the epoch."""
    steady: Callable[[], float] = since_boot
    """Seconds of a clock that nobody sets."""
    waited: Callable[[Wait], None] = lambda wait: None
    """Is told of each wait of a spawn when it has ended."""


class History:
    """Records and answers. A database that fails stops nothing else of the service.

    One thread asks the database, so that a slow one does not block the event loop.
    """

    def __init__(self, store: HistoryStore, sources: HistorySources, retention: Retention | None = None) -> None:
        self._store = store
        self._sources = sources
        self._retention = retention or Retention()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="history")
        self._meter: Meter | None = None
        self._groups: dict[str, Collection[str]] = {}
        self._spawns = SpawnWatch(lambda user: group_of_user(user, self._groups))
        self._tiers: dict[str, dict[tuple[str, float], Tier]] = {}
        """By node, and by the session's id and the instant at which it was opened."""
        self._actions: list[Action] = []
        self._waits: list[Wait] = []
        self._problem = ""

    @property
    def problem(self) -> str:
        """Why nothing is stored now; empty: it is."""
        return self._problem

    async def run(self) -> None:
        """Observe, store and thin without end; store a last time when cancelled."""
        tasks = [
            asyncio.create_task(_repeat(work, pause))
            for work, pause in (
                (self.observe, OBSERVE_EVERY),
                (self.observe_queue, QUEUE_EVERY),
                (self.store, STORE_EVERY),
                (self.thin, THIN_EVERY),
            )
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_PATIENCE):
                    await asyncio.shield(self.store())
            self._thread.shutdown(wait=False)
            self._store.close()

    async def observe(self) -> None:
        """Count what the agents' reports say."""
        snapshots = await self._sources.snapshots()
        users = self._sources.users()
        servers = [server for user in users for server in user.servers]
        # while the hub does not answer, users are in the groups in which they were
        self._groups |= {server.user: server.groups for server in servers if server.groups is not None}
        started = {(server.user, server.name): server.started for server in servers if server.started is not None}
        reports = [snapshot.report for snapshot in snapshots if snapshot.report is not None]
        for report in reports:
            if self._meter is not None:
                self._meter.observe(report, self._group_of)
            self._add_waits(self._spawns.observe_report(report, started))
            self._note_restored(report)
        if len(reports) == len(snapshots):
            present = {report.node for report in reports}
            self._spawns.forget_nodes(present)
            self._tiers = {node: tiers for node, tiers in self._tiers.items() if node in present}

    async def observe_queue(self) -> None:
        """Count the spawns that gave up."""
        pending, snapshots = await self._sources.pending(), await self._sources.snapshots()
        reports = [snapshot.report for snapshot in snapshots if snapshot.report is not None]
        if pending is None or len(reports) < len(snapshots):
            return
        waiting = [one.server for one in waiting_spawns(pending, reports, self._sources.templates())]
        self._add_waits(self._spawns.observe_queue(waiting, self._sources.clock()))

    def record(self, action: Action) -> None:
        """Record an action; one that names no group gets that of its user."""
        self._actions.append(replace(action, group=action.group or group_of_user(action.user, self._groups)))

    async def ask(self, query: Callable[[Connection], T]) -> T:
        """Return a query's result, with all that is counted until now. Raises HistoryFailed.

        Also after `PATIENCE`: the database may hang.
        """
        try:
            async with asyncio.timeout(PATIENCE):
                # a store that hangs goes on: what it took comes back if it fails
                await asyncio.shield(self.store())
                return await self._in_thread(lambda: self._store.read(query))
        except TimeoutError:
            raise HistoryFailed(
                f"The database of the history did not answer in {PATIENCE:.0f} seconds. Ask again later, or for a "
                "shorter period."
            ) from None

    async def begin_restart(self, restart: BegunRestart) -> None:
        """Store a restart that is under way. Raises nothing: a database that fails or hangs is logged."""
        await self._journal(lambda: self._store.begin_restart(restart), None)

    async def end_restart(self, user: str, server: str) -> None:
        """Delete a restart that is over. Raises nothing."""
        await self._journal(lambda: self._store.end_restart(user, server), None)

    async def begun_restarts(self) -> Sequence[BegunRestart]:
        """Return the restarts that are under way; none where the database fails."""
        return await self._journal(self._store.begun_restarts, [])

    async def _journal(self, work: Callable[[], T], otherwise: T) -> T:
        def opened() -> T:
            self._open()
            return work()

        try:
            async with asyncio.timeout(JOURNAL_PATIENCE):
                return await self._in_thread(opened)
        except (HistoryFailed, TimeoutError) as error:
            why = error if isinstance(error, HistoryFailed) else "The database of the history does not answer."
            log.error("A restart is not safe against a kill of the service now. %s", why)
            return otherwise

    async def store(self) -> None:
        """Store what was counted; what cannot be stored is kept for the next time."""
        if self._meter is None and not await self._trying(self._open):
            self._limit()
            return
        assert self._meter is not None
        meter, actions, waits = self._meter, self._actions, self._waits
        taken = meter.take()
        self._actions, self._waits = [], []
        if not any((*taken, actions, waits)):
            return
        if not await self._trying(lambda: self._store.add(*taken, actions, waits)):
            meter.give_back(taken)
            self._actions, self._waits = actions + self._actions, waits + self._waits
            self._limit()

    async def thin(self) -> None:
        """Make old rows fewer."""
        if self._meter is not None:
            kept = self._retention
            await self._trying(lambda: self._store.thin(self._sources.clock(), kept.detail, kept.names, kept.keep))

    def _open(self) -> None:
        if self._meter is not None:
            # asked for twice while the database did not answer; a second meter would count the same again
            return
        self._store.upgrade()
        self._meter = Meter(self._store.counters(), self._sources.steady)

    async def _trying(self, work: Callable[[], None]) -> bool:
        """Run work of the database; a failure is logged once. Returns whether it succeeded."""
        try:
            await self._in_thread(work)
        except HistoryFailed as error:
            if str(error) != self._problem:
                log.error("Nothing is added to the history. %s", error)
            self._problem = str(error)
            return False
        if self._problem:
            log.info("The history's database answers again")
        self._problem = ""
        return True

    async def _in_thread(self, work: Callable[[], T]) -> T:
        # what was taken to be stored is stored although the task that waits for it is cancelled
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work))

    def _group_of(self, session: SessionReport) -> str:
        return group_of_session(session, self._groups)

    def _note_restored(self, report: Report) -> None:
        """Record that the agent restored a share: it does so by itself, with the next burst."""
        before = self._tiers.get(report.node, {})
        self._tiers[report.node] = {(session.id, session.opened_at): session.tier for session in report.sessions}
        for session in report.sessions:
            was = before.get((session.id, session.opened_at))
            if was is not None and session.tier.depth < was.depth:
                self.record(_restored(report.node, session, was, self._group_of(session)))

    def _add_waits(self, waits: Sequence[Wait]) -> None:
        self._waits += waits
        for wait in waits:
            self._sources.waited(wait)

    def _limit(self) -> None:
        lost = 0
        for kept in (self._actions, self._waits):
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
            # one bad report must not end the recording
            log.exception("The history could not be brought up to date")
        await asyncio.sleep(pause)


def _restored(node: str, session: SessionReport, was: Tier, group: str) -> Action:
    return Action(
        at=session.tier_since,
        action="restored",
        actor="agent",
        user=session.user,
        server=session.server,
        template=session.template,
        group=group,
        node=node,
        units=session.effective_units,
        reason=restored(was),
    )
