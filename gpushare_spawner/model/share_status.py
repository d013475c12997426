"""A notebook server's GPU share at one moment, as the agent reports it. Pure data."""

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
"""Environment of a server in a pod whose GPU another sharing layer gives: the folder with the pod's annotations."""
NANOSECONDS = 1e9
MILLISECONDS = 1e3
NEVER = 2**64 - 1
"""STATUS says this where there was no GPU work yet."""
ANSWER = frozenset(
    {Kind.STATUS, Kind.DELIVERED, Kind.SESSION_MEMORY, Kind.ANNOUNCE, Kind.USE, Kind.CONTROLS, Kind.TEXT}
)  # fmt: skip
"""The frames of an answer to QUERY; STATUS, one for each GPU, are the last ones."""


@dataclass(frozen=True)
class GpuStatus:
    """The share on one GPU. Amounts in bytes."""

    uuid: str
    memory_bytes: int
    """Device memory that the session has allocated."""
    resident_bytes: int
    """The part of it that is on the GPU; the rest is in host memory."""
    limit_bytes: int
    """What CUDA shows as the GPU's total memory."""
    lease: str
    """none, waiting or held."""
    sessions: int
    """Sessions on this GPU, including this one."""
    sessions_with_work: int
    utilisation: float | None = None
    """Part of the GPU's time that the session had in the last second, from 0 to 1; None: the agent does not send it."""


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
    """The user's name for the process; empty: not looked up."""
    utilisation: float | None = None
    """Part of the GPU's time that it had in the last second, from 0 to 1; None: the agent does not send it."""


@dataclass(frozen=True)
class LimitHit:
    """The last allocation that was refused."""

    limit: MemoryLimitName
    seconds_ago: float
    requested_bytes: int
    allocated_bytes: int
    """What the session had allocated on that GPU at that time."""
    pid: int
    count: int
    """Allocations refused since the session was opened, including this one."""


@dataclass(frozen=True)
class PendingAction:
    """An idle action that the user has a notice of."""

    tier: Tier
    at: float
    """Seconds since the epoch (UTC)."""
    effective_units: int
    cause: IdleCause = IdleCause.IDLE
    after_seconds: float = 0.0
    """The idle time, or the server's age, at which the action comes; 0: the agent did not send it."""


@dataclass(frozen=True)
class AdminMessage:
    """What an admin tells the session's user."""

    text: str
    at: float
    """Seconds since the epoch (UTC)."""


@dataclass(frozen=True)
class ControlsStatus:
    """What users and admins have decided about the session. Instants are seconds since the epoch (UTC)."""

    keep_until: float | None = None
    """The user holds the share until then; None: the user does not."""
    exempt: bool = False
    """No idle action comes, by an admin's decision."""
    exempt_until: float | None = None
    """None: without end, where it is exempt."""
    largest_share_units: int = 0
    """The share can be changed to at most this; 0: it cannot be changed."""
    messages: tuple[AdminMessage, ...] = ()
    """Those that stand, the earliest first."""


