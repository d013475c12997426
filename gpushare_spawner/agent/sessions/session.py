"""A session of the running agent. session_records.py defines the part that survives a restart.

`PendingAsks` holds a notebook server's asks for the service: received from its connections, passed on in the report,
answered. Any process of the session's user can send asks without limit. Therefore only a few wait at a time, and only a
few per minute reach the service; the agent itself answers the others. The service decides each ask.

`activity` returns a session's last work on its GPUs, across restarts of the agent.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.processes import ProcessName
from gpushare_spawner.agent.session_limit import SessionLimit
from gpushare_spawner.agent.session_records import SessionRecord
from gpushare_spawner.agent.session_socket import Connection, FrameHandler, SessionEndpoint
from gpushare_spawner.agent.sessions.cells import Cells
from gpushare_spawner.arbiter.anticipation import CellHistory
from gpushare_spawner.arbiter.session import SessionView
from gpushare_spawner.clocks import Budget
from gpushare_spawner.idle.use import UseCount
from gpushare_spawner.model.controls import ASK_SECONDS, MOST_ASKS, Ask, AskAnswer
from gpushare_spawner.model.frames import AskKind
from gpushare_spawner.model.layers import LayerName, MemoryEngine
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.report import MOST_BURSTS, NOTHING, Burst, BypassingProcess, Delivered, MemoryLimitHits
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.model.share_status import CellsStatus
from gpushare_spawner.placement.node import Allocation
from gpushare_spawner.wording.actions import NUMBER_REUSED, TOO_MANY_REQUESTS
from gpushare_spawner.wording.layers import ASK_UNKNOWN

ASKS_AT_ONCE = 8
"""Number of asks that can reach the service at once after a pause.

Our choice: no user presses more buttons in a minute.
"""
ASKS_PER_SECOND = 1 / 15
"""Long-run rate of asks: each can change the session's tier and adds an entry to the history."""
READS_AT_ONCE, READS_PER_SECOND = 30, 1 / 2
"""Budget of asks that only read, so that frequent actions do not block reading.

Our choice: JupyterLab reads twice for each dialog and each change of the share, and the service computes a list each
time.
"""
_WHOLE_ASK = 0.999
"""Budget that one ask needs: slightly less than 1, because sums of floats are not exact."""
MOST_ANSWERS = 16
"""Number of answers that are retained, so that a repeated ask gets the same answer."""


@dataclass
class _PendingAsk:
    since: float
    """Time of its arrival or its answer, on the clock that is never set."""
    ask: Ask | None
    """The ask; None: the answer arrived without a waiting ask."""
    answer: AskAnswer | None = None
    """The answer; None while the ask waits for the service."""


