"""A notebook server's GPU share at one instant, as the agent sends it. Pure data.

The status as text is in `wording.share_status`. The agent's report of all sessions is in `model.report`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from gpushare_spawner.model.share import UNITS_PER_GPU, IdleCause, MemoryLimitName, Tier, borrowed_in_use

if TYPE_CHECKING:
    # these import pydantic, which a notebook cell does not need
    from gpushare_spawner.model.controls import Controls, Message
    from gpushare_spawner.model.report import Notice

ANNOTATIONS_VARIABLE = "GPUSHARE_ANNOTATIONS"
"""Environment variable with the folder of the pod's annotations, in a server with a GPU of another layer."""
MAX_RECORD_BYTES = 2**18
"""Maximum length of an agent's record. A packet of a Unix socket has at most about 200 KiB."""

TOTALS = ("known", "measured", "gpu_count", "memory_bytes", "resident_bytes", "limit_bytes", "lease", "neighbours")
"""Properties of a status that its JSON also includes."""
Record = TypeVar("Record")


@dataclass(frozen=True)
class GpuStatus:
    """The share on one GPU. Amounts are in bytes."""

    uuid: str
    memory_bytes: int
    """Device memory allocated by the session."""
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
    """Fraction of the GPU's time that the session had in the last second, from 0 to 1; None if the agent does not send
    it."""


@dataclass(frozen=True)
class GpuTimeStatus:
    """GPU time that the session was entitled to and received while others competed."""

    entitled_seconds: float
    """GPU seconds that its guaranteed share entitled it to."""
    delivered_seconds: float


@dataclass(frozen=True)
class DeliveredStatus(GpuTimeStatus):
    """GPU time and waits on all its GPUs, while others competed for them."""

    waits: int
    """Number of times that its GPU work waited for a lease."""
    wait_p50_seconds: float
    wait_p95_seconds: float
    gpus: tuple[GpuTimeStatus, ...] = ()
    """The time on each of several GPUs; empty: one GPU, or the agent does not send it."""


@dataclass(frozen=True)
class ProcessMemory:
    """The memory that one of the session's processes has allocated on a GPU."""

    pid: int
    gpu: str
    memory_bytes: int
    name: str = ""
    """Name of the process for its user; empty: not read."""
    utilisation: float | None = None
    """Fraction of the GPU's time that it had in the last second, from 0 to 1; None: the agent does not send it."""


@dataclass(frozen=True)
class LimitHit:
    """The last refused allocation."""

    limit: MemoryLimitName
    seconds_ago: float
    requested_bytes: int
    allocated_bytes: int
    """Bytes that the session had allocated on the GPU at that time."""
    pid: int
    count: int
    """Refused allocations since the session was opened, including this one."""


@dataclass(frozen=True)
class PendingAction:
    """An idle action for which the user has a notice."""

    tier: Tier
    at: float
    """Seconds since the epoch (UTC)."""
    effective_units: int
    cause: IdleCause = IdleCause.IDLE
    after_seconds: float = 0.0
    """The idle time, or the server's age, at which the action is due; 0: the agent did not send it."""

    @classmethod
    def of(cls, notice: Notice) -> Self:
        """Return the idle action of a notice."""
        cause = notice.cause or IdleCause.IDLE
        return cls(notice.tier, notice.at, notice.effective_units, cause, notice.after_seconds)


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
    """End of the exemption; None: indefinite, if `exempt`."""
    largest_share_units: int = 0
    """The largest share that the session can be changed to; 0: it cannot be changed."""
    messages: tuple[AdminMessage, ...] = ()
    """The current messages, earliest first."""
    budget: str = ""
    """What is left of the session's budgets of GPU-hours; empty: it has none."""

    @classmethod
    def of(cls, controls: Controls, messages: Collection[Message], now: float, largest_share_units: int = 0) -> Self:
        """Return the decisions in force. ``now``: seconds since the epoch."""
        keep, exemption = controls.keep, controls.exemption
        budget = [message.text for message in messages if message.cause == "budget"]
        exempt = exemption is not None and (exemption.until is None or exemption.until > now)
        return cls(
            keep_until=keep.until if keep is not None and keep.until > now else None,
            exempt=exempt,
            exempt_until=exemption.until if exemption is not None and exempt else None,
            largest_share_units=largest_share_units,
            messages=tuple(AdminMessage(message.text, message.at) for message in messages if message.cause != "budget"),
            budget="".join(budget),
        )


