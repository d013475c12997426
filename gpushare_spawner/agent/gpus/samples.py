"""The driver's samples of GPU time and memory, for the arbiter.

`Delivery` reads samples of GPU time while sessions compete for a GPU. `MemoryQueries` reads a GPU's memory use when the
figure decides which clients may run: at a process's first request, and every tenth of a second while clients run
together because of earlier figures. In addition, the agent's rounds read the figure every two seconds.
The calls can hang forever in a driver (nvml.py), and run in daemon threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Generic, Protocol, TypeVar

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.nvml import Gpu, GpuSource, GpuState, Utilisation
from gpushare_spawner.background import in_daemon_thread
from gpushare_spawner.clocks import STEP, WallClock
from gpushare_spawner.model.share import UNITS_PER_GPU

log = logging.getLogger(__name__)


EVERY = 0.2
"""Seconds between two readings: a little more than the length of the driver's samples."""
SILENCE = 0.6
"""Seconds without a sample after which the GPU counts as idle."""
LATEST = 0.3
"""Most recent seconds that samples may not cover yet."""


Result = TypeVar("Result")


class PatientQuery(Generic[Result]):
    """Queries of the driver in one thread at a time: the next call waits for a query that hangs."""

    def __init__(self) -> None:
        self._pending: asyncio.Future[Result] | None = None

    async def answer(self, query: Callable[[], Result], within: float) -> Result | None:
        """Return the result of the query, or of the query in progress; None if it takes more than `within` seconds."""
        if self._pending is None:
            self._pending = in_daemon_thread(query)
        await asyncio.wait([self._pending], timeout=within)
        if not self._pending.done():
            return None
        finished, self._pending = self._pending, None
        return finished.result()


class _Queries:
    """Queries of the driver for one GPU. The driver can block or hang, so only one thread at a time queries it."""

    def __init__(self, gpu: Gpu, source: GpuSource) -> None:
        self._gpu = gpu
        self._source = source
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._asking = self._closed = False

    def close(self) -> None:
        """Stop querying."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _begin(self, query: Callable[[], Result], answered: Callable[[Result], None]) -> None:
        """Call `query`, which must not raise, in a thread, and then `answered` on the event loop."""
        self._timer, self._asking = None, True
        in_daemon_thread(query).add_done_callback(lambda done: answered(done.result()))


SessionsOf = Callable[[Iterable[int]], Mapping[int, str]]
"""Function that returns the sessions of processes, by pid."""
Sample = tuple[tuple[Utilisation, ...] | None, Mapping[int, str]]
"""The processes' fractions of GPU time, or None if the driver has no such figures; the processes' sessions, by pid."""


def nobody(pids: Iterable[int]) -> Mapping[int, str]:
    """Attribute no processes to sessions."""
    return {}


LONGEST_SAMPLE = 10.0
"""Maximum seconds that count between two readings of a GPU's power, because after a pause its past is unknown."""


class Energy:
    """Divides the energy of GPUs between their sessions, by readings of their power."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}
        """Time and power of the last reading of each GPU."""
        self._without_work: dict[str, float] = {}
        """The lowest power of each GPU so far, which counts as its power without work."""

    def divided(
        self, gpu: str, watts: float, now: float, used: Mapping[str, float], units: Mapping[str, int]
    ) -> dict[str, float]:
        """Return the joules of each session since the last reading.

        `used`: GPU time of the sessions in the last second. `units`: units of 1 % that they hold. The power without
        work of units that no session holds, and power above it without any session's work, count for none.
        """
        before, self._last[gpu] = self._last.get(gpu), (now, watts)
        idle = self._without_work[gpu] = min(watts, self._without_work.get(gpu, watts))
        if before is None:
            return {}
        elapsed = min(max(0.0, now - before[0]), LONGEST_SAMPLE)
        mean, busy = (before[1] + watts) / 2, sum(used.values())
        held = max(UNITS_PER_GPU, sum(units.values()))
        above = max(0.0, mean - idle) / busy if busy > 0 else 0.0
        return {
            name: elapsed * (idle * units.get(name, 0) / held + above * used.get(name, 0.0))
            for name in {**units, **used}
        }


class Competition(Protocol):
    """The arbitration of one GPU, which receives the samples."""

    @property
    def contended(self) -> bool:
        """Whether samples matter: several sessions have work, or one with a limit of GPU time."""

    def delivered(
        self, seconds_ago: tuple[float, float], busy: Mapping[int, float], strangers: Mapping[int, str]
    ) -> None:
        """Add a sample: start and end in seconds before now, and each process's GPU seconds, by pid.

        `strangers`: the sessions of processes, by pid, whether or not they are connected.
        """


class Delivery(_Queries):
    """Reader of one GPU's samples."""

    def __init__(
        self,
        gpu: Gpu,
        source: GpuSource,
        competition: Competition,
        sessions_of: SessionsOf = nobody,
        every: float = EVERY,
    ) -> None:
        """Prepare for reading. `every`: seconds between two readings.

        `sessions_of` returns the sessions of processes from kernel data. It is called in the thread that queries the
        driver.
        """
        super().__init__(gpu, source)
        self._every = every
        self._competition = competition
        self._sessions_of = sessions_of
        self.has_samples = True
        """Whether the driver has such figures."""
        self._clock = WallClock()
        self._clock.was_set = self._clock_was_set
        self._since = 0.0
        """End of the last sample, in seconds since the epoch."""

    def request(self) -> None:
        """Read samples until they no longer matter."""
        if self._timer is None and not self._asking and not self._closed:
            self._since = self._clock()
            self._timer = self._loop.call_later(self._every, self._ask)

    def _ask(self) -> None:
        self._begin(partial(self._query, self._since), self._answered)

    def _query(self, since: float) -> Sample:
        samples: tuple[Utilisation, ...] | None = None
        strangers: Mapping[int, str] = {}
        try:
            samples = self._source.utilisation(self._gpu, since)
            strangers = self._sessions_of(sample.pid for sample in samples or ())
        except Exception:
            # the samples of connected processes are valid without the sessions of other processes
            log.exception("cannot read the processes' use of GPU %d", self._gpu.index)
        return samples, strangers

    def _answered(self, sample: Sample) -> None:
        samples, strangers = sample
        if samples is None:
            self._closed, self.has_samples = True, False  # no such figures: the arbiter estimates from leases
        if not self._closed:
            self._take(samples or (), strangers)
        # only now: the competition requests the next sample while it processes this sample
        self._asking = False
        if self._competition.contended and not self._closed:
            self._timer = self._loop.call_later(self._every, self._ask)

    def _clock_was_set(self, by: float) -> None:
        self._since += by

    def _take(self, samples: tuple[Utilisation, ...], strangers: Mapping[int, str]) -> None:
        """Pass samples that are newer than the last samples to the competition."""
        now = self._clock()
        # a sample from before a backward clock step would be as long as the step
        samples = tuple(sample for sample in samples if sample.at < now + STEP)
        until = max((sample.at for sample in samples), default=0.0)
        if not samples and now - self._since > SILENCE:
            until = now - LATEST
        if not self._since <= now:
            self._since = now  # the clock was set back
        elif until > self._since:
            span = (now - self._since, now - until)
            busy = {sample.pid: sample.busy * (until - self._since) for sample in samples}
            self._competition.delivered(span, busy, strangers)
            self._since = until


