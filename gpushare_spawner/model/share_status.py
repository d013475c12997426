"""A notebook server's GPU share at one instant, as the agent sends it. Pure data.

The status in words is in `wording.share_status`. The agent's report of all sessions is in `model.report`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from gpushare_spawner.model.frames import (
    LACKS_REQUESTS,
    NO_END,
    NO_GPU,
    SUSPENDED,
    YIELDS,
    Frame,
    Kind,
    LeaseState,
    ReceivedText,
    SessionMemoryTopic,
    TextReader,
    TextTopic,
    gpu_name,
)
from gpushare_spawner.model.share import IdleCause, MemoryLimit, MemoryLimitName, Tier, borrowed_in_use

ANNOTATIONS_VARIABLE = "GPUSHARE_ANNOTATIONS"
"""Environment variable of a server in a pod with a GPU of another layer: the folder with the pod's annotations."""
NANOSECONDS = 1e9
MILLISECONDS = 1e3
NEVER = 2**64 - 1
"""Field of STATUS if there was no GPU work yet."""
ANSWER = frozenset(
    {Kind.STATUS, Kind.DELIVERED, Kind.SESSION_MEMORY, Kind.ANNOUNCE, Kind.USE, Kind.CONTROLS, Kind.TEXT}
)  # fmt: skip
"""The frames of an answer to QUERY; STATUS, one for each GPU, are the last ones."""


@dataclass(frozen=True)
class GpuStatus:
    """The share on one GPU. Amounts are in bytes."""

    uuid: str
    memory_bytes: int
    """Device memory that the session has allocated."""
    resident_bytes: int
    """The part of it that is on the GPU; the rest is in host memory."""
    limit_bytes: int
    """The GPU's total memory as CUDA reports it."""
    lease: str
    """none, waiting or held."""
    sessions: int
    """Sessions on this GPU, including this one."""
    sessions_with_work: int
    utilisation: float | None = None
    """Part of the GPU's time that the session had in the last second, from 0 to 1; None if the agent does not send
    it."""


@dataclass(frozen=True)
class DeliveredStatus:
    """GPU time that the session was entitled to while others competed for its GPUs, and that it received."""

    entitled_seconds: float
    """GPU seconds that its guaranteed share entitled it to."""
    delivered_seconds: float
    waits: int
    """How often its GPU work waited for a lease."""
    wait_p50_seconds: float
    wait_p95_seconds: float


@dataclass(frozen=True)
class ProcessMemory:
    """The memory that one of the session's processes has allocated on a GPU."""

    pid: int
    gpu: str
    memory_bytes: int
    name: str = ""
    """The user's name for the process; empty: not read."""
    utilisation: float | None = None
    """Part of the GPU's time that it had in the last second, from 0 to 1; None: the agent does not send it."""


@dataclass(frozen=True)
class LimitHit:
    """The last refused allocation."""

    limit: MemoryLimitName
    seconds_ago: float
    requested_bytes: int
    allocated_bytes: int
    """Bytes that the session had allocated on that GPU at that time."""
    pid: int
    count: int
    """Refused allocations since the session was opened, including this one."""


@dataclass(frozen=True)
class PendingAction:
    """An idle action of which the user has a notice."""

    tier: Tier
    at: float
    """Seconds since the epoch (UTC)."""
    effective_units: int
    cause: IdleCause = IdleCause.IDLE
    after_seconds: float = 0.0
    """The idle time, or the server's age, at which the action comes; 0: the agent did not send it."""


@dataclass(frozen=True)
class AdminMessage:
    """An admin's message to the session's user."""

    text: str
    at: float
    """Seconds since the epoch (UTC)."""


@dataclass(frozen=True)
class ControlsStatus:
    """The decisions of users and admins about the session. Instants are seconds since the epoch (UTC)."""

    keep_until: float | None = None
    """The end of the user's keep; None if the share is not kept."""
    exempt: bool = False
    """Whether an admin has exempted the session from idle actions."""
    exempt_until: float | None = None
    """None: without end, if it is exempt."""
    largest_share_units: int = 0
    """The largest share that the session can be changed to; 0: it cannot be changed."""
    messages: tuple[AdminMessage, ...] = ()
    """The present messages, the earliest first."""


