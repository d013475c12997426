"""The host memory budgets of a node and of its sessions: reads the kernel's figures and applies the rules of
host_memory_budget.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.memory.cgroups import MemoryCgroups, machine_memory
from gpushare_spawner.agent.memory.host_memory_budget import (
    UNLIMITED,
    GpuMemory,
    SessionOnGpu,
    node_budget,
    node_left,
    node_needs,
    session_budget,
    session_left,
    session_needs,
)
from gpushare_spawner.agent.memory.host_use import HostUse
from gpushare_spawner.agent.memory.session_limit import SessionLimit
from gpushare_spawner.agent.state.session_record import SessionRecord
from gpushare_spawner.model.memory_limits import MemoryLimit
from gpushare_spawner.model.protocol.frames import ReserveKind
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.report import HostMemoryReport, HostUseReport
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.wording.amounts import memory

FRESH = 0.5
"""Seconds for which a figure of the kernel is used again."""
REPORT_FRESH = 10.0
"""The same for budgets of sessions in reports: a session's figures are several files, and a report is for people."""
_ROUND = 64 * 2**20
"""Budgets are reported in steps of so many bytes: the kernel's figures change all the time."""


@dataclass(frozen=True)
class HostMemorySettings:
    """How much host memory paged-out GPU memory may use."""

    node: str = "50%"
    """Of the node: bytes ("64Gi") or a part of its memory; "off": no budget, neither for the node nor for sessions."""
    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")
    """Where the node's cgroups are mounted."""


class MemorySession(Protocol):
    """What a session says about itself where its memory is counted."""

    @property
    def id(self) -> str: ...

    @property
    def record(self) -> SessionRecord: ...

    @property
    def gpus(self) -> tuple[Gpu, ...]: ...

    @property
    def memory(self) -> SessionLimit | None: ...

    @property
    def suspends(self) -> bool:
        """Whether all its memory can leave the GPU, while it is suspended."""

    @property
    def observed(self) -> bool:
        """Whether another layer shares its GPUs, so that nothing of it is paged out."""

    @property
    def cuda(self) -> Collection[Any]:
        """Its CUDA processes."""

    def memory_limit(self, gpu: Gpu) -> int:
        """Bytes that the session may allocate on the GPU."""

    def memory_guarantee(self, gpu: Gpu) -> int:
        """Bytes that stay on the GPU while the session works."""


@dataclass
class _Figures:
    at: float
    budget: int | None