@dataclass(frozen=True)
class ShareStatus:
    """A notebook server's share. Units are 1 % of a GPU, the same on each of its GPUs."""

    shared: bool = True
    """Whether the server has a share of a GPU."""
    layer: str = ""
    """The name of the sharing layer that provides the GPU (`model.layers.LayerName`); empty: our own layer."""
    layer_trouble: str = ""
    """The layer's problems with this session, in sentences; empty: none."""
    problem: str = ""
    """Why the share is unknown; empty: it is known."""
    at: float = 0.0
    """Time of the agent's answer, in seconds since the epoch (UTC); 0: it did not answer."""
    share_units: int = 0
    last_units: int = 0
    """Units on the last GPU if these are fewer; 0: as many."""
    tier: Tier = Tier.ACTIVE
    effective_units: int = 0
    """Units that the tier leaves to the session."""
    borrowed_units: int = 0
    """Units that idle sessions lend; their owners reclaim them with their next GPU work."""
    guaranteed_units: int = 0
    """The session's current units while all other sessions work."""
    guaranteed_each: tuple[int, ...] = ()
    """These units on each of several GPUs, if the agent sends them."""
    borrowed_now_each: tuple[int, ...] = ()
    """The borrowed units that the session still has on each of several GPUs, if the agent sends them."""
    time_limit_units: int = UNITS_PER_GPU
    """Maximum part of each GPU's time that the session gets, even when it is alone on the GPU."""
    idle_seconds: float | None = None
    """Time since the last GPU work, 0 during GPU work; None if there has been no GPU work."""
    gpus: tuple[GpuStatus, ...] = field(default=())
    """The share on each GPU; empty if no agent measures the session."""
    layer_gpus: int = 0
    """The number of another sharing layer's GPUs; 0: our own layer, see `gpus`."""
    notice: PendingAction | None = None
    lacks_requests: bool = False
    """Whether the node has not yet granted back the CPU and memory that the server returned while it was released."""
    yields: bool = False
    """Whether the units that the tier took are reserved for spawns in quota. GPU work does not restore them yet."""
    background: bool = False
    """Whether it works only in GPU time and memory that no other session uses, because its budget is used up."""
    suspended: bool = False
    """Whether all its processes are suspended because other sessions need the GPU's memory; GPU work resumes them."""
    not_suspendable: str = ""
    """Why a session with engine `suspend` cannot be suspended, as a sentence; empty: it can, or has another engine."""
    processes: tuple[ProcessMemory, ...] = ()
    """The processes with the largest memory allocations, if the agent sends them."""
    limit_hit: LimitHit | None = None
    """None if no allocation was refused or the agent does not send it."""
    delivered: DeliveredStatus | None = None
    """None if the agent does not send it."""
    controls: ControlsStatus | None = None
    """None if the agent does not send it."""
    takes_asks: bool = False
    """Whether the agent forwards asks, such as a keep or a release, to the service."""

    @property
    def measured(self) -> bool:
        """Whether an agent measures the session's GPU work and memory."""
        return bool(self.gpus)

    @property
    def works_now(self) -> bool:
        """Whether GPU work runs or waits."""
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
        """The borrowed units that the session still has."""
        return borrowed_in_use(self.share_units, self.borrowed_units, self.guaranteed_units)

    @property
    def units_now(self) -> tuple[tuple[int, int], ...]:
        """The guaranteed units on each GPU, and the borrowed ones of them."""
        if self.guaranteed_each and len(self.guaranteed_each) == len(self.borrowed_now_each):
            return tuple(zip(self.guaranteed_each, self.borrowed_now_each, strict=True))
        shares = [self.share_units] * (max(1, self.gpu_count) - 1) + [self.last_units or self.share_units]
        owned, now = self.share_units - self.borrowed_units, self.guaranteed_units
        return tuple(
            (min(units, now), borrowed_in_use(units, max(0, units - owned), min(units, now))) for units in shares
        )

    @property
    def memory_bytes(self) -> int:
        """Device memory allocated on all its GPUs."""
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
        """The number of other sessions on its GPU; the largest number if it has several GPUs."""
        return max((gpu.sessions - 1 for gpu in self.gpus), default=0)

    def as_json(self) -> dict[str, Any]:
        """Return plain data for JSON, including the totals over the GPUs."""
        return {**asdict(self), **{name: getattr(self, name) for name in TOTALS}}


