"""A session of this machine, as the running agent knows it. state/session_record.py has what survives a restart."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.memory.session_limit import SessionLimit
from gpushare_spawner.agent.sessions.asks import Asks
from gpushare_spawner.agent.sockets.connection import Connection, Listener
from gpushare_spawner.agent.sockets.session_endpoint import SessionEndpoint
from gpushare_spawner.agent.state.session_record import SessionRecord
from gpushare_spawner.idle import UseCount
from gpushare_spawner.model.controls import AskAnswer
from gpushare_spawner.model.delivered import NOTHING, Delivered
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.memory_engine import MemoryEngine
from gpushare_spawner.model.memory_limits.hits import MemoryLimitHits
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.share import UNITS_PER_GPU


class SessionListener(Listener, Protocol):
    """Answers the processes of a session, and tells them what changes: `conversation.Conversation`."""

    def believe_again(self, gpu: str) -> None:
        """Tell the arbiter of a GPU (UUID) how much counts of what the processes have said, where that has changed."""

    def tell_tier(self) -> None:
        """Tell all processes the session's tier."""

    def tell_memory(self) -> None:
        """Tell all processes the session's memory limit and guarantee."""

    def tell_notice(self) -> None:
        """Tell all observers the session's notice."""

    def tell_controls(self) -> None:
        """Tell all observers what users and admins have decided."""

    def tell_messages(self) -> None:
        """Tell all observers the messages that their user has."""

    def tell_answer(self, answer: AskAnswer) -> None:
        """Tell all observers what became of an ask."""


@dataclass(frozen=True)
class Past:
    """What the arbiter does not know: it begins anew with each start of the agent, and not with each opening."""

    last: float | None = None
    """End of the last burst, seconds since the epoch."""
    gpu_seconds: float = 0.0
    """To be added to what the arbiter counts; negative where that counts too much."""
    delivered: Delivered = NOTHING
    """Of earlier runs of the agent."""
    delivered_before: Delivered = NOTHING
    """What the arbiter had counted when the session was opened again: of an earlier opening."""

    @classmethod
    def recorded(cls, record: SessionRecord, restarted_at: float) -> Past:
        """`restarted_at`: seconds since the epoch; who had work when the agent ended was active until then."""
        last = restarted_at if record.gpu_busy else record.last_gpu_activity
        return cls(last, record.gpu_seconds, record.delivered)


@dataclass(frozen=True)
class Kernels:
    """What a notebook server says about its kernels."""

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
    weight: int = 0
    """Its weight in the arbiters: what it is guaranteed, and at least one unit unless it is released and idle."""
    lent_units: bool = False
    """It works on units that its tier has lent, and weighs what an active session of its share would."""
    use_count: UseCount | None = None
    """Adds up its GPU work until its share is restored, or its notice withdrawn; None: there is neither."""
    kernels_said: dict[Connection, Kernels] = field(default_factory=dict)
    """What each observer that is connected last said about the session's kernels."""
    claims: dict[Connection, dict[str, int]] = field(default_factory=dict)
    """Bytes that each CUDA process says it has allocated, by the GPU's UUID."""
    bypassing: tuple[int, ...] = ()
    past: Past = Past()
    saved_at: float = 0.0
    """When its record was last handed to the store, seconds since the epoch."""
    last_end: float | None = None
    """When its last burst ended, as it was said before, seconds since the epoch."""
    moved: bool = True
    """A process has said something since activity and record were last compared; else neither can have changed."""
    memory: SessionLimit | None = None
    asks: Asks | None = None
    conversation: SessionListener | None = None
    budget_checked: bool = False
    """Whether its server's memory limit was compared with what its share guarantees."""
    lacks_requests: bool = False
    """Its pod gave back requested CPU and memory while it was released, and its node has not granted them again."""
    context_bytes: int = 0
    """GPU memory of its CUDA contexts, by what the driver shows."""
    suspended: bool = False
    """All its processes are suspended."""
    not_suspendable: str | None = None
    """Why it cannot be suspended now, in a sentence."""
    socket: SessionEndpoint | None = None
    cuda: set[Connection] = field(default_factory=set)
    """CUDA processes."""
    observers: set[Connection] = field(default_factory=set)

    def clock_was_set(self, by: float) -> None:
        """Move all instants of the past by a step of the clock."""
        self.record.clock_was_set(by)
        self.saved_at += by
        if self.asks is not None:
            self.asks.clock_was_set(by)
        if self.past.last is not None:
            self.past = replace(self.past, last=self.past.last + by)
        if self.last_end is not None:
            self.last_end += by
        self.kernels_said = {
            observer: replace(said, last_activity=said.last_activity + by) if said.last_activity is not None else said
            for observer, said in self.kernels_said.items()
        }

    @property
    def id(self) -> str:
        return self.record.request.id

    @property
    def connections(self) -> set[Connection]:
        """All that said HELLO."""
        return self.cuda | self.observers

    @property
    def kernels(self) -> Kernels | None:
        """What its observers say about its kernels. Several may speak of the same kernels: they are not added up."""
        said = self.kernels_said.values()
        if not said:
            return None
        instants = [one.last_activity for one in said if one.last_activity is not None]
        return Kernels(
            alive=max(one.alive for one in said),
            busy=max(one.busy for one in said),
            last_activity=max(instants, default=None),
        )

    @property
    def memory_hits(self) -> MemoryLimitHits:
        """Allocations that were refused since the session was opened."""
        return self.memory.hits if self.memory is not None else self.record.memory_hits

    @property
    def observed(self) -> bool:
        """Whether another layer shares its GPUs: its processes report their GPU work, and need no lease for it."""
        return self.record.request.layer is not LayerName.NATIVE

    @property
    def suspends(self) -> bool:
        """Whether its memory leaves the GPU only as a whole, while the session is suspended."""
        return self.record.request.engine is MemoryEngine.SUSPEND

    @property
    def converts_memory(self) -> bool:
        """Whether the library makes its device memory movable."""
        return self.record.request.oversubscribe and not self.suspends

    def memory_limit(self, gpu: Gpu) -> int:
        """Bytes that CUDA shows the session as this GPU's total."""
        limit = _resolved(self.record.request.memory_limit, gpu.memory_bytes)
        # plain memory is on the GPU while the session works: there is no more than the GPU has
        return limit if self.converts_memory else min(limit, gpu.memory_bytes)

    def memory_guarantee(self, gpu: Gpu) -> int:
        """Bytes of this GPU that are the session's part: of the units that it owns, as their lender has the same bytes
        guaranteed while the session borrows them."""
        owned = self.record.request.share_units - self.record.borrowed_units
        return gpu.memory_bytes * owned // UNITS_PER_GPU


@lru_cache(maxsize=256)
def _resolved(written: str, total: int) -> int:
    """`resolve_bytes`, remembered: templates write few limits, and each report asks for those of all sessions."""
    return resolve_bytes(written, total)