class PendingAsks:
    """The waiting asks of one session, and its last answers."""

    def __init__(self, clock: Callable[[], float], steady: Callable[[], float] = time.monotonic) -> None:
        """Create an empty list.

        `clock` returns seconds since the epoch; `steady` returns seconds on a clock that is never set.
        """
        self._clock = clock
        self._steady = steady
        self._actions = Budget(steady, ASKS_PER_SECOND, ASKS_AT_ONCE)
        self._reads = Budget(steady, READS_PER_SECOND, READS_AT_ONCE)
        self._asks: dict[int, _PendingAsk] = {}
        """Asks by number, oldest first."""

    def take(self, number: int, kind: int, value: float) -> AskAnswer | None:
        """Add an ask. Returns an existing answer; None if the ask waits for the service."""
        self._forget()
        if (before := self._asks.get(number)) is not None:
            same = before.ask is None or (before.ask.kind, before.ask.value) == (kind, value)
            return before.answer if same else self._refusal(number, NUMBER_REUSED)
        if kind not in list(AskKind):
            return self._refusal(number, ASK_UNKNOWN)
        reads = AskKind(kind).reads
        budget = self._reads if reads else self._actions
        waiting = sum(AskKind(other.kind).reads == reads for other in self._waiting())
        if waiting >= MOST_ASKS or budget.wait(reserve=_WHOLE_ASK) > 0:
            return self._refusal(number, TOO_MANY_REQUESTS)
        budget.spend()
        self._asks[number] = _PendingAsk(self._steady(), Ask(number=number, kind=kind, value=value, at=self._clock()))
        return None

    def waiting(self) -> tuple[Ask, ...]:
        """Return the asks that wait for the service's answer, oldest first."""
        self._forget()
        return tuple(self._waiting())

    def answered(self, answer: AskAnswer) -> bool:
        """Store the service's answer. Returns whether it is new."""
        self._forget()
        before = self._asks.get(answer.number)
        if before is not None and before.answer is not None:
            return False
        self._asks.pop(answer.number, None)
        ask = before.ask if before is not None else None
        self._asks[answer.number] = _PendingAsk(self._steady(), ask, answer)
        answers = [number for number, pending in self._asks.items() if pending.answer is not None]
        for number in answers[:-MOST_ANSWERS]:
            del self._asks[number]
        return True

    def clock_was_set(self, by: float) -> None:
        """Shift the instants of waiting asks by a step of the clock."""
        for pending in self._asks.values():
            if pending.ask is not None:
                pending.ask = pending.ask.model_copy(update={"at": max(0.0, pending.ask.at + by)})

    def _waiting(self) -> list[Ask]:
        return [pending.ask for pending in self._asks.values() if pending.answer is None and pending.ask is not None]

    def _refusal(self, number: int, text: str) -> AskAnswer:
        return AskAnswer(number=number, done=False, text=text, at=self._clock())

    def _forget(self) -> None:
        """Drop expired asks and answers."""
        long_ago = self._steady() - ASK_SECONDS
        self._asks = {number: pending for number, pending in self._asks.items() if pending.since > long_ago}


class SessionFrameHandler(FrameHandler, Protocol):
    """Answers the processes of a session and notifies them of changes: `conversation.Conversation`."""

    def accept_again(self, gpu: str) -> None:
        """Update the arbiter of a GPU (UUID) if the counted part of the stated memory has changed."""

    def send_tier(self) -> None:
        """Notify all processes of the session's tier."""

    def send_memory(self) -> None:
        """Notify all processes of the session's memory limit and guarantee."""

    def send_changed(self) -> None:
        """Notify the notebook servers that the session's status has changed."""

    def send_answer(self, answer: AskAnswer) -> None:
        """Notify the notebook servers of the answer to an ask."""


@dataclass(frozen=True)
class Past:
    """A session's past from before the arbiter's counts began: before the agent's start or the session's opening."""

    last: float | None = None
    """End of the last burst, seconds since the epoch."""
    gpu_seconds: float = 0.0
    """GPU time to add to the arbiter's count; negative if that count includes too much."""
    delivered: Delivered = NOTHING
    """Time delivered in earlier runs of the agent."""
    delivered_before: Delivered = NOTHING
    """The arbiter's count when the session was reopened, which belongs to an earlier opening."""

    @classmethod
    def recorded(cls, record: SessionRecord, restarted_at: float) -> Past:
        """Return the past in a record.

        `restarted_at`: seconds since the epoch. A session that had work when the agent ended counts as active until
        then.
        """
        last = restarted_at if record.gpu_busy else record.last_gpu_activity
        return cls(last, record.gpu_seconds, record.delivered)


@dataclass(frozen=True)
class Kernels:
    """A notebook server's report about its kernels."""

    alive: int
    busy: int
    last_activity: float | None
    """Seconds since the epoch."""