@dataclass
class NodeMemory:
    """Computes how much a session may allocate. `paged_out`: bytes of a session that are in host memory."""

    settings: HostMemorySettings
    gpus: Mapping[str, Gpu]
    sessions: Mapping[str, MemorySession]
    context_bytes: int
    paged_out: Callable[[MemorySession], int]
    clock: Callable[[], float] = time.monotonic
    _node: _Figures | None = None
    _of_session: dict[str, _Figures] = field(default_factory=dict)
    _cgroups: MemoryCgroups = field(init=False)
    _use: HostUse = field(init=False)

    def __post_init__(self) -> None:
        self._cgroups = MemoryCgroups(self.settings.cgroups)
        self._use = HostUse(self._cgroups, self.clock)

    def left_for(self, session: MemorySession, gpu: str, kind: ReserveKind) -> tuple[int, MemoryLimit]:
        """Bytes that the session may allocate on the GPU in addition, and the budget that limits them."""
        if self.settings.node == "off":
            return UNLIMITED, MemoryLimit.NODE_HOST_MEMORY
        gpus = self.on_gpus()
        budget = self.node_budget()
        of_node = node_left(gpus, gpu, session.id, budget)
        if kind is ReserveKind.OWN_MANAGED and budget is not None:
            # the session's limit does not bound it: not more than the session's part of the budget
            own = gpus[gpu].sessions[session.id]
            of_node = min(of_node, self._most(session, gpu, budget) - own.counted)
        if kind is ReserveKind.PLAIN and not session.suspends:
            return of_node, MemoryLimit.NODE_HOST_MEMORY
        of_session = session_left(gpus, gpu, session.id, self.session_budget(session))
        if of_session < of_node:
            return of_session, MemoryLimit.SESSION_HOST_MEMORY
        return of_node, MemoryLimit.NODE_HOST_MEMORY

    def shortage(self, session: MemorySession) -> tuple[int, int] | None:
        """The bytes that the session's own budget allows, and those that its share guarantees; None where they suffice.

        What it has allocated already does not matter.
        """
        budget = self.session_budget(session)
        if budget is None or session.record.request.share_units == UNITS_PER_GPU:
            return None
        guaranteed = sum(min(session.memory_guarantee(gpu), session.memory_limit(gpu)) for gpu in session.gpus)
        return (budget, guaranteed) if budget < guaranteed and session.record.request.oversubscribe else None

    def lacks_host_memory(self, session: MemorySession, amount: int) -> str | None:
        """Why the budgets do not hold `amount` more bytes of the session in host memory, in a sentence; None: they
        do."""
        of_session, of_node = self.session_budget(session), self.node_budget()
        if of_session is not None and amount > of_session:
            return (
                f"The memory limit of its server leaves {memory(of_session)} for GPU memory, and it has "
                f"{memory(amount)}."
            )
        if of_node is not None:
            left = max(0, of_node - sum(self.paged_out(other) for other in self.sessions.values()))
            if amount > left:
                return f"Its node has {memory(left)} of host memory left for GPU memory, and it has {memory(amount)}."
        return None

    def report(self, on_gpus: Mapping[str, GpuMemory]) -> HostMemoryReport | None:
        """The node's figures; None without a budget."""
        budget = self.node_budget()
        if budget is None:
            return None
        return HostMemoryReport(
            budget_bytes=budget // _ROUND * _ROUND,
            needed_bytes=node_needs(on_gpus.values()),
            paged_out_bytes=sum(self.paged_out(session) for session in self.sessions.values()),
        )

    def of_session(self, session: MemorySession, on_gpus: Mapping[str, GpuMemory]) -> tuple[int, int | None]:
        """Bytes of host memory that the session needs if all its movable memory is paged out, and its budget.

        The budget is as it was within the last `REPORT_FRESH` seconds.
        """
        gpus = [(gpu, gpu.sessions[session.id]) for gpu in on_gpus.values() if session.id in gpu.sessions]
        budget = self.session_budget(session, REPORT_FRESH)
        return session_needs(gpus), None if budget is None else budget // _ROUND * _ROUND

    def host_use(self, session: MemorySession) -> HostUseReport | None:
        """What a released session's pod uses; None for others, and where it is not known."""
        record = session.record
        if record.tier is not Tier.RELEASED or record.pod is None:
            return None
        return self._use.of_pod(record.pod.uid)

    def node_budget(self) -> int | None:
        """Bytes; None: there is none."""
        if self.settings.node == "off":
            return None
        now = self.clock()
        if self._node is None or now - self._node.at > FRESH:
            machine = machine_memory(self.settings.proc)
            budget = None
            if machine is not None:
                wanted = resolve_bytes(self.settings.node, machine.total)
                out = sum(self.paged_out(session) for session in self.sessions.values())
                budget = node_budget(wanted, machine.total, machine.available, out)
            self._node = _Figures(now, budget)
        return self._node.budget

    def session_budget(self, session: MemorySession, fresh: float = FRESH) -> int | None:
        """Bytes; None: its server has no memory limit of its own, or none that can be read.

        ``fresh``: the age in seconds up to which a figure is used again.
        """
        if self.settings.node == "off":
            return None
        now = self.clock()
        known = self._of_session.get(session.id)
        if known is None or now - known.at > fresh:
            known = self._of_session[session.id] = _Figures(now, self._read(session))
            for gone in self._of_session.keys() - self.sessions.keys():
                del self._of_session[gone]
        return known.budget

    def _read(self, session: MemorySession) -> int | None:
        record = session.record
        if record.pod is not None:
            group = self._cgroups.of_pod(record.pod.uid)
        elif record.process is not None and (path := processes.cgroup(record.process.pid)) is not None:
            # groups that the agent is in as well are shared with other sessions
            group = self._cgroups.of_path(path, below=processes.cgroup_of_self() or "/")
        else:
            group = None
        return None if group is None else session_budget(group.limit, group.used, self.paged_out(session))

    def on_gpus(self) -> dict[str, GpuMemory]:
        """What counts of each session on each GPU now, by the GPU's UUID; takes longer with more sessions."""
        budget = self.node_budget()
        found = {}
        for uuid, gpu in self.gpus.items():
            here, contexts = {}, 0
            for session in self.sessions.values():
                if gpu not in session.gpus or session.memory is None or session.observed:
                    continue
                counted, movable = session.memory.counted(uuid)
                if session.suspends:
                    movable = counted
                if budget is not None:
                    most = self._most(session, uuid, budget)
                    counted, movable = min(counted, most), min(movable, most)
                limit = session.memory_limit(gpu)
                whole = session.record.request.share_units == UNITS_PER_GPU
                own_budget = self.session_budget(session) if whole else None
                here[session.id] = SessionOnGpu(
                    counted=counted,
                    movable=movable,
                    guarantee=min(session.memory_guarantee(gpu), limit),
                    whole_gpu=whole,
                    must_stay=0 if own_budget is None else max(0, movable - own_budget),
                )
                contexts += 0 if gpu.simulated else len(session.cuda) * self.context_bytes
            found[uuid] = GpuMemory(max(0, gpu.memory_bytes - contexts), here)
        return found

    def _most(self, session: MemorySession, uuid: str, budget: int) -> int:
        """The most bytes that count for a session on one GPU, whatever its processes claim."""
        return session.memory_limit(self.gpus[uuid]) + budget * session.record.request.share_units // UNITS_PER_GPU
