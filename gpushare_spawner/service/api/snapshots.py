"""The current snapshot of all data that the service shows, and the stream of its changes.

One snapshot (`service.sources`) serves all clients. Its version increases when it differs from the previous snapshot.
`Events` sends the names of the changed parts to each client as server-sent events, without session data. `reading`
builds the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

from gpushare_spawner.descriptors import for_connections
from gpushare_spawner.model.quota import BudgetState
from gpushare_spawner.service.culler.decisions import SessionDecision
from gpushare_spawner.service.reports import NodeSnapshot
from gpushare_spawner.service.sources import DashboardSources, ServiceSnapshot

Part = Literal["sessions", "nodes", "queue", "quotas"]
PARTS: tuple[Part, ...] = get_args(Part)

MAX_AGE = 1.0
"""Seconds. Our choice, as in `RecentReports`, because after a change a page requests several parts of one snapshot."""


class ServiceSnapshots:
    """Source of snapshots, which are taken on request, at most one per ``max_age`` seconds."""

    def __init__(self, sources: DashboardSources, max_age: float = MAX_AGE) -> None:
        self._sources = sources
        self._max_age = max_age
        self._current: ServiceSnapshot | None = None
        self._taken = float("-inf")
        self._versions: dict[Part, int] = {}
        self._taking = asyncio.Lock()

    async def current(self) -> ServiceSnapshot:
        """Return a snapshot that is at most ``max_age`` seconds old."""
        async with self._taking:
            if self._current is None or time.monotonic() - self._taken >= self._max_age:
                self._current = await self._take(self._current)
                self._taken = time.monotonic()
            return self._current

    def outdated(self) -> None:
        """Mark the snapshot as outdated after an action, so that the next request reads the agents' reports again."""
        self._taken = float("-inf")
        self._sources.reports.outdated()

    def changed_since(self, version: int) -> tuple[Part, ...]:
        """Return the parts that have changed since a version."""
        return tuple(part for part in PARTS if self._versions.get(part, 0) > version)

    async def _take(self, before: ServiceSnapshot | None) -> ServiceSnapshot:
        taken = await self._sources.take()
        # versions keep increasing over restarts of the service
        version = before.version if before is not None else int(taken.taken_at)
        changed = _changed(before, taken) if before is not None else PARTS
        self._versions |= dict.fromkeys(changed, version + 1)
        return replace(taken, version=version + bool(changed))


def _changed(before: ServiceSnapshot, after: ServiceSnapshot) -> tuple[Part, ...]:
    sessions = before.templates != after.templates or _sessions_differ(before.decisions, after.decisions)
    quotas = before.quotas != after.quotas or _budgets_differ(before.budgets, after.budgets)
    changes: dict[Part, bool] = {
        "sessions": sessions or quotas,
        # GPUs' units depend on their sessions
        "nodes": sessions or before.notes != after.notes or _nodes_differ(before.snapshots, after.snapshots),
        "queue": before.pending != after.pending or before.waiting != after.waiting,
        "quotas": quotas or (after.quotas is not None and sessions),
    }
    return tuple(part for part in PARTS if changes[part])


def _budgets_differ(before: Sequence[BudgetState], after: Sequence[BudgetState]) -> bool:
    # the list is the same for seconds
    return before is not after and [state.shown for state in before] != [state.shown for state in after]


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
    # temperature and power change constantly, so pages update them only with other changes
    gpus = [gpu.model_copy(update={"temperature_celsius": None, "power_watts": None}) for gpu in report.gpus]
    return report.node, gpus, report.cordons, report.host_memory, report.state_trouble


log = logging.getLogger("gpushare.service.api")

EVERY = 2.0
"""Seconds between checks for changes while there are streams."""
HEARTBEAT = 15.0
"""Seconds after which a stream without events gets a comment, because proxies end streams that are silent for a
minute."""
LONGEST = 3600.0
"""Seconds after which a stream ends, so that its client authenticates again, because its rights may have changed."""
AFTER_FAILURE = 30.0
"""Seconds until the next check after a failure."""
MOST_STREAMS = 2000
"""Maximum streams of all users. At most half of the descriptors, because other requests also need connections."""
MOST_STREAMS_OF_USER = 20
"""Maximum streams of one user. A browser allows 6 per site over HTTP/1.1, and a user can have several browsers."""


class ChangedResources(BaseModel):
    """The changes since the last event."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    version: int
    """Version number that increases with each change, also over restarts of the service."""
    parts: tuple[Part, ...]
    """Parts to request again. The first event of a stream names all parts."""


class TooManyStreams(Exception):
    """Error: no further stream can be opened. The text states the reason."""


class Events:
    """Streams of changes. Polls for changes while there are streams."""

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
        """Check for changes immediately after an action."""
        self._soon.set()

    async def stream(self, user: str) -> AsyncGenerator[str]:
        """Yield a client's events. ``user``: its user or service. Raises TooManyStreams before the first event."""
        if self._streams.total() >= self._most_streams or self._streams[user] >= MOST_STREAMS_OF_USER:
            raise TooManyStreams("Too many pages listen for changes: close some of them, or try again in a minute.")
        self._streams[user] += 1
        try:
            if not self._polling:
                version = (await self._snapshots.current()).version
                # another stream may have started in the meantime
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
            self._streams[user] -= 1
            if not self._streams[user]:
                del self._streams[user]
            if not self._streams and self._poller is not None:
                self._poller.cancel()
                self._poller = None

    @property
    def _polling(self) -> bool:
        return self._poller is not None and not self._poller.done()

    async def _changed_after(self, version: int) -> bool:
        """Wait for a later version, but at most until a heartbeat is due."""
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
                # the next check may succeed; without it, no page would be updated
                log.exception("Cannot check for changes")
                await asyncio.sleep(AFTER_FAILURE)
                continue
            if version != self._version:
                async with self._news:
                    self._version = version
                    self._news.notify_all()


def _event(changed: ChangedResources) -> str:
    return f"event: changed\nid: {changed.version}\ndata: {changed.model_dump_json()}\n\n"