@dataclass(eq=False)
class Session:
    """A session on this machine."""

    record: SessionRecord
    gpus: tuple[Gpu, ...]
    guaranteed_units: int = 0
    guaranteed: Mapping[str, int] = field(default_factory=dict)
    """The guaranteed units by GPU."""
    weights: dict[str, int] = field(default_factory=dict)
    """Weight in the arbiter of each GPU: the guaranteed units, but at least one unit unless the session is released and
    idle."""
    works_on_lent_units: bool = False
    """Whether the session works on units that its tier has lent, with the weight of an active session."""
    use_count: UseCount | None = None
    """The count of GPU work toward restoring the share or withdrawing the notice; None: neither applies."""
    reported_kernels: dict[Connection, Kernels] = field(default_factory=dict)
    """The last report of each connected notebook server about the session's kernels."""
    bypassing: tuple[int, ...] = ()
    exceeding: tuple[ProcessName, ...] = ()
    """Those of them, largest first, without which it would be within its memory limit, attributed with certainty."""
    to_stop: tuple[BypassingProcess, ...] = ()
    """The processes that the service has named to be stopped."""
    past: Past = Past()
    saved_at: float = 0.0
    """Time of the record's last hand-over to the store, seconds since the epoch."""
    last_end: float | None = None
    """Previously reported end of the last burst, in seconds since the epoch."""
    has_new_frames: bool = True
    """Whether a process has sent a frame since activity and record were last compared; otherwise neither can have
    changed."""
    memory: SessionLimit | None = None
    asks: PendingAsks = field(default_factory=lambda: PendingAsks(time.time))
    cells: Cells = field(default_factory=Cells)
    """Executions of cells in its kernels."""
    cell_history: CellHistory = field(default_factory=CellHistory)
    """Which cells use the GPU, as learned since the agent started."""
    conversation: SessionFrameHandler | None = None
    budget_checked: bool = False
    """Whether its server's memory limit was compared with the guarantee of its share."""
    lacks_requests: bool = False
    """Whether its pod released its requested CPU and memory and its node has not granted them again."""
    context_bytes: int = 0
    """GPU memory of its CUDA contexts, from the driver's figures."""
    suspended: bool = False
    """Whether all its processes are suspended."""
    not_suspendable: str | None = None
    """Sentence with the reason why it cannot be suspended now; None if it can."""
    socket: SessionEndpoint | None = None
    bursts: deque[Burst] = field(default_factory=lambda: deque(maxlen=MOST_BURSTS))
    """Its bursts of the last `BURSTS_REPORTED_FOR`, see `SessionReport.bursts`."""
    cuda: set[Connection] = field(default_factory=set)
    """CUDA processes."""
    observers: set[Connection] = field(default_factory=set)
    """Processes that use NVML."""
    notebooks: set[Connection] = field(default_factory=set)
    """Notebook servers and commands that read records."""

    def clock_was_set(self, by: float) -> None:
        """Shift all instants of the past by a step of the clock."""
        self.record.clock_was_set(by)
        self.saved_at += by
        self.asks.clock_was_set(by)
        if self.past.last is not None:
            self.past = replace(self.past, last=self.past.last + by)
        if self.last_end is not None:
            self.last_end += by
        self.reported_kernels = {
            notebook: replace(reported, last_activity=reported.last_activity + by)
            if reported.last_activity is not None
            else reported
            for notebook, reported in self.reported_kernels.items()
        }

    @property
    def id(self) -> str:
        return self.record.request.id

    @property
    def connections(self) -> set[Connection]:
        """All connections after HELLO."""
        return self.cuda | self.observers | self.notebooks

    @property
    def kernels(self) -> Kernels | None:
        """Combined report of its notebook servers about its kernels.

        Several servers can report the same kernels, so their reports are not added up.
        """
        reported = self.reported_kernels.values()
        if not reported:
            return None
        instants = [kernels.last_activity for kernels in reported if kernels.last_activity is not None]
        return Kernels(
            alive=max(kernels.alive for kernels in reported),
            busy=max(kernels.busy for kernels in reported),
            last_activity=max(instants, default=None),
        )

    @property
    def memory_hits(self) -> MemoryLimitHits:
        """Allocations that were refused since the session was opened."""
        return self.memory.hits if self.memory is not None else self.record.memory_hits

    @property
    def observed(self) -> bool:
        """Whether another layer shares its GPUs. Its processes then report their GPU work and need no lease for it."""
        return self.record.request.layer is not LayerName.NATIVE

    @property
    def suspends(self) -> bool:
        """Whether its memory leaves the GPU only as a whole, while the session is suspended."""
        return self.record.request.engine is MemoryEngine.SUSPEND

    @property
    def converts_memory(self) -> bool:
        """Whether the library makes its device memory movable."""
        return self.record.request.oversubscribe and not self.suspends

    @property
    def time_limit_units(self) -> int:
        """Maximum part of each GPU's time, even when alone on the GPU. Never below its share, which can have grown."""
        return max(self.record.request.time_limit_units, self.record.request.share_units)

    @property
    def memory_limits(self) -> dict[str, int]:
        """The memory limits, keyed by GPU UUID."""
        return {gpu.uuid: self.memory_limit(gpu) for gpu in self.gpus}

    def memory_limit(self, gpu: Gpu) -> int:
        """Return the bytes that CUDA shows the session as this GPU's total."""
        limit = _resolved(self.record.request.memory_limit, gpu.memory_bytes)
        # Plain memory is on the GPU while the session works, so the GPU's size is the limit.
        return limit if self.converts_memory else min(limit, gpu.memory_bytes)

    def memory_guarantee(self, gpu: Gpu) -> int:
        """Return the guaranteed bytes on this GPU, which correspond to the units that the session owns.

        The bytes for borrowed units are guaranteed to their lender.
        """
        return gpu.memory_bytes * self.allocation().on(gpu.uuid).owned_units // UNITS_PER_GPU

    def allocation(self, active: bool = False) -> Allocation:
        """Return the session's allocation; with `active`, the allocation of its active tier."""
        record = self.record
        return Allocation(
            session=self.id,
            gpus=record.request.gpus,
            share_units=record.request.share_units,
            borrowed_units=record.borrowed_units,
            effective_units=record.request.share_units if active else record.effective_units,
            opened_at=record.begun,
            yields=record.yields_until is not None,
            layer=record.request.layer,
            last_units=record.request.last_units,
            borrowed_each=record.borrowed_each,
        )

    def borrow(self, allocation: Allocation) -> None:
        """Record the borrowed units of an allocation."""
        self.record.borrowed_units, self.record.borrowed_each = allocation.borrowed_units, allocation.borrowed_each

    def has_whole(self, gpu: str) -> bool:
        """Return whether its share is all of one of its GPUs."""
        return self.record.request.on(gpu, self.record.request.share_units) == UNITS_PER_GPU


