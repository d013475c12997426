"""Budgets of host memory for GPU memory that may be paged out. Pure: figures in, free bytes out.

What a session may have to page out must find host memory, or the kernel's OOM killer ends somebody's kernel. So memory
that could not be paged out any more is not allocated. Amounts are bytes.

Of a node: the memory of all sessions that does not fit on its GPUs together must fit into the node's budget. A session
counts for what it has, and at least for its guarantee: so an allocation within the guarantee is never refused by the
node's budget, whatever the neighbours hold.

Of a session: all of its movable memory must fit into what its server's memory limit leaves, since all of it can be
paged out: its guarantee stays only while it works. A session that has a whole GPU shares it with nobody, and only what
exceeds the GPU counts. Where it lends units while it is idle, the borrowers get only so much of the GPU that what its
server's memory limit cannot take stays there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

UNLIMITED = 2**62


@dataclass(frozen=True)
class SessionOnGpu:
    """One session's memory on one GPU."""

    counted: int
    """Bytes that it has allocated, or may allocate without asking."""
    movable: int
    """The part of `counted` that can be paged out."""
    guarantee: int
    whole_gpu: bool = False
    """Its share is the whole GPU: others can only borrow of it."""
    must_stay: int = 0
    """The part of `movable` that its server's memory limit could not take."""

    @property
    def needed(self) -> int:
        """Bytes that are kept for the session: at least its guarantee."""
        return max(self.counted, self.guarantee)


@dataclass(frozen=True)
class GpuMemory:
    """One GPU and its sessions."""

    device_bytes: int
    """Bytes of the GPU's memory that allocations can use."""
    sessions: Mapping[str, SessionOnGpu] = field(default_factory=dict)

    @property
    def needed(self) -> int:
        """Bytes of allocations, and of guarantees that are not used."""
        return sum(one.needed for one in self.sessions.values())

    @property
    def beyond(self) -> int:
        """Bytes of it that do not fit on the GPU."""
        return max(0, self.needed - self.device_bytes)


def node_needs(gpus: Iterable[GpuMemory]) -> int:
    """Bytes of host memory that are needed if every session uses all that it may."""
    return sum(gpu.beyond for gpu in gpus)


def node_left(gpus: Mapping[str, GpuMemory], gpu: str, session: str, budget: int | None) -> int:
    """Bytes that the node's budget lets the session allocate on the GPU in addition; at least the rest of its
    guarantee. `budget` None: no budget."""
    if budget is None:
        return UNLIMITED
    here = gpus[gpu]
    own = here.sessions[session]
    elsewhere = sum(other.beyond for name, other in gpus.items() if name != gpu)
    free = max(0, budget - elsewhere) + here.device_bytes - (here.needed - own.needed)
    others = [one for name, one in here.sessions.items() if name != session]
    if any(one.must_stay for one in others):
        # the driver chooses which pages leave: all the others together must fit beside those that have to stay
        free = min(free, here.device_bytes - sum(one.must_stay or one.counted for one in others))
    return max(free, own.guarantee) - own.counted


def session_needs(on_gpus: Iterable[tuple[GpuMemory, SessionOnGpu]]) -> int:
    """Host memory that the session needs if all its movable memory has to leave its GPUs."""
    return sum(max(0, own.movable - (gpu.device_bytes if own.whole_gpu else 0)) for gpu, own in on_gpus)


def session_left(gpus: Mapping[str, GpuMemory], gpu: str, session: str, budget: int | None) -> int:
    """Bytes of movable memory that the session's own budget lets it allocate on the GPU in addition."""
    if budget is None:
        return UNLIMITED
    on_gpus = {name: (one, one.sessions[session]) for name, one in gpus.items() if session in one.sessions}
    elsewhere = session_needs(pair for name, pair in on_gpus.items() if name != gpu)
    here, own = on_gpus[gpu]
    stays = here.device_bytes if own.whole_gpu else 0
    return budget - elsewhere + stays - own.movable


def node_budget(wanted: int, total: int, available: int, paged_out: int) -> int:
    """Return the node's budget: what the admin wants, and never more than the node's memory in all, or than is paged
    out already with four fifths of what is available beside that. All of it bytes."""
    return max(0, min(wanted, total, paged_out + available * 4 // 5))


def session_budget(limit: int, used: int, paged_out: int) -> int:
    """A session's budget: what its server's limit leaves beside what the processes use. What was paged out already may
    be part of what they use; it does not count twice."""
    return max(0, limit - max(0, used - paged_out))
