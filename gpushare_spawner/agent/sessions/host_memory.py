"""Budgets of host memory for GPU memory that may be paged out.

GPU memory that may be paged out needs host memory; without it, the kernel's OOM killer ends a process. Therefore the
agent refuses allocations that could not be paged out. Amounts are in bytes. `GpuMemoryBudget` and the functions
`node_*` and `session_*` are pure: they compute free bytes from figures.

Budget of a node: the part of all sessions' memory that exceeds the node's GPUs must fit into it. A session counts with
its allocations, and at least with its guarantee, so the node's budget never refuses an allocation within the guarantee.

Budget of a session: all of its movable memory must fit into the rest of its server's memory limit, because all of it
can be paged out: the guarantee holds only while the session works. A session with a whole GPU has no neighbors, so only
the part beyond the GPU counts. While it is idle and lends units, borrowers must leave enough of the GPU free for the
part of its memory that exceeds its server's memory limit.

`NodeMemory` reads the kernel's figures and applies these rules. `HostUse` measures pods' CPU and host memory: a
released session's pod must not request less. `inform_arbiters` passes the driver's figures of device memory to the
arbiters. For limits on device memory, see session_limit.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.cgroups import CpuCgroups, MemoryCgroups, machine_memory
from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.gpus.nvml import Gpu, GpuState
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.model.frames import ReserveKind
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.report import HostMemoryReport, HostUseReport
from gpushare_spawner.model.share import UNITS_PER_GPU, MemoryLimit, Tier
from gpushare_spawner.wording.amounts import memory

UNLIMITED = 2**62


@dataclass(frozen=True)
class SessionOnGpu:
    """One session's memory on one GPU."""

    counted: int
    """Bytes that it has allocated, or may allocate without a request."""
    movable: int
    """The part of `counted` that can be paged out."""
    guarantee: int
    whole_gpu: bool = False
    """Whether its share is the whole GPU, so that others only borrow from it."""
    must_stay: int = 0
    """The part of `movable` that exceeds its server's memory limit."""

    @property
    def needed(self) -> int:
        """Bytes that are reserved for the session: at least its guarantee."""
        return max(self.counted, self.guarantee)


@dataclass(frozen=True)
class GpuMemoryBudget:
    """One GPU and its sessions."""

    device_bytes: int
    """Bytes of the GPU's memory that allocations can use."""
    sessions: Mapping[str, SessionOnGpu] = field(default_factory=dict)

    @property
    def needed(self) -> int:
        """Bytes of allocations and unused guarantees."""
        return sum(session.needed for session in self.sessions.values())

    @property
    def beyond(self) -> int:
        """Bytes of `needed` that do not fit on the GPU."""
        return max(0, self.needed - self.device_bytes)


def node_needs(gpus: Iterable[GpuMemoryBudget]) -> int:
    """Return the bytes of host memory that are needed if every session uses all the memory that it may use."""
    return sum(gpu.beyond for gpu in gpus)


def node_left(gpus: Mapping[str, GpuMemoryBudget], gpu: str, session: str, budget: int | None) -> int:
    """Return how many more bytes the session may allocate on the GPU under the node's budget.

    The result is at least the rest of the session's guarantee. `budget`: None if there is none.
    """
    if budget is None:
        return UNLIMITED
    here = gpus[gpu]
    own = here.sessions[session]
    elsewhere = sum(other.beyond for name, other in gpus.items() if name != gpu)
    free = max(0, budget - elsewhere) + here.device_bytes - (here.needed - own.needed)
    others = [other for name, other in here.sessions.items() if name != session]
    if any(other.must_stay for other in others):
        # the driver chooses the pages to evict: all other memory must fit next to the pages that have to stay
        free = min(free, here.device_bytes - sum(other.must_stay or other.counted for other in others))
    return max(free, own.guarantee) - own.counted


def session_needs(on_gpus: Iterable[tuple[GpuMemoryBudget, SessionOnGpu]]) -> int:
    """Return the host memory that the session needs if all its movable memory has to leave its GPUs."""
    return sum(max(0, own.movable - (gpu.device_bytes if own.whole_gpu else 0)) for gpu, own in on_gpus)