@dataclass(frozen=True)
class ShareStatus:
    """A notebook server's share. Units are 1 % of a GPU, the same on each of its GPUs."""

    shared: bool = True
    """Whether the server has a share of a GPU."""
    layer: str = ""
    """The name of the sharing layer that gives the GPU (`model.layers.LayerName`); empty: our own layer."""
    layer_trouble: str = ""
    """Problems of the layer for this session, in sentences; empty: there are none."""
    problem: str = ""
    """Why the share is unknown; empty: it is known."""
    at: float = 0.0
    """The instant of the agent's answer, in seconds since the epoch (UTC); 0: it did not answer."""
    share_units: int = 0
    tier: Tier = Tier.ACTIVE
    effective_units: int = 0
    """Units that the tier leaves the session."""
    borrowed_units: int = 0
    """Units that idle sessions lend; their owners reclaim them with their next GPU work."""
    guaranteed_units: int = 0
    """Units of the session now while all other sessions work."""
    idle_seconds: float | None = None
    """Time since the last GPU work, 0 during GPU work; None if there is no GPU work yet."""
    gpus: tuple[GpuStatus, ...] = field(default=())
    """Empty if no agent measures the session."""
    layer_gpus: int = 0
    """The number of GPUs of another sharing layer; 0: our own layer, see `gpus`."""
    notice: PendingAction | None = None
    lacks_requests: bool = False
    """Whether the node has not yet granted again the CPU and memory that the server gave back while it was released."""
    yields: bool = False
    """Whether the units that the tier took are kept for spawns in quota. GPU work does not restore them yet."""
    suspended: bool = False
    """Whether all its processes are suspended, because other sessions need the GPU's memory; GPU work resumes them."""
    not_suspendable: str = ""
    """Why a session of engine `suspend` cannot be suspended, in a sentence; empty: it can, or has another engine."""
    processes: tuple[ProcessMemory, ...] = ()
    """The processes with the most memory, if the agent sends them."""
    limit_hit: LimitHit | None = None
    """None if no allocation was refused, or the agent does not send it."""
    delivered: DeliveredStatus | None = None
    """None if the agent does not send it."""
    controls: ControlsStatus | None = None
    """None if the agent does not send it."""
    takes_asks: bool = False
    """Whether the agent forwards asks to the service, like a keep or a release."""

    @property
    def measured(self) -> bool:
        """Whether an agent measures the session's GPU work and memory."""
        return bool(self.gpus)

    @property
    def works_now(self) -> bool:
        """Whether GPU work runs, or waits."""
        return self.idle_seconds is not None and self.idle_seconds < 1

    @property
    def gpu_count(self) -> int:
        """The number of GPUs."""
        return self.layer_gpus or len(self.gpus)

    @property
    def known(self) -> bool:
        """Whether the agent has answered."""
        return self.shared and not self.problem

    @property
    def borrowed_now(self) -> int:
        """The part of `borrowed_units` that the session has now."""
        return borrowed_in_use(self.share_units, self.borrowed_units, self.guaranteed_units)

    @property
    def guaranteed_now(self) -> int:
        """The part of `guaranteed_units` that no other session can reclaim."""
        return self.guaranteed_units - self.borrowed_now

    @property
    def memory_bytes(self) -> int:
        """Device memory that is allocated on all its GPUs."""
        return sum(gpu.memory_bytes for gpu in self.gpus)

    @property
    def resident_bytes(self) -> int:
        """The part of the allocated memory that is on the GPUs."""
        return sum(gpu.resident_bytes for gpu in self.gpus)

    @property
    def limit_bytes(self) -> int:
        """The total memory as CUDA reports it, summed over its GPUs."""
        return sum(gpu.limit_bytes for gpu in self.gpus)

    @property
    def lease(self) -> str:
        """The lease: held if the session holds the lease of any GPU, else waiting if it waits for one, else none."""
        leases = {gpu.lease for gpu in self.gpus}
        return next((state for state in ("held", "waiting") if state in leases), "none")

    @property
    def neighbours(self) -> int:
        """The number of other sessions on its GPU; of several GPUs, the largest number."""
        return max((gpu.sessions - 1 for gpu in self.gpus), default=0)

    @classmethod
    def without_share(cls) -> Self:
        """Return the status of a server without a GPU share."""
        return cls(shared=False)

    @classmethod
    def unknown(cls, problem: str) -> Self:
        """Return the status of a server without an available agent."""
        return cls(problem=problem)

    @classmethod
    def of(cls, frames: Sequence[Frame]) -> Self:
        """Return the status from the agent's answer to QUERY: one STATUS for each GPU, and frames of other kinds.

        Raises ValueError for other frames.
        """
        by_gpu = [frame for frame in frames if frame.kind is Kind.STATUS]
        sums = [frame for frame in frames if frame.kind is Kind.DELIVERED]
        memory = [frame for frame in frames if frame.kind is Kind.SESSION_MEMORY]
        notices = [frame for frame in frames if frame.kind is Kind.ANNOUNCE]
        use = _use([frame for frame in frames if frame.kind is Kind.USE])
        if not by_gpu or any(frame.kind not in ANSWER for frame in frames):
            raise ValueError("an answer to QUERY has one STATUS for each GPU")
        first = by_gpu[0]
        share, tier, effective, borrowed, guaranteed = first.fields[:5]
        at = first.fields[11]
        action = None
        if at:
            action = PendingAction(Tier.from_depth(first.flags & 0xFF), at / NANOSECONDS, first.flags >> 8 & 0xFF)
            if notices:
                cause, after = notices[-1].fields[3:5]
                action = replace(action, cause=IdleCause.from_code(cause), after_seconds=after / NANOSECONDS)
        quiet = min(frame.fields[9] for frame in by_gpu)
        texts = {text.topic: text for text in _texts(frames)}
        no_text = ReceivedText(0, 0, False, "")
        layer = texts.get(TextTopic.LAYER, no_text)
        controls = _controls(frames)
        return cls(
            share_units=share,
            tier=Tier.from_depth(tier),
            effective_units=effective,
            borrowed_units=borrowed,
            guaranteed_units=guaranteed,
            idle_seconds=None if quiet == NEVER else quiet / NANOSECONDS,
            gpus=_own_gpus([_gpu(frame, use) for frame in by_gpu if frame.gpu != NO_GPU], layer.number),
            notice=action,
            lacks_requests=bool(first.flags & LACKS_REQUESTS),
            yields=bool(first.flags & YIELDS),
            suspended=bool(first.flags & SUSPENDED),
            not_suspendable=texts.get(TextTopic.NOT_SUSPENDABLE, no_text).text,
            layer=layer.text,
            layer_gpus=layer.number,
            layer_trouble=texts.get(TextTopic.LAYER_TROUBLE, no_text).text,
            delivered=_delivered(sums[-1]) if sums else None,
            controls=controls,
            takes_asks=controls is not None,
            processes=tuple(_process(frame, use) for frame in memory if frame.fields[0] == SessionMemoryTopic.PROCESS),
            limit_hit=next(
                (_limit_hit(frame) for frame in memory if frame.fields[0] == SessionMemoryTopic.LIMIT_HIT), None
            ),
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain data for JSON, with the totals over the GPUs."""
        totals = (
            "known",
            "measured",
            "gpu_count",
            "memory_bytes",
            "resident_bytes",
            "limit_bytes",
            "lease",
            "neighbours",
        )
        return {**asdict(self), **{name: getattr(self, name) for name in totals}}


def _own_gpus(gpus: Sequence[GpuStatus], layer_gpus: int) -> tuple[GpuStatus, ...]:
    """Return the session's own GPUs. ``layer_gpus``: see `ShareStatus`.

    An agent sends all GPUs of its node if it does not know which of them another layer gave. The GPUs with the
    session's memory are its own.
    """
    if not 0 < layer_gpus < len(gpus):
        return tuple(gpus)
    largest = sorted(gpus, key=lambda gpu: -gpu.memory_bytes)[:layer_gpus]
    return tuple(gpu for gpu in gpus if gpu in largest)


def _texts(frames: Sequence[Frame]) -> list[ReceivedText]:
    reader = TextReader()
    return [text for frame in frames if frame.kind is Kind.TEXT and (text := reader.take(frame)) is not None]


def _controls(frames: Sequence[Frame]) -> ControlsStatus | None:
    """Return the content of the last CONTROLS frame and of the admins' messages."""
    states = [frame for frame in frames if frame.kind is Kind.CONTROLS]
    if not states:
        return None
    keep_until, exempt_until, largest_share = states[-1].fields[:3]
    messages = [text for text in _texts(frames) if text.topic == TextTopic.MESSAGE]
    return ControlsStatus(
        keep_until=keep_until / MILLISECONDS if keep_until else None,
        exempt=exempt_until != 0,
        exempt_until=exempt_until / MILLISECONDS if exempt_until not in (0, NO_END) else None,
        largest_share_units=largest_share,
        messages=tuple(AdminMessage(message.text, message.number / MILLISECONDS) for message in messages),
    )


def _delivered(frame: Frame) -> DeliveredStatus:
    entitled, delivered, waits, half, most = frame.fields[:5]
    return DeliveredStatus(
        entitled_seconds=entitled / NANOSECONDS,
        delivered_seconds=delivered / NANOSECONDS,
        waits=waits,
        wait_p50_seconds=half / NANOSECONDS,
        wait_p95_seconds=most / NANOSECONDS,
    )


def _limit_hit(frame: Frame) -> LimitHit | None:
    limit, ago, requested, pid, number, allocated = frame.fields[1:7]
    try:
        name = MemoryLimit(limit).label
    except ValueError:
        return None  # a limit of a newer agent
    return LimitHit(name, ago / NANOSECONDS, requested, allocated, pid, number)


def _use(frames: Sequence[Frame]) -> dict[tuple[bytes, int], float]:
    """Return the used part of each GPU's time by GPU and pid; pid 0: the whole session."""
    return {
        (frame.gpu, frame.fields[0]): min(1.0, frame.fields[1] / frame.fields[2]) for frame in frames if frame.fields[2]
    }


def _process(frame: Frame, use: Mapping[tuple[bytes, int], float]) -> ProcessMemory:
    pid, amount = frame.fields[1:3]
    # a process without a frame of its own had no GPU time
    utilisation = use.get((frame.gpu, pid), 0.0) if (frame.gpu, 0) in use else None
    return ProcessMemory(pid, gpu_name(frame.gpu), amount, utilisation=utilisation)


def _gpu(frame: Frame, use: Mapping[tuple[bytes, int], float]) -> GpuStatus:
    memory, resident, limit, lease = frame.fields[5:9]
    return GpuStatus(
        uuid=gpu_name(frame.gpu),
        memory_bytes=memory,
        resident_bytes=resident,
        limit_bytes=limit,
        lease=LeaseState(lease).name.lower(),
        sessions=frame.fields[10] & 0xFFFFFFFF,
        sessions_with_work=frame.fields[10] >> 32,
        utilisation=use.get((frame.gpu, 0)),
    )