@lru_cache(maxsize=256)
def _resolved(written: str, total: int) -> int:
    """Return `resolve_bytes`, cached: templates use few distinct limits, and each report needs all sessions' limits."""
    return resolve_bytes(written, total)


BURSTS_REPORTED_FOR = 300.0
"""Seconds after a burst's end for which it is reported: a restart of the service takes seconds."""


def update_bursts(session: Session, arbitrations: Mapping[str, GpuArbitration], clock: Callable[[], float]) -> None:
    """Bring a session's recent bursts up to date. `clock` returns seconds since the epoch.

    A session with several GPUs has none: its share is not one that `arbiter.right_size` can replay. Neither has a
    session that is suspended as a whole, or whose memory is not movable.
    """
    if len(session.gpus) != 1 or not session.converts_memory or session.gpus[0].uuid not in arbitrations:
        return
    shell, now = arbitrations[session.gpus[0].uuid], clock()
    for burst in shell.take_bursts(session.id):
        # a clock that is set back must not repeat an instant: readers recognize a burst by its end
        last = session.bursts[-1].ended_at if session.bursts else 0.0
        ended_at = max(round(now - (shell.now() - burst.ended_at), 3), last + 0.001)
        # a session that was opened again began anew
        if ended_at - burst.seconds >= session.record.begun:
            session.bursts.append(burst._replace(ended_at=ended_at))
    while session.bursts and session.bursts[0].ended_at < now - BURSTS_REPORTED_FOR:
        session.bursts.popleft()