def session_left(gpus: Mapping[str, GpuMemoryBudget], gpu: str, session: str, budget: int | None) -> int:
    """Return how many more bytes of movable memory the session may allocate on the GPU under its own budget."""
    if budget is None:
        return UNLIMITED
    on_gpus = {name: (there, there.sessions[session]) for name, there in gpus.items() if session in there.sessions}
    elsewhere = session_needs(pair for name, pair in on_gpus.items() if name != gpu)
    here, own = on_gpus[gpu]
    stays = here.device_bytes if own.whole_gpu else 0
    return budget - elsewhere + stays - own.movable


def node_budget(desired: int, total: int, available: int, paged_out: int) -> int:
    """Return the node's budget in bytes: the admin's setting, within two limits.

    The limits are the node's total memory, and the paged-out bytes plus four fifths of the available memory.
    """
    return max(0, min(desired, total, paged_out + available * 4 // 5))


def session_budget(limit: int, used: int, paged_out: int) -> int:
    """Return a session's budget: its server's limit minus the memory in use.

    Memory that is already paged out may be part of the memory in use; it does not count twice.
    """
    return max(0, limit - max(0, used - paged_out))


OVER = 10.0
"""Seconds over which CPU use is measured."""
FORGET_AFTER = 600.0
"""Seconds after which the figures of a pod without a request are dropped."""
CPU_STEP = 50
"""Millicores to which use is rounded up, so that a report changes only for significant changes."""
MEMORY_STEP = 64 * 2**20
"""Bytes to which use is rounded up."""


@dataclass
class _Sample:
    at: float
    cpu_seconds: float
    cores: float | None = None
    """Use in the interval before `at`; None if there is no such interval."""


class HostUse:
    """Reader of cgroups.

    Figures are None until the second request for a pod, at least `OVER` seconds after the first.
    """

    def __init__(self, cgroups: MemoryCgroups, clock: Callable[[], float]) -> None:
        """Start without figures. ``clock``: seconds on any monotonic clock."""
        self._memory = cgroups
        self._cpu = CpuCgroups(cgroups.root)
        self._clock = clock
        self._samples: dict[str, _Sample] = {}

    def of_pod(self, uid: str) -> HostUseReport | None:
        """Return the pod's use; None if it is not known (yet)."""
        now = self._clock()
        self._samples = {name: sample for name, sample in self._samples.items() if now - sample.at < FORGET_AFTER}
        last = self._samples.get(uid)
        if last is None or now - last.at >= OVER:
            seconds = self._cpu.seconds_of_pod(uid)
            if seconds is None:
                self._samples.pop(uid, None)
                return None
            cores = None if last is None else max(0.0, seconds - last.cpu_seconds) / (now - last.at)
            last = self._samples[uid] = _Sample(now, seconds, cores)
        memory = self._memory.used_by_pod(uid)
        if last.cores is None or memory is None:
            return None
        return HostUseReport(
            cpu_millicores=math.ceil(last.cores * 1000 / CPU_STEP) * CPU_STEP,
            memory_bytes=math.ceil(memory / MEMORY_STEP) * MEMORY_STEP,
        )


FRESH = 0.5
"""Seconds for which a kernel figure is reused."""
REPORT_FRESH = 10.0
"""Seconds for which reports reuse a session's budget: its figures are in several files, and reports are only for
people."""
_ROUND = 64 * 2**20
"""Bytes to which reported budgets are rounded: the kernel's figures change constantly."""


@dataclass(frozen=True)
class HostMemorySettings:
    """Limits on host memory for paged-out GPU memory."""

    node: str = "50%"
    """Budget of the node: bytes ("64Gi") or a percentage of its memory; "off": no budget for the node or for sessions.
    """
    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")
    """Mount point of the node's cgroups."""


@dataclass
class _Figures:
    at: float
    budget: int | None


@dataclass
class NodeMemory:
    """Additional memory that each session may allocate. `paged_out`: a session's bytes in host memory."""

    settings: HostMemorySettings
    gpus: Mapping[str, Gpu]
    sessions: Mapping[str, Session]
    context_bytes: int
    paged_out: Callable[[Session], int]
    clock: Callable[[], float] = time.monotonic
    _node: _Figures | None = None
    _of_session: dict[str, _Figures] = field(default_factory=dict)
    _cgroups: MemoryCgroups = field(init=False)
    _use: HostUse = field(init=False)

    def __post_init__(self) -> None:
        self._cgroups = MemoryCgroups(self.settings.cgroups)
        self._use = HostUse(self._cgroups, self.clock)

    def left_for(self, session: Session, gpu: str, kind: ReserveKind) -> tuple[int, MemoryLimit]:
        """Return how many more bytes the session may allocate on the GPU, and the limiting budget."""
        if self.settings.node == "off":
            return UNLIMITED, MemoryLimit.NODE_HOST_MEMORY
        gpus = self.on_gpus()
        budget = self.node_budget()
        of_node = node_left(gpus, gpu, session.id, budget)
        if kind is ReserveKind.OWN_MANAGED and budget is not None:
            # The session's limit does not apply. Count no more than the session's part of the budget.
            own = gpus[gpu].sessions[session.id]
            of_node = min(of_node, self._most(session, gpu, budget) - own.counted)
        if kind is ReserveKind.PLAIN and not session.suspends:
            return of_node, MemoryLimit.NODE_HOST_MEMORY
        of_session = session_left(gpus, gpu, session.id, self.session_budget(session))
        if of_session < of_node:
            return of_session, MemoryLimit.SESSION_HOST_MEMORY
        return of_node, MemoryLimit.NODE_HOST_MEMORY

    def shortage(self, session: Session) -> tuple[int, int] | None:
        """Return the bytes that the session's own budget allows, and the bytes that its share guarantees.

        None if the allowed bytes suffice. Existing allocations do not matter.
        """
        budget = self.session_budget(session)
        if budget is None or all(session.has_whole(gpu.uuid) for gpu in session.gpus):
            return None
        guaranteed = sum(min(session.memory_guarantee(gpu), session.memory_limit(gpu)) for gpu in session.gpus)
        return (budget, guaranteed) if budget < guaranteed and session.record.request.oversubscribe else None

    def lacks_host_memory(self, session: Session, amount: int) -> str | None:
        """Return why `amount` more bytes of the session exceed the host memory budgets; None if they fit."""
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

    def report(self, on_gpus: Mapping[str, GpuMemoryBudget]) -> HostMemoryReport | None:
        """Return the node's figures; None without a budget."""
        budget = self.node_budget()
        if budget is None:
            return None
        return HostMemoryReport(
            budget_bytes=budget // _ROUND * _ROUND,
            needed_bytes=node_needs(on_gpus.values()),
            paged_out_bytes=sum(self.paged_out(session) for session in self.sessions.values()),
        )

    def of_session(self, session: Session, on_gpus: Mapping[str, GpuMemoryBudget]) -> tuple[int, int | None]:
        """Return the host memory that the session may need for its movable memory, and its budget, in bytes.

        The budget is at most `REPORT_FRESH` seconds old.
        """
        gpus = [(gpu, gpu.sessions[session.id]) for gpu in on_gpus.values() if session.id in gpu.sessions]
        budget = self.session_budget(session, REPORT_FRESH)
        return session_needs(gpus), None if budget is None else budget // _ROUND * _ROUND

    def host_use(self, session: Session) -> HostUseReport | None:
        """Return the use of a released session's pod; None for other sessions, or if the use is not known."""
        record = session.record
        if record.tier is not Tier.RELEASED or record.pod is None:
            return None
        return self._use.of_pod(record.pod.uid)

    def node_budget(self) -> int | None:
        """Return the node's budget in bytes; None if there is none."""
        if self.settings.node == "off":
            return None
        now = self.clock()
        if self._node is None or now - self._node.at > FRESH:
            machine = machine_memory(self.settings.proc)
            budget = None
            if machine is not None:
                desired = resolve_bytes(self.settings.node, machine.total)
                out = sum(self.paged_out(session) for session in self.sessions.values())
                budget = node_budget(desired, machine.total, machine.available, out)
            self._node = _Figures(now, budget)
        return self._node.budget

    def session_budget(self, session: Session, fresh: float = FRESH) -> int | None:
        """Return the session's budget in bytes; None if its server has no readable memory limit of its own.

        ``fresh``: the age in seconds up to which a figure is reused.
        """
        if self.settings.node == "off":
            return None
        now = self.clock()
        figures = self._of_session.get(session.id)
        if figures is None or now - figures.at > fresh:
            figures = self._of_session[session.id] = _Figures(now, self._read(session))
            for gone in self._of_session.keys() - self.sessions.keys():
                del self._of_session[gone]
        return figures.budget

    def _read(self, session: Session) -> int | None:
        record = session.record
        if record.pod is not None:
            group = self._cgroups.of_pod(record.pod.uid)
        elif record.process is not None and (path := processes.cgroup(record.process.pid)) is not None:
            # groups that also contain the agent are shared with other sessions
            group = self._cgroups.of_path(path, below=processes.cgroup_of_self() or "/")
        else:
            group = None
        return None if group is None else session_budget(group.limit, group.used, self.paged_out(session))

    def on_gpus(self) -> dict[str, GpuMemoryBudget]:
        """Return the memory that now counts for each session on each GPU, keyed by GPU UUID.

        The cost grows with the number of sessions.
        """
        budget = self.node_budget()
        budgets = {}
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
                whole = session.has_whole(uuid)
                own_budget = self.session_budget(session) if whole else None
                here[session.id] = SessionOnGpu(
                    counted=counted,
                    movable=movable,
                    guarantee=min(session.memory_guarantee(gpu), limit),
                    whole_gpu=whole,
                    must_stay=0 if own_budget is None else max(0, movable - own_budget),
                )
                contexts += 0 if gpu.simulated else len(session.cuda) * self.context_bytes
            budgets[uuid] = GpuMemoryBudget(max(0, gpu.memory_bytes - contexts), here)
        return budgets

    def _most(self, session: Session, uuid: str, budget: int) -> int:
        """Return the maximum bytes that count for a session on one GPU, regardless of its stated memory."""
        request = session.record.request
        return session.memory_limit(self.gpus[uuid]) + budget * request.on(uuid, request.share_units) // UNITS_PER_GPU


def inform_arbiters(
    states: Mapping[str, GpuState],
    gpus: Mapping[str, Gpu],
    arbitrations: Mapping[str, GpuArbitration],
    sessions: Iterable[Session],
    unstated: Mapping[tuple[int, str], int],
) -> None:
    """Pass the driver's figures to the arbiters and to the memory limits. Mappings are keyed by GPU UUID.

    A process with several connections counts once, for its first connection. ``unstated``: bytes that a process
    holds beyond its stated memory, by pid and GPU. The figures limit a process's use of its stated memory. A real
    driver's NVML is not known to count managed memory for its process. There the limit is the memory in use on the
    whole GPU, minus the figures of other processes. A process that the driver does not list has no memory on the
    GPU.
    """
    sessions = list(sessions)
    for uuid, state in states.items():
        amounts: dict[int, int | None] = {}
        beyond: dict[int, int] = {}
        bounds: dict[int, int] = {}
        reported: set[int] = set()
        of_all = sum(amount or 0 for amount in state.processes.values())
        for session in sessions:
            here = session.memory if any(gpu.uuid == uuid for gpu in session.gpus) else None
            for connection in sorted(session.cuda, key=lambda connection: connection.number):
                number, pid = connection.number, connection.peer.pid
                first = pid not in reported
                reported.add(pid)
                beyond[number] = unstated.get((pid, uuid), 0) if first else 0
                if pid in state.processes:
                    shown = state.processes[pid]
                    amounts[number] = shown if first else 0
                    if not gpus[uuid].simulated:
                        bounds[number] = max(0, state.memory_used_bytes - of_all + (shown or 0))
                    elif shown is not None:
                        bounds[number] = shown
                elif state.processes and pid and not session.suspends:  # a suspended process is not listed
                    amounts[number] = bounds[number] = 0
                else:
                    amounts[number] = None
                    if not gpus[uuid].simulated:
                        bounds[number] = state.memory_used_bytes
                if here is not None and amounts[number] is not None:
                    here.driver_shows(connection, uuid, amounts[number] or 0)
        arbitrations[uuid].device_memory(amounts, beyond)
        if state.healthy:
            arbitrations[uuid].working_sets(bounds)