class Pids:
    """The sessions of the processes on one GPU, by pid, including disconnected processes that are still running."""

    def __init__(self) -> None:
        self._clients: dict[int, tuple[str, processes.ProcessName | None]] = {}
        """Session and process, by client number."""
        self._left: dict[processes.ProcessName, tuple[str, int]] = {}
        """Session and client number of processes without a remaining connection."""

    def joined(self, client: int, session: str, name: processes.ProcessName | None) -> None:
        """Add a client. `name` is None if its process is not visible to the agent."""
        self._clients[client] = session, name
        if name is not None:
            self._left.pop(name, None)

    def left(self, client: int) -> bool:
        """Remove a client. Return whether its process is still running."""
        session, name = self._clients.pop(client, ("", None))
        if name is None or not processes.alive(name):
            return False
        if all(other != name for _, other in self._clients.values()):
            self._left[name] = session, client
        return True

    def forget(self, session: str) -> None:
        """Remove a session."""
        self._left = {name: left for name, left in self._left.items() if left[0] != session}

    def ended(self) -> list[tuple[int, str]]:
        """Return the disconnected clients with ended processes, each with its session."""
        gone = [name for name in self._left if not processes.alive(name)]
        return [(client, session) for session, client in map(self._left.pop, gone)]

    @property
    def waiting(self) -> bool:
        """Return whether any disconnected processes are still running."""
        return bool(self._left)

    def by_session(self, busy: Mapping[int, float], strangers: Mapping[int, str]) -> dict[str, float]:
        """Sum seconds per pid into seconds per session.

        Sessions with a process that is not visible to the agent are omitted. `strangers`: sessions by pid, used for
        processes that never connected.
        """
        sums: dict[str, float] = {}
        pids: dict[int, str] = {}
        for session, name in self._clients.values():
            sums.setdefault(session, 0.0)
            if name is not None:
                pids[name.pid] = session
        for name, (session, _) in self._left.items():
            sums.setdefault(session, 0.0)
            pids[name.pid] = session
        for pid, session in {**strangers, **pids}.items():
            sums[session] = sums.get(session, 0.0) + busy.get(pid, 0.0)
        unseen = {session for session, name in self._clients.values() if name is None}
        return {session: seconds for session, seconds in sums.items() if session not in unseen}


AT_ONCE_EVERY = 0.02
"""Minimum seconds between queries, regardless of how many processes send their first request."""


class MemoryQueries(_Queries):
    """Queries of one GPU's memory."""

    def __init__(
        self,
        gpu: Gpu,
        source: GpuSource,
        poll_interval: Callable[[], float | None],
        seen: Callable[[Mapping[str, GpuState]], None],
    ) -> None:
        """Prepare for queries. `seen` is called on the event loop with each answer, keyed by GPU UUID.

        `poll_interval` returns the seconds until the next figures are needed; None if they do not matter now.
        """
        super().__init__(gpu, source)
        self._poll_interval = poll_interval
        self._seen = seen
        self._due = 0.0
        self._queried_at = 0.0
        self._again = False
        """Whether a process has sent its first request since the current query began."""

    def request(self) -> None:
        """Query repeatedly while the figures matter."""
        every = self._poll_interval()
        if every is not None:
            self._ask_at(self._queried_at + every)

    def at_once(self) -> None:
        """Query for a process's first lease request."""
        self._again = self._again or self._asking
        self._ask_at(self._queried_at + AT_ONCE_EVERY)

    def _ask_at(self, due: float) -> None:
        if self._asking or self._closed or (self._timer is not None and self._due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = self._loop.call_at(due, self._ask)

    def _ask(self) -> None:
        self._again, self._queried_at = False, self._loop.time()
        self._begin(self._query, self._answered)

    def _query(self) -> GpuState | None:
        try:
            return self._source.memory(self._gpu)
        except Exception:
            log.exception("cannot query the memory of GPU %d", self._gpu.index)
            return None

    def _answered(self, state: GpuState | None) -> None:
        self._asking = False
        if self._closed:
            return
        if state is not None:
            self._seen({self._gpu.uuid: state})
        if self._again:
            self.at_once()
        self.request()
