"""A GPU in virtual time under the arbiter: replays recorded or drawn GPU work. Measures nothing on a real GPU.

The device divides its time equally among the bursts that run, none of which gets more than its demand. Paging takes
bytes over bandwidth, both directions at once; an incomer's pages come in only as fast as others make room for them.
Neither CPU time nor the network is modelled. The plan, the right size of a share and the benchmarks use it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from gpushare_spawner.arbiter.anticipation import Expected
from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.session import ArbiterSettings, Decision, LeaseGrant, PageIn, PageOut, Revoke

NOTICE = 0.003
"""Seconds after which the library notices that the device is quiet."""
DRAIN = 0.001
"""Seconds from REVOKE to RELEASE: the CUDA process in progress ends."""
GIVE_BACK = 1.0
"""Seconds of quiet after which the library returns a lease by itself."""
DONE = 1e-9
"""GPU seconds that count as nothing left: the rounding of many small steps."""


class VirtualClock:
    """Virtual time in seconds, and the actions that are due."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()

    def at(self, instant: float, action: Callable[[], None]) -> None:
        """Run the action at this instant, or now if that is past."""
        heapq.heappush(self._due, (max(instant, self.now), next(self._serial), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Run the action in so many seconds."""
        self.at(self.now + seconds, action)

    def run(self, until: float) -> None:
        """Advance the time to this instant, and run the actions that are due until then."""
        while self._due and self._due[0][0] <= until:
            self.now, _, action = heapq.heappop(self._due)
            action()
        self.now = until


@dataclass(eq=False)
class VirtualProcess:
    """A process of a session on one GPU: a notebook's process with its memory. Bytes and seconds."""

    name: str
    memory: int
    session: str = ""
    """Empty: the session has the process's name."""
    left: float = 0.0
    """GPU seconds that are left of the burst in progress."""
    demand: float = 1.0
    """Fraction of the GPU's time that the burst in progress uses at most."""
    wants: bool = False
    open: bool = False
    """Pages are in, bursts run."""
    lease: int = 0
    revoked: Revoke | None = None
    submitted: float = 0.0
    started: bool = False
    """The burst in progress has begun to run."""
    quiet_since: float = 0.0
    busy: float = 0.0
    burst: int = 0
    """Counts bursts, so that an action planned for one burst does nothing to another."""
    gpu_seconds: float = 0.0
    """Delivered in all bursts."""
    delays: list[tuple[float, float]] = field(default_factory=list)
    """(instant of the submission, seconds until the burst could run), of each burst that has begun."""
    bursts: int = 0
    """Bursts that have ended."""
    displaced: int = 0
    """Bytes that were ordered to the host while it had a lease and work."""
    done: Callable[[], None] = lambda: None
    """Called at the end of a burst."""


@dataclass
class _EarlyPageIn:
    """A page-in without a lease, in progress."""

    since: float
    amount: int
    done: float


@dataclass(frozen=True)
class CheckpointCosts:
    """The costs of suspending and resuming a session by the driver's checkpoint functions."""

    bandwidth: float
    """Bytes per second, each way."""
    seconds: float
    """Beside the bytes, for each of the two."""
    context_bytes: int
    """GPU memory of a process's CUDA context, which is suspended and resumed too."""


class VirtualGpu:
    """One GPU with its arbiter: sends the arbiter what the processes do, and carries out its decisions.

    `memory` in bytes, `bandwidth` in bytes per second between GPU and host, each way. `checkpoints`: all sessions have
    the engine suspend, with one process each, of the same name; None: the engine managed.
    """

    def __init__(
        self,
        clock: VirtualClock,
        memory: int,
        bandwidth: float,
        settings: ArbiterSettings,
        checkpoints: CheckpointCosts | None = None,
    ) -> None:
        self.arbiter = GpuArbiter(memory, settings)
        self._checkpoints = checkpoints
        self._suspended: set[str] = set()
        self._resuming: dict[str, LeaseGrant | None] = {}
        """Grants to processes of sessions that are being resumed, by process; None: no grant yet."""
        self._early: dict[str, _EarlyPageIn] = {}
        """Page-ins without a lease, by process."""
        self.processes: dict[str, VirtualProcess] = {}
        self._clock = clock
        self._bandwidth = bandwidth
        self._free_at = 0.0
        """When the memory is free for which page-outs are in progress."""
        self._running: list[VirtualProcess] = []
        self._rates: list[float] = []
        """Fractions of the GPU's time that the running processes get, in the same order."""
        self._advanced_to = 0.0
        self._end_serial = 0
        self._wakeup: float | None = None

    def session(self, name: str, weight: int) -> None:
        """Add a session with a share of `weight` units."""
        suspends = self._checkpoints is not None
        self._apply(self.arbiter.add_session(name, weight, self._clock.now, suspends=suspends))

    def weigh(self, session: str, weight: int) -> None:
        """Change the session's weight in units; 0 releases it."""
        self._apply(self.arbiter.set_weight(session, weight, self._clock.now))

    def connect(self, process: VirtualProcess) -> None:
        """Add a process to its session, with its memory."""
        now = self._clock.now
        process.session = process.session or process.name
        self.processes[process.name] = process
        self._apply(self.arbiter.connect(process.name, process.session, now, pages_in_early=True))
        if self._checkpoints is None:
            self._apply(self.arbiter.memory(process.name, process.memory, 0, now))
        else:
            self._apply(self.arbiter.memory(process.name, 0, process.memory, now))
            shown = process.memory + self._checkpoints.context_bytes
            self._apply(self.arbiter.device_memory(process.name, shown, 0, now))

    def leave(self, session: str) -> None:
        """Remove a session and its processes."""
        for process in [process for process in self.processes.values() if process.session == session]:
            del self.processes[process.name]
            process.burst += 1
            self._shut(process)
        self._apply(self.arbiter.remove_session(session, self._clock.now))

    def submit(self, process: VirtualProcess, gpu_seconds: float, demand: float = 1.0) -> None:
        """Begin a burst of so many GPU seconds, which alone takes `gpu_seconds / demand` seconds."""
        process.left, process.demand = gpu_seconds, demand
        process.wants, process.started = True, False
        process.submitted = self._clock.now
        process.burst += 1
        if process.open:
            self._apply(self.arbiter.busy(process.name, process.lease, self._clock.now))
            if process.open:
                self._run(process)
        elif not process.lease:
            self._request(process)

    def expect(self, process: VirtualProcess, expected: Expected) -> None:
        """Expect the next burst of a process."""
        self._apply(self.arbiter.expect(process.name, expected, self._clock.now))

    def expect_no_more(self, process: VirtualProcess) -> None:
        """Expect no burst of the process any longer."""
        self._apply(self.arbiter.expect_no_more(process.name, self._clock.now))

    def settle(self) -> None:
        """Count the bursts in progress up to now."""
        elapsed = self._clock.now - self._advanced_to
        self._advanced_to = self._clock.now
        for process, rate in zip(self._running, self._rates, strict=True):
            process.left -= elapsed * rate
            process.gpu_seconds += elapsed * rate
            process.busy += elapsed

    # -- the device --------------------------------------------------------------------------------------------------

    def _run(self, process: VirtualProcess) -> None:
        if not process.started:
            process.started = True
            process.delays.append((process.submitted, self._clock.now - process.submitted))
        self.settle()
        self._running.append(process)
        self._plan_end()

    def _shut(self, process: VirtualProcess) -> None:
        process.open = False
        if process in self._running:
            self.settle()
            self._running.remove(process)
            self._plan_end()

    def _plan_end(self) -> None:
        self._rates = _equal_parts([process.demand for process in self._running])
        self._end_serial += 1
        if self._running:
            serial = self._end_serial
            soonest = min(process.left / rate for process, rate in zip(self._running, self._rates, strict=True))
            self._clock.after(max(0.0, soonest), lambda: self._ended(serial))

    def _ended(self, serial: int) -> None:
        if serial != self._end_serial:
            return
        self.settle()
        ended = [process for process in self._running if process.left <= DONE]
        self._running = [process for process in self._running if process not in ended]
        self._plan_end()
        for process in ended:
            process.wants = False
            process.bursts += 1
            process.quiet_since = self._clock.now
            process.burst += 1
            self._clock.after(NOTICE, partial(self._idle, process, process.burst))
            process.done()

    # -- the library -------------------------------------------------------------------------------------------------

    def _request(self, process: VirtualProcess) -> None:
        managed, plain = (process.memory, 0) if self._checkpoints is None else (0, process.memory)
        self._apply(self.arbiter.request(process.name, managed, plain, self._clock.now))

    def _idle(self, process: VirtualProcess, burst: int) -> None:
        if process.burst != burst or not process.lease:
            return
        quiet = self._clock.now - process.quiet_since
        self._clock.after(GIVE_BACK - quiet, partial(self._quiet, process, burst))
        self._apply(self.arbiter.idle(process.name, process.lease, process.busy, quiet, self._clock.now))

    def _quiet(self, process: VirtualProcess, burst: int) -> None:
        if process.burst == burst:
            self._give_back(process)

    def _drained(self, process: VirtualProcess, lease: int) -> None:
        if process.lease == lease:
            self._give_back(process)

    def _give_back(self, process: VirtualProcess) -> None:
        if not process.lease or process.name in self._resuming:
            return
        self._shut(process)
        lease, order = process.lease, process.revoked
        process.lease, process.revoked = 0, None
        if order is not None and order.page_out:
            self._move_out(process, order.page_out)
        busy, process.busy = process.busy, 0.0
        self._apply(self.arbiter.release(process.name, lease, busy, self._clock.now))
        if process.wants and not process.lease:
            self._request(process)

    def _move_out(self, process: VirtualProcess, amount: int) -> None:
        seconds = amount / self._bandwidth
        self._free_at = max(self._clock.now, self._free_at) + seconds

        def report() -> None:
            if process.name in self.processes:
                self._apply(self.arbiter.paged_out(process.name, amount, seconds, self._clock.now))

        self._clock.at(self._free_at, report)

    # -- the agent's side of the engine suspend ----------------------------------------------------------------------

    def _suspend(self, process: VirtualProcess) -> None:
        assert self._checkpoints is not None
        amount, seconds = self._transfer(process)
        self._free_at = max(self._clock.now, self._free_at) + seconds

        def away() -> None:
            if process.name in self.processes:
                self._suspended.add(process.name)
                self._apply(self.arbiter.suspended(process.session, amount, seconds, self._clock.now))

        self._clock.at(self._free_at, away)

    def _resume(self, process: VirtualProcess, grant: LeaseGrant | None) -> None:
        begun, self._resuming[process.name] = process.name in self._resuming, grant
        if begun:
            return
        amount, seconds = self._transfer(process)
        self._free_at = max(self._clock.now, self._free_at) + seconds

        def there() -> None:
            last = self._resuming.pop(process.name)
            if process.name not in self.processes:
                return
            self._suspended.discard(process.name)
            self._apply(self.arbiter.resumed(process.session, amount, seconds, self._clock.now))
            if last is not None:
                self._opened(process, last, self._clock.now)
            if process.revoked is not None and not process.open:
                self._give_back(process)

        self._clock.at(self._free_at, there)

    def _transfer(self, process: VirtualProcess) -> tuple[int, float]:
        """Return the bytes that move with a session, and the seconds that this takes."""
        costs = self._checkpoints
        assert costs is not None
        amount = process.memory + costs.context_bytes
        return amount, costs.seconds + amount / costs.bandwidth

    # -- page-ins before a lease -------------------------------------------------------------------------------------

    def _page_in_early(self, process: VirtualProcess, amount: int) -> None:
        if process.name in self._suspended:
            self._resume(process, None)
            return
        now = self._clock.now
        early = self._early.setdefault(process.name, _EarlyPageIn(now, 0, now))
        early.amount += amount
        early.done = max(self._free_at, max(now, early.done) + amount / self._bandwidth)
        self._clock.at(early.done, lambda: self._early_done(process, early))

    def _early_done(self, process: VirtualProcess, early: _EarlyPageIn) -> None:
        if self._early.get(process.name) is early and self._clock.now >= early.done:
            self._cut_early(process)

    def _cut_early(self, process: VirtualProcess) -> None:
        """End a page-in without a lease where it is, and report it."""
        early, now = self._early.pop(process.name, None), self._clock.now
        if early is not None and process.name in self.processes:
            length = early.done - early.since
            part = min(1.0, (now - early.since) / length) if length else 1.0
            moved = round(early.amount * part)
            self._apply(self.arbiter.paged_in(process.name, moved, now - early.since, now))

    # -- the arbiter's decisions -------------------------------------------------------------------------------------

    def _apply(self, decisions: Iterable[Decision]) -> None:
        # Page-outs first: they make room for the grants among the same decisions.
        for decision in sorted(decisions, key=lambda decision: isinstance(decision, (LeaseGrant, PageIn))):
            process = self.processes.get(str(decision.client))
            if process is None:
                continue
            if isinstance(decision, LeaseGrant):
                self._granted(process, decision)
            elif isinstance(decision, PageIn):
                self._page_in_early(process, decision.amount)
            elif isinstance(decision, Revoke):
                process.revoked = decision
                process.displaced += decision.page_out if process.wants else 0
                self._clock.after(DRAIN, partial(self._drained, process, decision.lease))
            elif isinstance(decision, PageOut):
                process.displaced += decision.amount if process.lease else 0
                self._cut_early(process)
                self._move_out(process, decision.amount)
        for session in self.arbiter.suspensions():
            self._suspend(self.processes[session])
        wakeup = self.arbiter.next_wakeup()
        if wakeup != self._wakeup:
            self._wakeup = wakeup
            if wakeup is not None:
                self._clock.at(wakeup, lambda: self._tick(wakeup))

    def _tick(self, wakeup: float) -> None:
        if self._wakeup == wakeup:
            self._wakeup = None
            self._apply(self.arbiter.tick(self._clock.now))

    def _granted(self, process: VirtualProcess, grant: LeaseGrant) -> None:
        if process.lease == grant.lease:
            return
        process.lease = grant.lease
        now = self._clock.now
        if process.name in self._suspended:
            self._resume(process, grant)
            return
        early = self._early.pop(process.name, None)
        if not grant.prefetch and early is None:
            self._opened(process, grant, now)
            return
        moved = early or _EarlyPageIn(now, 0, now)  # the prefetch continues the page-in
        moved.amount += grant.prefetch
        if grant.prefetch:
            moved.done = max(self._free_at, max(now, moved.done) + grant.prefetch / self._bandwidth)
        self._clock.at(moved.done, lambda: self._opened(process, grant, moved.since, moved.amount))

    def _opened(self, process: VirtualProcess, grant: LeaseGrant, since: float, moved: int = 0) -> None:
        if process.lease != grant.lease or process.name not in self.processes:
            return
        if moved:
            self._apply(self.arbiter.paged_in(process.name, moved, self._clock.now - since, self._clock.now))
        if process.lease == grant.lease and process.revoked is None:
            process.open = True
            if process.wants:
                self._run(process)


def _equal_parts(demands: list[float]) -> list[float]:
    """Divide the GPU's time equally; the part that a process does not use is divided among the others."""
    equal = 1.0 / max(1, len(demands))
    if all(demand >= equal for demand in demands):
        return [equal] * len(demands)
    parts, left = [0.0] * len(demands), 1.0
    order = sorted(range(len(demands)), key=demands.__getitem__)
    for rank, number in enumerate(order):
        parts[number] = min(demands[number], left / (len(demands) - rank))
        left -= parts[number]
    return parts
