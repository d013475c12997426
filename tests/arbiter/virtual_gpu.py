"""A GPU and its clients in virtual time: what libgpushare.so does on a real one, as events on a heap.

The device is shared equally by the bursts that run; paging takes bytes over bandwidth, both directions at once, and
an incomer's pages can come in only as fast as others page out for them. Pages that do not fit are not modelled: the
tests check that leases held together fit.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.session import Decision, LeaseGrant, PageOut, Revoke

GIB = 2**30
NOTICE = 0.002
"""Seconds after which a client notices that its device is quiet."""
DRAIN = 0.001
"""Seconds from the order to give way to the release: the kernel in progress ends."""
GIVE_BACK = 1.0
"""Seconds of quiet after which a client gives its lease back by itself."""


@dataclass
class Job:
    """A process: CPU and GPU phases in turn, on one working set."""

    name: str
    session: str
    managed: int
    phases: Iterator[tuple[float, float]]
    """(CPU seconds, GPU seconds)."""
    plain: int = 0
    kernel: float = 0.0
    """Seconds of GPU time of each kernel, which cannot be interrupted; 0: so short that it does not matter."""
    ahead: int = 1
    """Kernels that it queues, as far as its pace allows."""
    obeys: bool = True
    """Whether it answers when its lease is revoked."""
    drain: float | None = None
    """GPU seconds of queued kernels that are left after the lease was revoked."""
    pace: float = 0.0

    lease: int = 0
    open: bool = False
    """The gate: pages are in, kernels run."""
    remaining: float = 0.0
    """GPU seconds left in this phase."""
    wants: bool = False
    waiting_since: float | None = None
    told_idle: bool = False
    revoked: Revoke | None = None
    busy: float = 0.0
    """GPU-busy seconds in this lease, as the client measures them: while its burst was in progress."""
    gpu_seconds: float = 0.0
    """What it got of the device."""
    longest_wait: float = 0.0
    waits: list[float] = field(default_factory=list)
    quiet_since: float = 0.0
    epoch: int = 0
    finished_at: float | None = None
    dead: bool = False
    paged_in: int = 0
    alive: bool = True


class VirtualGpu:
    """Runs jobs under an arbiter, and records who had what."""

    def __init__(self, arbiter: GpuArbiter, bandwidth: float = 12e9) -> None:
        self.arbiter = arbiter
        self.bandwidth = bandwidth
        self.now = 0.0
        self.jobs: dict[str, Job] = {}
        self.gone: list[Job] = []
        self.switches: list[tuple[float, str]] = []
        self.paging_seconds = 0.0
        self.used_seconds = 0.0
        """Time with at least one kernel running."""
        self.idle_while_wanted = 0.0
        """Time with somebody waiting and no lease held by anybody."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._room_free_at = 0.0
        self._wakeup: float | None = None
        self.watchers: list[Callable[[VirtualGpu], None]] = []
        self._seen: list[tuple[float, dict[str, float]]] = []

    def tell_utilisation(self, every: float = 0.2) -> None:
        """From now on the driver's samples come, rounded to 1 % and one interval late."""
        had: dict[str, float] = {}
        for job in [*self.jobs.values(), *self.gone]:
            had[job.session] = had.get(job.session, 0.0) + job.gpu_seconds
        self._seen = [*self._seen[-2:], (self.now, had)]
        if len(self._seen) == 3:
            (since, before), (until, after), _ = self._seen
            length = until - since
            busy = {name: round((had - before.get(name, 0.0)) / length, 2) * length for name, had in after.items()}
            self._apply(self.arbiter.delivered(since, until, busy, self.now))
        self.after(every, lambda: self.tell_utilisation(every))

    # -- what tests call ---------------------------------------------------------------------------------------------

    def session(self, name: str, weight: int) -> None:
        self._apply(self.arbiter.add_session(name, weight, self.now))

    def start(self, job: Job) -> Job:
        self.jobs[job.name] = job
        self._apply(self.arbiter.connect(job.name, job.session, self.now))
        self._apply(self.arbiter.memory(job.name, job.managed, job.plain, self.now))
        self._next_phase(job)
        return job

    def at(self, instant: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (instant, next(self._serial), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def set_time_limit(self, session: str, units: int) -> None:
        self._apply(self.arbiter.set_time_limit(session, units, self.now))

    def set_background(self, session: str, background: bool = True) -> None:
        self._apply(self.arbiter.set_background(session, background, self.now))

    def set_weight(self, session: str, weight: int) -> None:
        self._apply(self.arbiter.set_weight(session, weight, self.now))

    def crash(self, name: str) -> None:
        job = self.jobs.pop(name)
        self.gone.append(job)
        job.epoch += 1
        job.alive = False
        self._apply(self.arbiter.disconnect(name, self.now))

    def run(self, until: float) -> None:
        """Let the time go by, until the instant or until nothing is left to happen."""
        while True:
            ends = self._next_burst_end()
            due = [at for at in (self._heap[0][0] if self._heap else None, self._wakeup, ends) if at is not None]
            target = min(due, default=None)
            if target is None or target > until:
                self._pass(until)
                return
            self._pass(target)
            if self._heap and self._heap[0][0] <= self.now:
                heapq.heappop(self._heap)[2]()
            for job in list(self.jobs.values()):
                if self._running(job) and job.remaining <= 1e-9:
                    self._burst_over(job)
                if job.drain is not None and job.drain <= 1e-9:
                    self._shut(job)
            if self._wakeup is not None and self._wakeup <= self.now:
                self._apply(self.arbiter.tick(self.now))
            for watch in self.watchers:
                watch(self)

    @property
    def makespan(self) -> float:
        return max(job.finished_at or float("inf") for job in self.jobs.values())

    # -- the device --------------------------------------------------------------------------------------------------

    def _running(self, job: Job) -> bool:
        return job.open and job.wants

    def _next_burst_end(self) -> float | None:
        running = [job for job in self.jobs.values() if self._running(job)]
        if not running:
            return None
        left = [job.remaining if job.drain is None else min(job.drain, job.remaining) for job in running]
        return self.now + min(left) * len(running)

    def _pass(self, until: float) -> None:
        elapsed = max(0.0, until - self.now)
        running = [job for job in self.jobs.values() if self._running(job)]
        for job in running:
            job.remaining -= elapsed / len(running)
            if job.drain is not None:
                job.drain -= elapsed / len(running)
            job.gpu_seconds += elapsed / len(running)
            job.busy += elapsed
        if running:
            self.used_seconds += elapsed
        if not any(job.lease for job in self.jobs.values()) and any(job.wants for job in self.jobs.values()):
            self.idle_while_wanted += elapsed
        self.now = max(self.now, until)

    # -- the clients -------------------------------------------------------------------------------------------------

    def _next_phase(self, job: Job) -> None:
        phase = next(job.phases, None)
        if phase is None:
            job.finished_at = self.now
            return
        cpu, gpu = phase
        job.remaining = gpu
        self.after(cpu, self._if_same(job, lambda: self._wants(job), keep=True))

    def _if_same(self, job: Job, action: Callable[[], None], keep: bool = False) -> Callable[[], None]:
        epoch = job.epoch

        def act() -> None:
            if job.alive and (keep or job.epoch == epoch):
                action()

        return act

    def _wants(self, job: Job) -> None:
        job.wants = True
        job.epoch += 1
        if job.open:
            if job.told_idle:
                job.told_idle = False
                self._apply(self.arbiter.busy(job.name, job.lease, self.now))
        elif not job.lease:
            self._ask(job)

    def _ask(self, job: Job) -> None:
        job.waiting_since = self.now
        self._apply(self.arbiter.request(job.name, job.managed, job.plain, self.now))

    def _burst_over(self, job: Job) -> None:
        job.wants = False
        job.epoch += 1
        job.quiet_since = self.now
        self.after(NOTICE, self._if_same(job, lambda: self._tell_idle(job)))
        self.after(GIVE_BACK, self._if_same(job, lambda: self._give_back(job)))
        self._next_phase(job)

    def _tell_idle(self, job: Job) -> None:
        if job.lease and not job.told_idle:
            job.told_idle = True
            self._apply(self.arbiter.idle(job.name, job.lease, job.busy, self.now - job.quiet_since, self.now))

    def _give_back(self, job: Job) -> None:
        if not job.lease:
            return
        lease, order = job.lease, job.revoked
        job.lease, job.open, job.told_idle, job.revoked, job.drain = 0, False, False, None, None
        self._apply(self.arbiter.release(job.name, lease, job.busy, self.now))
        job.busy = 0.0
        if order is not None and order.page_out:
            self._move_out(job, order.page_out)
        if job.wants and not job.lease and job.waiting_since is None:
            self._ask(job)

    def _move_out(self, job: Job, amount: int) -> None:
        start = max(self.now, self._room_free_at)
        self._room_free_at = start + amount / self.bandwidth
        seconds = amount / self.bandwidth
        self.at(
            self._room_free_at,
            self._if_same(
                job, lambda: self._apply(self.arbiter.paged_out(job.name, amount, seconds, self.now)), keep=True
            ),
        )

    def _opened(self, job: Job, lease: int, amount: int, asked_at: float) -> None:
        if job.lease != lease:
            return
        if amount:
            self._apply(self.arbiter.paged_in(job.name, amount, self.now - asked_at, self.now))
        if job.lease == lease and job.revoked is None:
            job.open = True

    # -- the arbiter's orders ----------------------------------------------------------------------------------------

    def _apply(self, decisions: Iterable[Decision]) -> None:
        self._wakeup = self.arbiter.next_wakeup()
        for pace in self.arbiter.paces():
            if str(pace.client) in self.jobs:
                self.jobs[str(pace.client)].pace = pace.seconds
        for decision in decisions:
            job = self.jobs.get(str(decision.client))
            if job is None:
                continue
            if isinstance(decision, LeaseGrant):
                self._granted(job, decision)
            elif isinstance(decision, Revoke):
                job.revoked = decision
                if not job.obeys:
                    continue
                if job.kernel and job.open and job.wants:
                    queued = min(job.ahead, max(2, round(job.pace / job.kernel))) if job.pace else job.ahead
                    job.drain = job.kernel - job.gpu_seconds % job.kernel + (queued - 1) * job.kernel
                else:
                    self.after(DRAIN, self._if_same(job, partial(self._shut, job), keep=True))
            elif isinstance(decision, PageOut):
                self._move_out(job, decision.amount)

    def _granted(self, job: Job, grant: LeaseGrant) -> None:
        if job.waiting_since is not None:
            wait = self.now - job.waiting_since
            job.waits.append(wait)
            job.longest_wait = max(job.longest_wait, wait)
            job.waiting_since = None
        job.lease, job.pace = grant.lease, grant.pace
        job.paged_in += grant.prefetch
        self.switches.append((self.now, job.name))
        done = max(self.now, self._room_free_at) if grant.prefetch else self.now
        done = max(done, self.now + grant.prefetch / self.bandwidth)
        self.paging_seconds += done - self.now
        started = self.now
        self.at(done, self._if_same(job, lambda: self._opened(job, grant.lease, grant.prefetch, started), keep=True))

    def _shut(self, job: Job) -> None:
        if job.revoked is not None and job.lease == job.revoked.lease:
            self._give_back(job)


def forever() -> Iterator[tuple[float, float]]:
    """One burst without end."""
    return iter([(0.0, float("inf"))])


def alternating(cpu: float, gpu: float, times: int | None = None) -> Iterator[tuple[float, float]]:
    """CPU and GPU phases of the same lengths."""
    return itertools.repeat((cpu, gpu), times) if times is not None else itertools.repeat((cpu, gpu))


def slow(value: object) -> Any:
    """Mark a parameter's value: a case between those of `make test`, with as much simulated time."""
    return pytest.param(value, marks=pytest.mark.slow)