SAME_INSTANT = 0.05
"""Maximum seconds between readings of one instant on two clocks."""


@dataclass(frozen=True)
class Activity:
    """Work and memory of a session on all its GPUs."""

    busy: bool
    """Whether a burst runs or waits."""
    waiting: bool
    last: float | None
    """End of the last burst, seconds since the epoch; None if there was no burst yet."""
    gpu_seconds: float
    memory_bytes: int
    resident_bytes: int
    delivered: Delivered
    """Time delivered on all its GPUs, across all runs of the agent, since the session was opened."""
    early_page_ins_used: int = 0
    """Page-ins and resumptions before an expected launch that came."""
    early_page_ins_unused: int = 0


def activity(session: Session, arbitrations: Mapping[str, GpuArbitration], clock: Callable[[], float]) -> Activity:
    """Add up a session's activity on its GPUs. `clock` returns seconds since the epoch."""
    snapshots: list[tuple[GpuArbitration, SessionView]] = [
        (arbitrations[gpu.uuid], arbitrations[gpu.uuid].snapshot(session.id)) for gpu in session.gpus
    ]
    # the arbiter's clock starts with the machine; here, only the age of its instants is meaningful
    ages = [shell.now() - snapshot.last_activity for shell, snapshot in snapshots if snapshot.last_activity is not None]
    # read after the ages: a pause of this process in between moves the ends later, and never hides work from a service
    # that asks for work after an instant
    wall = clock()
    ends = [wall - age for age in ages]
    # a reopened session starts from scratch
    ends = [end for end in ends if end >= session.record.begun]
    instants = [*ends] if session.past.last is None else [*ends, session.past.last]
    last = max((max(0.0, instant) for instant in instants), default=None)
    if last is not None and session.last_end is not None and abs(last - session.last_end) < SAME_INSTANT:
        last = session.last_end
    session.last_end = last
    return Activity(
        busy=any(snapshot.running or snapshot.waiting for _, snapshot in snapshots),
        waiting=any(snapshot.waiting for _, snapshot in snapshots),
        last=last,
        gpu_seconds=max(0.0, session.past.gpu_seconds + sum(snapshot.gpu_seconds for _, snapshot in snapshots)),
        early_page_ins_used=sum(snapshot.guesses_used for _, snapshot in snapshots),
        early_page_ins_unused=sum(snapshot.guesses_unused for _, snapshot in snapshots),
        memory_bytes=sum(snapshot.memory_bytes for _, snapshot in snapshots),
        resident_bytes=sum(snapshot.resident_bytes for _, snapshot in snapshots),
        delivered=session.past.delivered.plus(
            counted({gpu.uuid: snapshot for gpu, (_, snapshot) in zip(session.gpus, snapshots, strict=True)}).minus(
                session.past.delivered_before
            )
        ),
    )


def cells_status(
    session: Session, arbitrations: Mapping[str, GpuArbitration], clock: Callable[[], float]
) -> CellsStatus:
    """Return the executions of a session's cells. `clock` returns seconds since the epoch."""
    shells = [arbitrations[gpu.uuid] for gpu in session.gpus]
    unsettled = [(shell.gpu.uuid, *use) for shell in shells for use in shell.unsettled_use(session.id)]
    return session.cells.status(unsettled, next((shell.now() for shell in shells), 0.0), clock())


def counted(snapshots: Mapping[str, SessionView]) -> Delivered:
    """Add up the counts of the arbiters of a session's GPUs, given by UUID."""
    total = NOTHING
    for snapshot in snapshots.values():
        total = total.plus(snapshot.delivered)
    if len(snapshots) < 2:
        return total
    return replace(total, gpus={gpu: snapshot.delivered for gpu, snapshot in snapshots.items()})
