"""Snapshots of all data that the service shows, and the stream of changes.

One snapshot serves all clients. Its version grows when it differs from the previous snapshot. `Events` sends each
client the names of the changed parts as server-sent events, without data of sessions. `reading` makes the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

from gpushare_spawner.descriptors import for_connections
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.report import GpuReport, SessionReport, doubled_gpus
from gpushare_spawner.model.template import Template
from gpushare_spawner.quota.accounts import QuotaUsage
from gpushare_spawner.service.culler.decisions import SessionDecision
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.service.reports import KnownReport, NodeSnapshot
from gpushare_spawner.service.sources import DashboardSources
from gpushare_spawner.service.waiting import WaitingSpawn, quota_use
from gpushare_spawner.service.web.units import KINDS, Kind, Segment, UnitsToOwn, gpu_bar, units_of

Part = Literal["sessions", "nodes", "queue", "quotas"]
PARTS: tuple[Part, ...] = get_args(Part)

AVAILABLE: tuple[Kind, ...] = ("lent", "free")
"""The kinds of units that a new session can get."""
MAX_AGE = 1.0
"""Seconds. Our choice, as in `RecentReports`: after a change a page requests several parts of one snapshot."""


@dataclass(frozen=True)
class Row:
    """One session, with its decision and its node's report."""

    decision: SessionDecision
    report: KnownReport

    @property
    def session(self) -> SessionReport:
        return self.decision.session


@dataclass(frozen=True)
class ServiceSnapshot:
    """Agents, decisions, templates and queue at one instant."""

    version: int
    taken_at: float
    """Seconds since the epoch."""
    snapshots: Sequence[NodeSnapshot]
    decisions: Sequence[SessionDecision]
    templates: Mapping[str, Template]
    pending: Sequence[HubServer] | None
    """The servers that the hub is starting; None: unknown."""
    quotas: Quotas | None
    waiting: Sequence[WaitingSpawn] | None = None
    """The spawns that wait; None: unknown."""
    notes: Sequence[str] = ()
    """Sentences for viewers that see all sessions."""
    orders: dict[str, list[Row]] = field(default_factory=dict)
    """The rows in each requested order; a cache of `reading`."""

    @cached_property
    def reports(self) -> list[KnownReport]:
        """The reports of the agents that answered."""
        return [snapshot.report for snapshot in self.snapshots if snapshot.report is not None]

    @cached_property
    def rows(self) -> list[Row]:
        """All sessions."""
        reports = {report.node: report for report in self.reports}
        return [Row(decision, reports[decision.node]) for decision in self.decisions]

    @cached_property
    def by_id(self) -> Mapping[str, Row]:
        """The sessions by id; of two sessions with the same id, the younger."""
        return {row.session.id: row for row in sorted(self.rows, key=lambda row: row.session.opened_at)}

    @cached_property
    def by_user(self) -> Mapping[str, list[Row]]:
        """The sessions of each user."""
        rows_by_user: dict[str, list[Row]] = {}
        for row in self.rows:
            rows_by_user.setdefault(row.session.user, []).append(row)
        return rows_by_user

    @cached_property
    def to_own(self) -> UnitsToOwn:
        """Units for offers of a restart; none while spawns wait.

        A restarted session would wait behind them, and free units can be held for one of them.
        """
        return UnitsToOwn(self.reports if not self.waiting else ())

    @cached_property
    def usage(self) -> QuotaUsage | None:
        """Use of the quotas; None: there are no quotas."""
        return quota_use(self.quotas, self.reports) if self.quotas is not None else None

    @cached_property
    def bars(self) -> Mapping[tuple[str, str], list[Segment]]:
        """The units of each GPU, by node and UUID."""
        return {(report.node, gpu.uuid): gpu_bar(gpu, on) for report, gpu, on in self._gpus()}

    @cached_property
    def units(self) -> Counter[Kind]:
        """The units of all GPUs, by kind."""
        total: Counter[Kind] = Counter()
        for report, gpu in self.counted_gpus:
            for kind in KINDS:
                total[kind] += units_of(self.bars[report.node, gpu.uuid], kind)
        return total

    @cached_property
    def counted_gpus(self) -> list[tuple[KnownReport, GpuReport]]:
        """Each GPU once, with its node's report. A GPU that several nodes report counts for the node that has it."""
        node_of = {uuid: nodes[0] for uuid, nodes in doubled_gpus(self.reports).items()}
        return [
            (report, gpu)
            for report in self.reports
            for gpu in report.gpus
            if node_of.get(gpu.uuid, report.node) == report.node
        ]

    @cached_property
    def available_units(self) -> int:
        """The lent and free units of the GPUs that take new sessions."""
        return sum(
            units_of(self.bars[report.node, gpu.uuid], kind)
            for report, gpu in self.counted_gpus
            if gpu.healthy and report.cordon() is None and report.cordon(gpu.uuid) is None
            for kind in AVAILABLE
        )

    def _gpus(self) -> Iterator[tuple[KnownReport, GpuReport, list[SessionReport]]]:
        for report in self.reports:
            on: dict[str, list[SessionReport]] = {}
            for session in report.allocated_to:
                for uuid in session.gpus:
                    on.setdefault(uuid, []).append(session)
            for gpu in report.gpus:
                yield report, gpu, on.get(gpu.uuid, [])


