"""GPUs in virtual time under the real arbiter, for `benchmarks.interactive`.

The device is shared equally by the cells that run. Paging takes bytes over bandwidth, both directions at once; an
incomer's pages come in only as fast as room for them is made. Nothing else is modelled: no CPU time, no network.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.session import ArbiterSettings, Decision, LeaseGrant, PageOut, Revoke

NOTICE = 0.003
"""Seconds after which the library notices that the device is quiet."""
DRAIN = 0.001
"""Seconds from the order to give way to the release: the kernel in progress ends."""
GIVE_BACK = 1.0
"""Seconds of quiet after which the library gives a lease back by itself."""


class Clock:
    """Virtual time: what happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()

    def at(self, instant: float, action: Callable[[], None]) -> None:
        """Do this then, or now if that is past."""
        heapq.heappush(self._due, (max(instant, self.now), next(self._serial), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do this in so many seconds."""
        self.at(self.now + seconds, action)

    def run(self, until: float) -> None:
        """Let the time go by."""
        while self._due and self._due[0][0] <= until:
            self.now, _, action = heapq.heappop(self._due)
            action()
        self.now = until


@dataclass(eq=False)
class Kernel:
    """A notebook's process on one GPU. Bytes and seconds."""

    name: str
    memory: int
    session: str = ""
    left: float = 0.0
    """GPU seconds of the cell in progress."""
    wants: bool = False
    open: bool = False
    """Pages are in, kernels run."""
    lease: int = 0
    revoked: Revoke | None = None
    submitted: float = 0.0
    started: bool = False
    """The cell in progress has begun to run."""
    quiet_since: float = 0.0
    busy: float = 0.0
    burst: int = 0
    """Counts bursts, so that what was planned for one is not done to another."""
    gpu_seconds: float = 0.0
    delays: list[tuple[float, float]] = field(default_factory=list)
    """(instant, seconds from the submission of a cell until its first kernel could run)."""
    cells: int = 0
    """Cells that were finished."""
    done: Callable[[], None] = lambda: None
    """Called at the end of a cell."""


@dataclass(frozen=True)
class Checkpoints:
    """What it costs to suspend and to resume a session by the driver's checkpoint functions."""

    bandwidth: float
    """Bytes per second, each way."""
    seconds: float
    """Beside the bytes, for each of the two."""
    context_bytes: int
    """GPU memory of a process's CUDA context, which leaves and comes back too."""


class InteractiveGpu:
    """One GPU: tells its arbiter what the kernels do, and does what the arbiter says.

    `checkpoints`: all sessions have the engine suspend; None: the engine managed.
    """

    def __init__(
        self,
        clock: Clock,
        memory: int,
        bandwidth: float,
        settings: ArbiterSettings,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.arbiter = GpuArbiter(memory, settings)
        self._checkpoints = checkpoints
        self._suspended: set[str] = set()
        self._coming: dict[str, LeaseGrant] = {}
        """Grants to kernels of sessions that are being resumed, by kernel."""
        self.kernels: dict[str, Kernel] = {}
        self._clock = clock
        self._bandwidth = bandwidth
        self._room_free_at = 0.0
        self._running: list[Kernel] = []
        self._passed = 0.0
        self._end_serial = 0
        self._wakeup: float | None = None

    def session(self, name: str, weight: int) -> None:
        """A session comes."""
        whole = self._checkpoints is not None
        self._apply(self.arbiter.add_session(name, weight, self._clock.now, suspends=whole))

    def weigh(self, session: str, weight: int) -> None:
        """The session's weight changes; 0: released."""
        self._apply(self.arbiter.set_weight(session, weight, self._clock.now))

    def connect(self, kernel: Kernel) -> None:
        """A process of a session of the same name, with its memory."""
        now = self._clock.now
        kernel.session = kernel.session or kernel.name
        self.kernels[kernel.name] = kernel
        self._apply(self.arbiter.connect(kernel.name, kernel.session, now))
        if self._checkpoints is None:
            self._apply(self.arbiter.memory(kernel.name, kernel.memory, 0, now))
        else:
            self._apply(self.arbiter.memory(kernel.name, 0, kernel.memory, now))
            shown = kernel.memory + self._checkpoints.context_bytes
            self._apply(self.arbiter.device_memory(kernel.name, shown, 0, now))

    def leave(self, session: str) -> None:
        """The session ends."""
        for kernel in [kernel for kernel in self.kernels.values() if kernel.session == session]:
            del self.kernels[kernel.name]
            kernel.burst += 1
            self._shut(kernel)
        self._apply(self.arbiter.remove_session(session, self._clock.now))

    def submit(self, kernel: Kernel, gpu_seconds: float) -> None:
        """A cell that keeps the whole GPU busy for so long, alone."""
        kernel.left = gpu_seconds
        kernel.wants, kernel.started = True, False
        kernel.submitted = self._clock.now
        kernel.burst += 1
        if kernel.open:
            self._apply(self.arbiter.busy(kernel.name, kernel.lease, self._clock.now))
            if kernel.open:
                self._run(kernel)
        elif not kernel.lease:
            self._ask(kernel)

    # -- the device --------------------------------------------------------------------------------------------------

    def _pass(self) -> None:
        elapsed = self._clock.now - self._passed
        self._passed = self._clock.now
        for kernel in self._running:
            kernel.left -= elapsed / len(self._running)
            kernel.gpu_seconds += elapsed / len(self._running)
            kernel.busy += elapsed

    def _run(self, kernel: Kernel) -> None:
        if not kernel.started:
            kernel.started = True
            kernel.delays.append((kernel.submitted, self._clock.now - kernel.submitted))
        self._pass()
        self._running.append(kernel)
        self._plan_end()

    def _shut(self, kernel: Kernel) -> None:
        kernel.open = False
        if kernel in self._running:
            self._pass()
            self._running.remove(kernel)
            self._plan_end()

    def _plan_end(self) -> None:
        self._end_serial += 1
        if self._running:
            serial, soonest = self._end_serial, min(kernel.left for kernel in self._running)
            self._clock.after(max(0.0, soonest) * len(self._running), lambda: self._ended(serial))

    def _ended(self, serial: int) -> None:
        if serial != self._end_serial:
            return
        self._pass()
        over = [kernel for kernel in self._running if kernel.left <= 1e-9]
        self._running = [kernel for kernel in self._running if kernel not in over]
        self._plan_end()
        for kernel in over:
            kernel.wants = False
            kernel.cells += 1
            kernel.quiet_since = self._clock.now
            kernel.burst += 1
            burst = kernel.burst
            self._clock.after(NOTICE, lambda kernel=kernel, burst=burst: self._idle(kernel, burst))  # type: ignore[misc]
            kernel.done()

    # -- the library -------------------------------------------------------------------------------------------------

    def _ask(self, kernel: Kernel) -> None:
        managed, plain = (kernel.memory, 0) if self._checkpoints is None else (0, kernel.memory)
        self._apply(self.arbiter.request(kernel.name, managed, plain, self._clock.now))

    def _idle(self, kernel: Kernel, burst: int) -> None:
        if kernel.burst != burst or not kernel.lease:
            return
        quiet = self._clock.now - kernel.quiet_since
        self._clock.after(GIVE_BACK - quiet, lambda: self._give_back(kernel) if kernel.burst == burst else None)
        self._apply(self.arbiter.idle(kernel.name, kernel.lease, kernel.busy, quiet, self._clock.now))

    def _give_back(self, kernel: Kernel) -> None:
        if not kernel.lease or kernel.name in self._coming:
            return
        self._shut(kernel)
        lease, order = kernel.lease, kernel.revoked
        kernel.lease, kernel.revoked = 0, None
        if order is not None and order.page_out:
            self._move_out(kernel, order.page_out)
        busy, kernel.busy = kernel.busy, 0.0
        self._apply(self.arbiter.release(kernel.name, lease, busy, self._clock.now))
        if kernel.wants and not kernel.lease:
            self._ask(kernel)

    def _move_out(self, kernel: Kernel, amount: int) -> None:
        seconds = amount / self._bandwidth
        self._room_free_at = max(self._clock.now, self._room_free_at) + seconds

        def tell() -> None:
            if kernel.name in self.kernels:
                self._apply(self.arbiter.paged_out(kernel.name, amount, seconds, self._clock.now))

        self._clock.at(self._room_free_at, tell)

    # -- the agent's side of the engine suspend ----------------------------------------------------------------------

    def _suspend(self, kernel: Kernel) -> None:
        assert self._checkpoints is not None
        amount, seconds = self._whole(kernel)
        self._room_free_at = max(self._clock.now, self._room_free_at) + seconds

        def away() -> None:
            if kernel.name in self.kernels:
                self._suspended.add(kernel.name)
                self._apply(self.arbiter.suspended(kernel.session, amount, seconds, self._clock.now))

        self._clock.at(self._room_free_at, away)

    def _resume(self, kernel: Kernel, grant: LeaseGrant) -> None:
        known, self._coming[kernel.name] = kernel.name in self._coming, grant
        if known:
            return
        amount, seconds = self._whole(kernel)
        self._room_free_at = max(self._clock.now, self._room_free_at) + seconds

        def there() -> None:
            last = self._coming.pop(kernel.name)
            if kernel.name not in self.kernels:
                return
            self._suspended.discard(kernel.name)
            self._apply(self.arbiter.resumed(kernel.session, amount, seconds, self._clock.now))
            self._opened(kernel, last, self._clock.now)
            if kernel.revoked is not None and not kernel.open:
                self._give_back(kernel)

        self._clock.at(self._room_free_at, there)

    def _whole(self, kernel: Kernel) -> tuple[int, float]:
        """Bytes that move with a session, and the seconds that this takes."""
        costs = self._checkpoints
        assert costs is not None
        amount = kernel.memory + costs.context_bytes
        return amount, costs.seconds + amount / costs.bandwidth

    # -- the arbiter's orders ----------------------------------------------------------------------------------------

    def _apply(self, decisions: Iterable[Decision]) -> None:
        # What is to be paged out makes the room for those that are granted by the same decisions.
        for decision in sorted(decisions, key=lambda one: isinstance(one, LeaseGrant)):
            kernel = self.kernels.get(str(decision.client))
            if kernel is None:
                continue
            if isinstance(decision, LeaseGrant):
                self._granted(kernel, decision)
            elif isinstance(decision, Revoke):
                kernel.revoked = decision
                lease = decision.lease
                self._clock.after(
                    DRAIN,
                    lambda kernel=kernel, lease=lease: self._give_back(kernel) if kernel.lease == lease else None,  # type: ignore[misc]
                )
            elif isinstance(decision, PageOut):
                self._move_out(kernel, decision.amount)
        for session in self.arbiter.suspensions():
            self._suspend(self.kernels[session])
        wakeup = self.arbiter.next_wakeup()
        if wakeup != self._wakeup:
            self._wakeup = wakeup
            if wakeup is not None:
                self._clock.at(wakeup, lambda: self._tick(wakeup))

    def _tick(self, wakeup: float) -> None:
        if self._wakeup == wakeup:
            self._wakeup = None
            self._apply(self.arbiter.tick(self._clock.now))

    def _granted(self, kernel: Kernel, grant: LeaseGrant) -> None:
        if kernel.lease == grant.lease:
            return
        kernel.lease = grant.lease
        now = self._clock.now
        if kernel.name in self._suspended:
            self._resume(kernel, grant)
            return
        if not grant.prefetch:
            self._opened(kernel, grant, now)
            return
        done = max(now, self._room_free_at, now + grant.prefetch / self._bandwidth)
        self._clock.at(done, lambda: self._opened(kernel, grant, now))

    def _opened(self, kernel: Kernel, grant: LeaseGrant, asked: float) -> None:
        if kernel.lease != grant.lease or kernel.name not in self.kernels:
            return
        if grant.prefetch:
            self._apply(self.arbiter.paged_in(kernel.name, grant.prefetch, self._clock.now - asked, self._clock.now))
        if kernel.lease == grant.lease and kernel.revoked is None:
            kernel.open = True
            if kernel.wants:
                self._run(kernel)