@dataclass(frozen=True)
class CellStatus:
    """One execution of a cell. Amounts are in bytes, and sums over the processes of its kernel."""

    number: int
    """Number of the execution, chosen by the notebook server."""
    pid: int
    """Pid of the kernel; 0: unknown."""
    count: int
    """The kernel's execution count; 0: unknown."""
    at: float
    """Start, in seconds since the epoch (UTC)."""
    seconds: float
    """Duration."""
    running: bool
    gpu_seconds: float
    """GPU time that its kernel's processes received meanwhile."""
    divided_seconds: float = 0.0
    """The part of the GPU time in which other cells of its kernel ran too. It was divided evenly among them."""
    lease_seconds: float = 0.0
    """Time for which its kernel's processes waited for a lease."""
    memory_seconds: float = 0.0
    """Time for which they waited for memory: for a page-in, a resumption, or memory that others had to free."""
    on_gpu_bytes: int = 0
    """Peak of the allocated memory that was not paged out."""
    paged_out_bytes: int = 0
    """Peak of the memory that was paged out."""


@dataclass(frozen=True)
class CellsStatus:
    """Executions of cells in a session. Their GPU time, the earlier and the outside time add up to the session's."""

    cells: tuple[CellStatus, ...] = ()
    """The most recent executions, earliest start first."""
    earlier: int = 0
    """Number of executions that are not listed any more."""
    earlier_seconds: float = 0.0
    """GPU time of these executions."""
    outside_seconds: float = 0.0
    """GPU time without a running cell, or of processes that belong to no kernel."""
    gpu_seconds: float = 0.0
    """GPU time of the session."""


@dataclass(frozen=True)
class ServiceAnswer:
    """The service's answer to an ask of a notebook server."""

    number: int
    """The number of the ask."""
    done: bool
    """Whether the request was carried out."""
    text: str


@dataclass(frozen=True)
class AgentRecord:
    """One JSON packet from the agent to a notebook server. Without any part, it means that the status has changed."""

    status: ShareStatus | None = None
    """Answers QUERY."""
    answer: ServiceAnswer | None = None
    cells: CellsStatus | None = None
    """Answers QUERY with topic CELLS."""

    def packet(self) -> bytes:
        """Return the packet."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, packet: bytes) -> Self:
        """Return the record in a packet. A newer agent's unknown fields are ignored. Raises ValueError."""
        return _record(cls, json.loads(packet))


_types_of: Callable[[type], dict[str, Any]] = cache(get_type_hints)


def _record(kind: type[Record], written: Any) -> Record:
    """Return a record from plain data. Raises ValueError."""
    if not isinstance(written, dict):
        raise ValueError(f"a {kind.__name__} is an object, not {type(written).__name__}")
    types = _types_of(kind)
    try:
        return kind(**{name: _part(name, types[name], value) for name, value in written.items() if name in types})
    except TypeError as error:
        raise ValueError(f"a {kind.__name__} lacks fields: {error}") from error


def _part(name: str, kind: Any, value: Any) -> Any:
    """Return a field's value of type `kind` from plain data. Raises ValueError.

    Returns None for a refusal by a limit that only a newer agent knows.
    """
    if isinstance(kind, UnionType):
        if value is None:
            return None
        kind = get_args(kind)[0]
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{name} is a list, not {type(value).__name__}")
        return tuple(_part(name, get_args(kind)[0], entry) for entry in value)
    if isinstance(kind, type) and is_dataclass(kind):
        part = _record(kind, value)
        return None if isinstance(part, LimitHit) and part.limit not in get_args(MemoryLimitName) else part
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    plain = str if get_origin(kind) is Literal else kind
    # a whole number is also a float, but true and false are no numbers
    if type(value) not in ((int, float) if plain is float else (plain,)):
        raise ValueError(f"{name} is {plain.__name__}, not {type(value).__name__}")
    return value