class ServiceSnapshots:
    """The source of snapshots: takes them on request, at most one in ``max_age`` seconds."""

    def __init__(
        self, sources: DashboardSources, max_age: float = MAX_AGE, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._sources = sources
        self._max_age = max_age
        self._monotonic = monotonic
        self._current: ServiceSnapshot | None = None
        self._taken = float("-inf")
        self._versions: dict[Part, int] = {}
        self._taking = asyncio.Lock()

    async def current(self) -> ServiceSnapshot:
        """Return a snapshot that is at most ``max_age`` seconds old."""
        async with self._taking:
            if self._current is None or self._monotonic() - self._taken >= self._max_age:
                self._current = await self._take(self._current)
                self._taken = self._monotonic()
            return self._current

    def outdated(self) -> None:
        """Mark the snapshot as old after an action, so that the next request reads the agents again."""
        self._taken = float("-inf")
        self._sources.reports.outdated()

    def changed_since(self, version: int) -> tuple[Part, ...]:
        """Return the parts that have changed after a version."""
        return tuple(part for part in PARTS if self._versions.get(part, 0) > version)

    async def _take(self, before: ServiceSnapshot | None) -> ServiceSnapshot:
        sources = self._sources
        snapshots, decisions, templates, now = await sources.now()
        pending = await sources.pending()
        # versions keep growing over restarts of the service
        version = before.version if before is not None else int(now)
        reports = [snapshot.report for snapshot in snapshots if snapshot.report is not None]
        waiting = await sources.waiting(pending, reports, templates)
        taken = ServiceSnapshot(
            version, now, snapshots, decisions, templates, pending, sources.quotas(), waiting, tuple(sources.notes())
        )
        changed = _changed(before, taken) if before is not None else PARTS
        if not changed:
            return taken
        self._versions |= dict.fromkeys(changed, version + 1)
        return replace(taken, version=version + 1)


def _changed(before: ServiceSnapshot, after: ServiceSnapshot) -> tuple[Part, ...]:
    sessions = before.templates != after.templates or _sessions_differ(before.decisions, after.decisions)
    quotas = before.quotas != after.quotas
    changes: dict[Part, bool] = {
        "sessions": sessions or quotas,
        # the units of GPUs depend on their sessions
        "nodes": sessions or before.notes != after.notes or _nodes_differ(before.snapshots, after.snapshots),
        "queue": before.pending != after.pending or before.waiting != after.waiting,
        "quotas": quotas or (after.quotas is not None and sessions),
    }
    return tuple(part for part in PARTS if changes[part])


def _sessions_differ(before: Sequence[SessionDecision], after: Sequence[SessionDecision]) -> bool:
    return any(
        earlier is None
        or later is None
        or (earlier.node, earlier.session, earlier.decision.upcoming, earlier.decision.no_action)
        != (later.node, later.session, later.decision.upcoming, later.decision.no_action)
        for earlier, later in zip_longest(before, after)
    )


def _nodes_differ(before: Sequence[NodeSnapshot], after: Sequence[NodeSnapshot]) -> bool:
    return list(map(_shown, before)) != list(map(_shown, after))


def _shown(snapshot: NodeSnapshot) -> tuple[Any, ...]:
    report = snapshot.report
    if report is None:
        return (snapshot.problem,)
    # temperature and power change all the time: pages update them with other changes
    gpus = [gpu.model_copy(update={"temperature_celsius": None, "power_watts": None}) for gpu in report.gpus]
    return report.node, gpus, report.cordons, report.host_memory, report.state_trouble


log = logging.getLogger("gpushare.service.api")

EVERY = 2.0
"""Seconds between two checks for changes while there are streams."""
HEARTBEAT = 15.0
"""Seconds after which a stream without events gets a comment: proxies end streams that are silent for a minute."""
LONGEST = 3600.0
"""Seconds after which a stream ends and its client logs in again: its rights can have changed."""
AFTER_FAILURE = 30.0
"""Seconds until the next check after a failure."""
MOST_STREAMS = 2000
"""Streams of all users, at most half of the descriptors for connections: other requests need connections too."""
MOST_STREAMS_OF_USER = 20
"""A browser allows 6 for each site over HTTP/1.1; a user has several browsers."""


class ChangedResources(BaseModel):
    """The changes since the last event."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    version: int
    """Grows with each change, also over restarts of the service."""
    parts: tuple[Part, ...]
    """Parts to request again. The first event of a stream names all parts."""


class TooManyStreams(Exception):
    """No further stream can be opened; the text states the reason."""


class Events:
    """Polls for changes while there are streams."""

    def __init__(self, snapshots: ServiceSnapshots, every: float = EVERY, heartbeat: float = HEARTBEAT) -> None:
        self._snapshots = snapshots
        self._every = every
        self._heartbeat = heartbeat
        self._version = 0
        self._news = asyncio.Condition()
        self._poller: asyncio.Task[None] | None = None
        self._soon = asyncio.Event()
        self._streams: Counter[str] = Counter()
        self._most_streams = min(MOST_STREAMS, for_connections() // 2)

    def poll_now(self) -> None:
        """Check for changes at once, after an action."""
        self._soon.set()

    async def stream(self, of: str) -> AsyncGenerator[str]:
        """Yield the events for a client, ``of`` this user or service. Raises TooManyStreams before the first event."""
        if self._streams.total() >= self._most_streams or self._streams[of] >= MOST_STREAMS_OF_USER:
            raise TooManyStreams("Too many pages listen for changes: close some of them, or try again in a minute.")
        self._streams[of] += 1
        try:
            if not self._polling:
                version = (await self._snapshots.current()).version
                # another stream can have begun meanwhile
                if not self._polling:
                    self._version = version
                    self._poller = asyncio.create_task(self._poll())
            seen = self._version
            yield _event(ChangedResources(version=seen, parts=PARTS))
            ends = asyncio.get_running_loop().time() + LONGEST
            while asyncio.get_running_loop().time() < ends:
                if not await self._changed_after(seen):
                    yield ": nothing has changed\n\n"
                    continue
                parts, seen = self._snapshots.changed_since(seen), self._version
                yield _event(ChangedResources(version=seen, parts=parts))
        finally:
            self._streams[of] -= 1
            if not self._streams[of]:
                del self._streams[of]
            if not self._streams and self._poller is not None:
                self._poller.cancel()
                self._poller = None

    @property
    def _polling(self) -> bool:
        return self._poller is not None and not self._poller.done()

    async def _changed_after(self, version: int) -> bool:
        """Wait for a later version, at most until a heartbeat is due."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._heartbeat), self._news:
                await self._news.wait_for(lambda: self._version > version)
                return True
        return False

    async def _poll(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._soon.wait(), self._every)
            self._soon.clear()
            try:
                version = (await self._snapshots.current()).version
            except Exception:
                # the next check can succeed; without it all pages would stay silent
                log.exception("Cannot look for changes")
                await asyncio.sleep(AFTER_FAILURE)
                continue
            if version != self._version:
                async with self._news:
                    self._version = version
                    self._news.notify_all()


def _event(changed: ChangedResources) -> str:
    return f"event: changed\nid: {changed.version}\ndata: {changed.model_dump_json()}\n\n"