@dataclass(frozen=True)
class ShareStatus:
    """A notebook server's share. Units are 1 % of a GPU, the same on each of its GPUs."""

    shared: bool = True
    """False where the server has no share of a GPU."""
    layer: str = ""
    """The sharing layer that gives the GPU, by its name (`model.layers.LayerName`); empty: it is ours."""
    layer_trouble: str = ""
    """What is wrong with the layer for this session, in sentences; empty: nothing is known to be."""
    problem: str = ""
    """Why the share is unknown; empty: it is known."""
    at: float = 0.0
    """When the agent answered, in seconds since the epoch (UTC); 0: it did not."""
    share_units: int = 0
    tier: Tier = Tier.ACTIVE
    effective_units: int = 0
    """What the tier leaves of the share."""
    borrowed_units: int = 0
    """Units that idle sessions lend; their owners reclaim them with their next GPU work."""
    guaranteed_units: int = 0
    """What the session gets now while all other sessions work."""
    idle_seconds: float | None = None
    """Time since the last GPU work, 0 during GPU work; None: no GPU work yet."""
    gpus: tuple[GpuStatus, ...] = field(default=())
    """Empty where no agent measures the session."""
    layer_gpus: int = 0
    """How many GPUs another sharing layer gives; 0: the layer is ours, see `gpus`."""
    announced: PendingAction | None = None
    lacks_requests: bool = False
    """The server gave back requested CPU and memory while it was released, and its node has not granted them again."""
    yields: bool = False
    """The units that the tier took are kept for spawns in quota: GPU work does not restore them yet."""
    suspended: bool = False
    """All its processes are suspended, as other sessions need the GPU's memory; GPU work resumes them."""
    not_suspendable: str = ""
    """Why a session of engine `suspend` cannot be suspended, in a sentence; empty: it can, or has another engine."""
    processes: tuple[ProcessMemory, ...] = ()
    """The largest ones, if the agent sends them."""
    limit_hit: LimitHit | None = None
    """None: no allocation was refused, or the agent does not send it."""
    delivered: DeliveredStatus | None = None
    """None: the agent does not send it."""
    controls: ControlsStatus | None = None
    """None: the agent does not send it."""
    takes_asks: bool = False
    """Whether the service can be asked for a keep, a release and so on, through the agent."""

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
        """The number of its GPUs."""
        return self.layer_gpus or len(self.gpus)

    @property
    def known(self) -> bool:
        """Whether the agent has answered."""
        return self.shared and not self.problem

    @property
    def borrowed_now(self) -> int:
        """Those of `borrowed_units` that the session has now."""
        return borrowed_in_use(self.share_units, self.borrowed_units, self.guaranteed_units)

    @property
    def guaranteed_now(self) -> int:
        """Those of `guaranteed_units` that no other session can reclaim."""
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
        """What CUDA shows as total memory, summed over its GPUs."""
        return sum(gpu.limit_bytes for gpu in self.gpus)

    @property
    def lease(self) -> str:
        """held if the session holds the lease of any of its GPUs, else waiting if it waits for one, else none."""
        leases = {gpu.lease for gpu in self.gpus}
        return next((state for state in ("held", "waiting") if state in leases), "none")

    @property
    def neighbours(self) -> int:
        """The number of other sessions on its GPU; with several GPUs, on the one with most."""
        return max((gpu.sessions - 1 for gpu in self.gpus), default=0)

    @classmethod
    def without_share(cls) -> Self:
        """Return the status of a server without a GPU share."""
        return cls(shared=False)

    @classmethod
    def unknown(cls, problem: str) -> Self:
        """Return the status of a server whose agent is unavailable."""
        return cls(problem=problem)

    @classmethod
    def of(cls, frames: Sequence[Frame]) -> Self:
        """Return the status from the agent's answer to QUERY: one STATUS for each GPU, and frames of other kinds.

        Raises ValueError for other frames.
        """
        by_gpu = [frame for frame in frames if frame.kind is Kind.STATUS]
        said = [frame for frame in frames if frame.kind is Kind.DELIVERED]
        memory = [frame for frame in frames if frame.kind is Kind.SESSION_MEMORY]
        announced = [frame for frame in frames if frame.kind is Kind.ANNOUNCE]
        use = _use([frame for frame in frames if frame.kind is Kind.USE])
        if not by_gpu or any(frame.kind not in ANSWER for frame in frames):
            raise ValueError("an answer to QUERY has one STATUS for each GPU")
        first = by_gpu[0]
        share, tier, effective, borrowed, guaranteed = first.fields[:5]
        at = first.fields[11]
        action = None
        if at:
            action = PendingAction(Tier.from_depth(first.flags & 0xFF), at / NANOSECONDS, first.flags >> 8 & 0xFF)
            if announced:
                cause, after = announced[-1].fields[3:5]
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
            announced=action,
            lacks_requests=bool(first.flags & LACKS_REQUESTS),
            yields=bool(first.flags & YIELDS),
            suspended=bool(first.flags & SUSPENDED),
            not_suspendable=texts.get(TextTopic.NOT_SUSPENDABLE, no_text).text,
            layer=layer.text,
            layer_gpus=layer.number,
            layer_trouble=texts.get(TextTopic.LAYER_TROUBLE, no_text).text,
            delivered=_delivered(said[-1]) if said else None,
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

    An agent that does not know which ones another layer gave sends all GPUs of its node. Those with the session's
    memory are its own.
    """
    if not 0 < layer_gpus < len(gpus):
        return tuple(gpus)
    largest = sorted(gpus, key=lambda gpu: -gpu.memory_bytes)[:layer_gpus]
    return tuple(gpu for gpu in gpus if gpu in largest)


def _texts(frames: Sequence[Frame]) -> list[ReceivedText]:
    reader = TextReader()
    return [text for frame in frames if frame.kind is Kind.TEXT and (text := reader.take(frame)) is not None]


def _controls(frames: Sequence[Frame]) -> ControlsStatus | None:
    """Return what the last CONTROLS and the messages of admins say."""
    said = [frame for frame in frames if frame.kind is Kind.CONTROLS]
    if not said:
        return None
    keep_until, exempt_until, largest_share = said[-1].fields[:3]
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
        return None  # a limit that only a newer agent knows
    return LimitHit(name, ago / NANOSECONDS, requested, allocated, pid, number)


def _use(frames: Sequence[Frame]) -> dict[tuple[bytes, int], float]:
    """Return the part of each GPU's time by GPU and pid; pid 0: of the whole session."""
    return {
        (frame.gpu, frame.fields[0]): min(1.0, frame.fields[1] / frame.fields[2]) for frame in frames if frame.fields[2]
    }


def _process(frame: Frame, use: Mapping[tuple[bytes, int], float]) -> ProcessMemory:
    pid, amount = frame.fields[1:3]
    # a process without a frame of its own had nothing
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
