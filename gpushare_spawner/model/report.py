"""An agent's report about its node: GPUs, sessions, host memory, cordons. Pure data.

The control socket and Kubernetes use the same versioned JSON schema. The module also has the sums of GPU time that a
session was entitled to and received while others competed (counted by the arbiter, and preserved by the agent over
restarts), and the record of refused memory allocations. `model.share_status` has the status for a notebook server.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import islice, zip_longest
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, Field, model_validator

from gpushare_spawner.model.controls import MOST_KEEPS, Ask, Controls, Cordon, Exemption, Keep, Message, MessageCause
from gpushare_spawner.model.layers import LayerName, MemoryEngine
from gpushare_spawner.model.layers_file import MigInstance, gpu_label
from gpushare_spawner.model.part import MessagePart
from gpushare_spawner.model.quantity import LATEST, Instant
from gpushare_spawner.model.share import (
    MAX_LENGTH,
    NO_NEIGHBOUR_RULES,
    UNITS_PER_GPU,
    IdleCause,
    MemoryLimitName,
    NeighbourRules,
    Share,
    Tier,
    UseRule,
    borrowed_in_use,
    stated_on,
    units_on,
    units_on_all,
)

FIRST_BOUND = 0.001
"""Seconds. Shorter waits count as this long, because a lease costs about a millisecond anyway."""
STEP = 1.5
"""Ratio of two adjacent bounds. A quantile is at most 50 % above the true value, and never below it."""
BOUNDS = tuple(FIRST_BOUND * STEP**place for place in range(40))
"""Upper bounds of the counted ranges in seconds: 1 ms to two hours. Longer waits count in the last range."""


class WaitCounts:
    """Counters of waits for a lease by length, in a fixed amount of memory."""

    def __init__(self) -> None:
        self._counts = [0] * len(BOUNDS)

    def add(self, seconds: float) -> None:
        """Count one wait. A request that was granted immediately (0 s) is not counted."""
        if seconds > 0 and not math.isnan(seconds):
            self._counts[min(bisect_left(BOUNDS, seconds), len(BOUNDS) - 1)] += 1

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of waits in each range of `BOUNDS`, without the empty ranges at the end."""
        last = next((place for place in range(len(BOUNDS) - 1, -1, -1) if self._counts[place]), -1)
        return tuple(self._counts[: last + 1])


@dataclass(frozen=True)
class Delivered:
    """Sums over the time in which other sessions competed for the session's GPUs, added over all of its GPUs."""

    entitled_seconds: float = 0.0
    """GPU seconds that its guaranteed units entitled it to."""
    delivered_seconds: float = 0.0
    """GPU seconds that it received in that time."""
    waits: tuple[int, ...] = ()
    """Number of waits for a lease in each range of `BOUNDS`."""
    gpus: Mapping[str, Delivered] = field(default_factory=dict)
    """The sums on each GPU by UUID, if the session has several."""

    def plus(self, other: Delivered, sign: int = 1) -> Delivered:
        """Return the sums of both."""
        waits = zip_longest(self.waits, other.waits, fillvalue=0)
        return Delivered(
            max(0.0, self.entitled_seconds + sign * other.entitled_seconds),
            max(0.0, self.delivered_seconds + sign * other.delivered_seconds),
            tuple(max(0, ours + sign * theirs) for ours, theirs in islice(waits, len(BOUNDS))),
            {
                gpu: self.gpus.get(gpu, NOTHING).plus(other.gpus.get(gpu, NOTHING), sign)
                for gpu in {**self.gpus, **other.gpus}
            },
        )

    def minus(self, other: Delivered) -> Delivered:
        """Return the differences from `other`, an earlier value. No difference is below 0."""
        return self.plus(other, sign=-1)

    @property
    def wait_count(self) -> int:
        """The number of waits."""
        return sum(self.waits)

    def wait_quantile(self, part: float) -> float:
        """Return the wait in seconds that `part` (0 to 1) of all waits did not exceed; 0 if there was no wait.

        The value is the upper bound of a range, so it can exceed the true value by up to 50 % (see `STEP`).
        """
        threshold, seen = part * self.wait_count, 0
        for bound, count in zip(BOUNDS, self.waits, strict=False):
            seen += count
            if count and seen >= threshold:
                return bound
        return 0.0


NOTHING = Delivered()
"""The sums before any competition."""


class MemoryLimitHit(MessagePart):
    """One refused allocation."""

    limit: MemoryLimitName
    at: Annotated[float, Field(ge=0)]
    """Seconds since the epoch (UTC)."""
    requested_bytes: Annotated[int, Field(ge=0)]
    allocated_bytes: Annotated[int, Field(ge=0)] = 0
    """Bytes that the session's processes had allocated on the GPU at that time."""
    pid: int = 0
    """The pid of the requesting process in its own namespace."""


class MemoryLimitHits(MessagePart):
    """The number of a session's refused allocations since it was opened, and the last one."""

    count: Annotated[int, Field(ge=0)] = 0
    last: MemoryLimitHit | None = None

    def with_hit(self, hit: MemoryLimitHit) -> MemoryLimitHits:
        """Return the hits including another one."""
        return MemoryLimitHits(count=self.count + 1, last=hit)


NO_HITS = MemoryLimitHits()


REPORT_VERSION: Literal[1] = 1

Units = Annotated[int, Field(ge=0, le=UNITS_PER_GPU)]
"""Share units of 1 % of a GPU."""
_LARGEST = 2**63 - 1
"""The largest integer of a database column. An agent never reports a larger number, whatever its sessions state."""
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
Amount = Count
"""Bytes, or millicores."""
Seconds = Annotated[float, Field(ge=0, le=LATEST, allow_inf_nan=False)]
Energy = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
"""Joules."""
_MAX_NAME = 253
"""Maximum characters of a GPU's or node's name, equal to that of a Kubernetes object."""
MOST_OVERCOMMIT = 10
"""Maximum overcommit: guaranteed units as a multiple of a GPU's units."""


class Burst(NamedTuple):
    """GPU work of a session on one GPU. Pauses of less than a second are part of it. Durations are in seconds."""

    ended_at: Instant
    """When the GPU was quiet, by the agent's clock. Increases from burst to burst."""
    seconds: Seconds
    """From the first launch until `ended_at`."""
    gpu_seconds: Seconds
    """GPU time that the work takes alone on the GPU, estimated."""
    gap_seconds: Seconds
    """Time in which the session itself left the GPU idle."""
    contended_seconds: Seconds
    """Time in which other sessions also had work."""
    memory_bytes: Amount
    """Device memory that the session had allocated at the end."""

    @property
    def began_at(self) -> float:
        """The first launch."""
        return self.ended_at - self.seconds

    @property
    def alone_seconds(self) -> float:
        """The length that it would have had without other sessions."""
        return self.gpu_seconds + self.gap_seconds

    @property
    def waited_seconds(self) -> float:
        """The time that other sessions added: waits for the lease and for memory, and GPU time that others had."""
        return max(0.0, self.seconds - self.alone_seconds)


MOST_BURSTS = 16
"""Maximum number of a session's bursts in a report. Bursts are at least a second apart, and an agent in a cluster
publishes its report every 15 s while sessions work."""


class GpuReport(MessagePart):
    """One physical GPU, or a MIG instance."""

    index: Annotated[int, Field(ge=0, le=1023)]
    uuid: Annotated[str, Field(min_length=1, max_length=_MAX_NAME)]
    model: Annotated[str, Field(max_length=_MAX_NAME)]
    memory_bytes: Amount
    memory_used_bytes: Amount = 0
    utilisation: Annotated[float, Field(ge=0, le=1)] | None = None
    """Fraction of the driver's last sample period in which the GPU computed; None if the driver does not report it."""
    temperature_celsius: Annotated[float, Field(ge=-273.15, le=1e6)] | None = None
    """None if the driver does not report it."""
    power_watts: Annotated[float, Field(ge=0, le=1e9)] | None = None
    """Power draw; None if the driver does not report it."""
    healthy: bool = True
    cordoned: bool = False
    """Whether a cordon of the GPU or its node excludes new sessions."""
    simulated: bool = False
    capacity_units: Annotated[int, Field(ge=0, le=MOST_OVERCOMMIT * UNITS_PER_GPU)] = UNITS_PER_GPU
    """Maximum units that can be guaranteed: 100, or more if the admin overcommits."""
    waiting: Count = 0
    """Number of sessions that wait for a lease on this GPU."""
    mig: MigInstance | None = None
    """The MIG instance, for one session: `index` is that of the GPU; `uuid`, `memory_bytes` and `capacity_units` are
    those of the instance. None: a whole GPU."""
    reported_since: Annotated[Seconds, Field(exclude=True)] = 0.0
    """When a reader of several nodes' reports first saw the GPU on this node (`time.monotonic`). The reader sets it; it
    is never part of a report, see `with_reported_since`."""

    @property
    def whole(self) -> str:
        """The UUID of the physical GPU."""
        return self.mig.gpu if self.mig is not None else self.uuid

    @property
    def label(self) -> str:
        """The GPU's name in texts, see `layers_file.gpu_label`."""
        return gpu_label(self.index, self.mig)


class Notice(MessagePart):
    """A notice to a session's user of an idle action."""

    tier: Tier
    at: Instant
    reason: str
    effective_units: Units = 0
    """The session's units after the action."""
    cause: IdleCause | None = None
    """None: the notice is from an older agent or service, which sends no cause."""
    after_seconds: Seconds = 0.0
    """The idle time, or the server's age, at which the action is due; 0: not given."""
    use: UseRule | None = None
    """The GPU work that withdraws the notice, if work prevents the action. None: any work."""

    @property
    def averted_by_work(self) -> bool:
        """Whether GPU work prevents the action."""
        return self.cause is None or self.cause.averted_by_work


class GpuTimeReport(MessagePart):
    """GPU time that a session was entitled to and received while others competed."""

    entitled_seconds: Seconds = 0.0
    """GPU seconds that its guaranteed units entitled it to during the competition."""
    delivered_seconds: Seconds = 0.0
    """GPU seconds that it received in that time."""


class DeliveredReport(GpuTimeReport):
    """GPU time and waits of a session on all its GPUs, while others competed for them."""

    waits: Count = 0
    """Number of times that its GPU work waited for a lease."""
    wait_p50_seconds: Seconds = 0.0
    """Median wait, which can be up to 50 % too high."""
    wait_p95_seconds: Seconds = 0.0
    gpus: tuple[GpuTimeReport, ...] = ()
    """The time on each of several GPUs, in the order of the session's `gpus`. Empty: one GPU, or an agent that does not
    send it."""

    @classmethod
    def of(cls, delivered: Delivered, gpus: Sequence[str] = ()) -> DeliveredReport:
        """Return the report of these sums. ``gpus``: UUIDs of the session's GPUs."""
        each = [delivered.gpus.get(gpu, NOTHING) for gpu in gpus] if len(gpus) > 1 else []
        return cls(
            entitled_seconds=delivered.entitled_seconds,
            delivered_seconds=delivered.delivered_seconds,
            waits=delivered.wait_count,
            wait_p50_seconds=delivered.wait_quantile(0.5),
            wait_p95_seconds=delivered.wait_quantile(0.95),
            gpus=tuple(
                GpuTimeReport(entitled_seconds=on.entitled_seconds, delivered_seconds=on.delivered_seconds)
                for on in each
            ),
        )


class HostMemoryReport(MessagePart):
    """A node's host memory for paged-out GPU memory."""

    budget_bytes: Amount
    """Host memory that paged-out memory may use now."""
    needed_bytes: Amount
    """Host memory that is needed if every session uses all its allocated memory, and at least its guarantee. It exceeds
    the budget if the guarantees do, because a guarantee is always granted, or if the machine has become short of
    memory."""
    paged_out_bytes: Amount = 0
    """Host memory that paged-out memory uses now."""


class HostUseReport(MessagePart):
    """The CPU and memory use of a session's pod, rounded up."""

    cpu_millicores: Amount
    memory_bytes: Amount


MOST_EXCEEDING = 64
"""Maximum number of processes of a session that are named at the same time."""


class BypassingProcess(MessagePart):
    """A process that uses a GPU without the library, distinct from later processes with the same pid."""

    pid: Annotated[int, Field(ge=1, le=2**31 - 1)]
    started: Amount
    """Clock ticks since the machine's boot."""


class SessionReport(MessagePart):
    """One notebook server that holds a share."""

    id: Annotated[str, Field(min_length=1, max_length=MAX_LENGTH)]
    user: Annotated[str, Field(max_length=MAX_LENGTH)]
    server: Annotated[str, Field(max_length=MAX_LENGTH)] = ""
    template: str
    quota: str = ""
    """The account that the share is charged to, see `quota.Account`; empty: there were no quotas when it was opened."""
    gpus: tuple[str, ...]
    """UUIDs of the GPUs of the share."""
    layer: LayerName = LayerName.NATIVE
    """The sharing layer that provides the GPU. For another layer, only the number of `gpus` is meaningful."""
    neighbours: NeighbourRules = NO_NEIGHBOUR_RULES
    """The labels of its template, and the rules for other sessions on its GPUs."""
    layer_trouble: str | None = None
    """The layer's problems with this session, in sentences; None if there are none."""
    gpu_use_known: bool = True
    """Whether its GPU work is measured. False: another layer provides the GPU, and no agent observes the session."""
    share_units: Units
    """Units that the session is entitled to, on each of its GPUs."""
    last_units: Units = 0
    """Units of the share on the last of its GPUs if these are fewer; 0: as many. There the session has at most so many
    of its units of any kind, see `share.units_on`."""
    borrowed_units: Units = 0
    """The part of `share_units` that idle sessions lent when the session was placed."""
    borrowed_each: tuple[Units, ...] = ()
    """The borrowed units on each GPU, if `borrowed_units` does not say them, see `share.borrowed_as`."""
    tier: Tier = Tier.ACTIVE
    tier_since: Instant
    effective_units: Units
    """Units that the tier leaves the session.

    `share_units` when active, the template's smaller share when downgraded, 0 when released.
    """
    guaranteed_units: Units
    """The session's current units while all others work: `effective_units` minus reclaimed borrowed units. Of several
    GPUs, those on the GPU with the fewest of those with reclaimed units."""
    guaranteed_each: tuple[Units, ...] = ()
    """These units on each GPU, if `guaranteed_units` does not say them."""
    time_limit_units: Units = UNITS_PER_GPU
    """Maximum part of each GPU's time that the session gets, even when it is alone on the GPU."""
    yields: bool = False
    """Whether the units that the tier took are reserved for spawns in quota. GPU work does not restore them yet."""
    background: bool = False
    """Whether it works only in GPU time and memory that no other session uses, because its budget is used up."""
    opened_at: Instant
    """The opening, by the machine's clock at that time. Together with the id, it identifies the session."""
    opened_by_node: Annotated[bool, Field(exclude=True)] = True
    """Whether `opened_at` is from the node's clock. False: it is the pod's creation time from the API server."""
    clock_moved: Annotated[float, Field(ge=-LATEST, le=LATEST, allow_inf_nan=False)] = 0.0
    """Seconds by which the machine's clock was set since the opening. All other past instants already include it."""
    reader_moved: Annotated[float, Field(ge=-LATEST, le=LATEST, allow_inf_nan=False, exclude=True)] = 0.0
    """Seconds by which the reader's clock was set since the pod's creation."""
    confirmed: bool = True
    """False between the opening of the session and the start of its process."""
    pid: int | None = None
    """The pid of the notebook server on the agent's machine; None: unknown."""

    memory_bytes: Amount = 0
    """Device memory that the session has allocated (its working set), managed and plain."""
    resident_bytes: Amount = 0
    """The agent's estimate of the part of `memory_bytes` that is on the GPU; the rest is in host memory."""
    memory_limit_bytes: Amount = 0
    """The GPU's total memory as CUDA reports it to the session."""
    engine: MemoryEngine = MemoryEngine.MANAGED
    """The engine that moves its memory off the GPU."""
    suspended: bool = False
    """Whether all its memory and CUDA contexts are in host memory. GPU work then waits until the session is resumed."""
    not_suspendable: str | None = None
    """Why the session cannot be suspended now or, if it is suspended, cannot be resumed, as a sentence; None if it can,
    or if its engine does not suspend."""
    context_bytes: Amount = 0
    """GPU memory of its processes' CUDA contexts, in addition to `memory_bytes`, as reported by the driver."""
    host_memory_needed_bytes: Amount = 0
    """Host memory that is needed if all its movable memory leaves the GPUs."""
    host_memory_budget_bytes: Amount | None = None
    """Host memory that the server's memory limit leaves for paged-out memory; None if there is no limit."""
    gpu_busy: bool = False
    """Whether a burst is running or waiting now."""
    waiting: bool = False
    """Whether the session has GPU work and waits for a lease."""
    last_gpu_activity: Instant | None = None
    """End of the last burst; None if there has been none since the session was opened."""
    gpu_seconds: Seconds = 0.0
    """Seconds with a burst on the GPU since the session was opened."""
    bursts: Annotated[tuple[Burst, ...], Field(max_length=MOST_BURSTS)] = ()
    """Its last bursts, earliest first, if it has a part of one GPU that the arbiter shares, and movable memory."""
    energy_joules: Energy = 0.0
    """Energy of its GPUs since it was opened: their power by the GPU time that it received, and their power without
    work by its units."""
    early_page_ins_used: Count = 0
    """Page-ins and resumptions before an expected launch that came, since the session was added to the arbiters."""
    early_page_ins_unused: Count = 0
    """The same for launches that did not come."""
    kernels: Count | None = None
    """Number of running notebook kernels; None if the notebook server has not reported it."""
    kernels_busy: Count | None = None
    last_kernel_activity: Instant | None = None
    processes: Count = 0
    """Number of CUDA processes connected to the agent."""
    bypassing_pids: tuple[int, ...] = ()
    """Processes of the session that use the GPU without the library, because they unset LD_PRELOAD."""
    exceeding: Annotated[tuple[BypassingProcess, ...], Field(max_length=MOST_EXCEEDING)] = ()
    """Those of them, largest first, without which the session would be within its memory limit; empty: it is within its
    limit, or they cannot be attributed to it with certainty."""
    notice: Notice | None = None
    delivered: DeliveredReport = DeliveredReport()
    memory_limit_hits: MemoryLimitHits = NO_HITS
    """Allocations of device memory that a limit refused."""
    host_use: HostUseReport | None = None
    """Use of a released session's pod; None: not released, or unknown."""
    lacks_requests: bool = False
    """Whether the node has not yet granted back the CPU and memory that the pod returned while it was released."""
    keep: Keep | None = None
    """The last keep, possibly expired."""
    keeps: tuple[Instant, ...] = ()
    """The start times of the keeps of the last 24 hours, earliest first."""
    exemption: Exemption | None = None
    messages: tuple[Message, ...] = ()
    """Admins' messages to the session's user, at most one per cause, earliest first."""
    asks: tuple[Ask, ...] = ()
    """Unanswered asks of the notebook server, oldest first."""

    @property
    def begun(self) -> float:
        """The opening by the current clock, for durations and the order of sessions."""
        return self.opened_at + (self.clock_moved if self.opened_by_node else self.reader_moved)

    @property
    def controls(self) -> Controls:
        """The decisions of users and admins about the session."""
        return Controls(keep=self.keep, keeps=self.keeps[-MOST_KEEPS:], exemption=self.exemption)

    def message_of(self, cause: MessageCause) -> Message | None:
        """Return the user's current message of this cause."""
        return next((message for message in self.messages if message.cause is cause), None)

    @property
    def borrowed_now(self) -> int:
        """The borrowed units that the session still has."""
        return borrowed_in_use(self.share_units, self.borrowed_units, self.guaranteed_units)

    @property
    def over_memory_limit(self) -> bool:
        """Whether its device memory exceeds the limit, because of GPU work without the library or a lowered limit."""
        return 0 < self.memory_limit_bytes < self.memory_bytes

    def on(self, gpu: str) -> SessionReport:
        """Return the session with its units on one of its GPUs; itself if it has the same on each."""
        if len(self.gpus) < 2:
            return self
        units = units_on(gpu, self.gpus, self.share_units, self.last_units)
        effective, owned = min(units, self.effective_units), self.share_units - self.borrowed_units
        borrowed = stated_on(gpu, self.gpus, self.borrowed_each, max(0, units - owned))
        here = {
            "share_units": units,
            "last_units": 0,
            "borrowed_units": min(units, borrowed),
            "borrowed_each": (),
            "effective_units": effective,
            "guaranteed_units": min(effective, stated_on(gpu, self.gpus, self.guaranteed_each, self.guaranteed_units)),
            "guaranteed_each": (),
        }
        changed = {name: value for name, value in here.items() if getattr(self, name) != value}
        return self.model_copy(update=changed) if changed else self

    @property
    def each(self) -> list[SessionReport]:
        """The session with its units on each of its GPUs."""
        return [self.on(gpu) for gpu in self.gpus]

    @property
    def total_units(self) -> int:
        """The units of its share on all GPUs."""
        return units_on_all(self.gpus, self.share_units, self.last_units if len(self.gpus) > 1 else 0)

    @property
    def most_units(self) -> int:
        """Units per GPU that it can use: its share, or what an idle action leaves."""
        return self.share_units if self.yields else self.effective_units

    @property
    def share(self) -> Share:
        """The session's share while it is active."""
        last = self.last_units if len(self.gpus) > 1 and self.last_units < self.share_units else 0
        return Share(self.share_units, max(1, len(self.gpus)), last)


class MountReport(MessagePart):
    """A file or folder of the node for a session's container."""

    host_path: str
    container_path: str
    read_only: bool = True


class ClaimsReport(MessagePart):
    """The settings that the spawner writes into a pod with a share if pods get GPUs through claims.

    A device plugin would pass the same settings to the kubelet.
    """

    folder: Annotated[str, Field(min_length=1)]
    """Path on the node of the folder with a subfolder for each claim, see `kubernetes.claim_folder`."""
    socket: Annotated[str, Field(min_length=1)]
    """Path of the session's socket within the claim's folder."""
    environment: dict[str, str] = {}
    """Variables for all sessions."""
    mounts: tuple[MountReport, ...] = ()
    """Mounts in addition to the claim's folder."""


class EndedSession(MessagePart):
    """The figures of a session at its end, so that a reader can count the time since its last report."""

    id: Annotated[str, Field(min_length=1, max_length=MAX_LENGTH)]
    opened_at: Instant
    """See `SessionReport.opened_at`."""
    clock_moved: Annotated[float, Field(ge=-LATEST, le=LATEST, allow_inf_nan=False)] = 0.0
    ended_at: Instant
    effective_units: Units
    """Those at its end."""
    tier_since: Instant
    gpu_seconds: Seconds = 0.0
    energy_joules: Energy = 0.0
    delivered: DeliveredReport = DeliveredReport()


ENDED_SECONDS = 3600.0
"""Seconds for which an agent reports an ended session. Our choice: a service that is down for longer is noticed."""
MOST_ENDED = 256
"""Maximum number of ended sessions in a report, the latest ones. Our choice: 60 KiB, of the 1 MiB of a ConfigMap."""
MAX_TROUBLE = 1000
"""Maximum characters of an agent's text about its disk."""


class Report(MessagePart):
    """A node: its GPUs and the sessions on them.

    `model_validate_json` raises pydantic.ValidationError, with the field and the reason, for text that is not a report
    of this version.
    """

    version: Literal[1] = REPORT_VERSION
    node: Annotated[str, Field(min_length=1, max_length=_MAX_NAME)]
    published_at: Instant
    gpus: tuple[GpuReport, ...]
    sessions: tuple[SessionReport, ...] = ()
    ended: Annotated[tuple[EndedSession, ...], Field(max_length=MOST_ENDED)] = ()
    """Sessions that ended within the last `ENDED_SECONDS`, oldest first."""
    host_memory: HostMemoryReport | None = None
    """None if the node has no host memory budget."""
    cordons: tuple[Cordon, ...] = ()
    """At most one for each GPU and one for the node."""
    state_trouble: Annotated[str, Field(max_length=MAX_TROUBLE)] | None = None
    """Why records of sessions and tier changes are only in the agent's memory, and lost if it stops; None if they are
    on disk."""
    supports_budgets: bool = False
    """Whether the agent can let sessions work in the background, and shows what is left of budgets."""
    stop_trouble: Annotated[str, Field(max_length=MAX_TROUBLE)] | None = None
    """Why the agent cannot stop processes that bypass the library, as a clause; None: it can."""
    claims: ClaimsReport | None = None
    """Settings of pods that get GPUs through claims (resource.k8s.io); None: extended resources are used, or there are
    no pods."""

    @model_validator(mode="after")
    def _each_gpu_once(self) -> Self:
        uuids = [gpu.uuid for gpu in self.gpus]
        indices = [gpu.index for gpu in self.gpus if gpu.mig is None]
        for key, values in (("UUID", uuids), ("index", indices)):
            twice = next((value for value, number in Counter(values).items() if number > 1), None)
            if twice is not None:
                raise ValueError(f"two GPUs have the {key} {twice}")
        return self

    @property
    def allocated_to(self) -> tuple[SessionReport, ...]:
        """The sessions that hold units of the node's GPUs."""
        return self.sessions

    def cordon(self, gpu: str = "") -> Cordon | None:
        """Return the cordon of a GPU only (UUID) or, for an empty UUID, of the node."""
        return next((cordon for cordon in self.cordons if cordon.gpu == gpu), None)

    def with_cordons(self, cordons: Iterable[Cordon]) -> Self:
        """Return the report with only these cordons."""
        cordons = tuple(cordons)
        if not cordons and not self.cordons:
            return self
        kept_away = {cordon.gpu for cordon in cordons}
        gpus = tuple(
            gpu if gpu.cordoned == (cordoned := not kept_away.isdisjoint(("", gpu.uuid)))
            else gpu.model_copy(update={"cordoned": cordoned})
            for gpu in self.gpus
        )  # fmt: skip
        return self.model_copy(update={"cordons": cordons, "gpus": gpus})

    def session(self, session_id: str) -> SessionReport | None:
        """Return the session with this id, or None if it is not on this node."""
        return next((session for session in self.sessions if session.id == session_id), None)


def with_reported_since(report: Report, before: Report | None, now: float) -> Report:
    """Return a node's report with `GpuReport.reported_since`. ``before``: its last one; ``now``: `time.monotonic`.

    Unchanged GPUs remain the same objects, because new objects every minute would burden the garbage collector.
    """
    last = before.gpus if before is not None else ()
    since = {gpu.uuid: gpu.reported_since for gpu in last}
    gpus = tuple(gpu.model_copy(update={"reported_since": since.get(gpu.uuid, now)}) for gpu in report.gpus)
    return report.model_copy(update={"gpus": last if last == gpus else gpus})


def by_first_report(nodes: Mapping[str, GpuReport]) -> tuple[str, ...]:
    """Return the nodes that report one GPU, ordered by the time of their first report of it, then by name.

    The first node owns the GPU, so a node cannot take another node's GPU by reporting its UUID. ``nodes``: their
    reports of the GPU.
    """
    return tuple(sorted(nodes, key=lambda node: (nodes[node].reported_since, node)))


def doubled_gpus(reports: Iterable[Report]) -> dict[str, tuple[str, ...]]:
    """Return the UUIDs that several nodes report, with these nodes. The first node owns the GPU."""
    nodes: dict[str, dict[str, GpuReport]] = {}
    for report in reports:
        for gpu in report.gpus:
            nodes.setdefault(gpu.uuid, {})[report.node] = gpu
    return {uuid: by_first_report(of_nodes) for uuid, of_nodes in nodes.items() if len(of_nodes) > 1}


def shared_fields(source: object, kind: Any) -> dict[str, Any]:
    """Return the source's attributes that are also fields of a dataclass or pydantic model.

    A session's annotations, open request, record, report and status use the same name for the same fact.
    """
    own: Any = type(source)
    return {name: getattr(source, name) for name in _shared_names(own, kind)}


@cache  # pydantic takes microseconds to say that a model lacks an attribute
def _shared_names(source: Any, kind: Any) -> tuple[str, ...]:
    own = _field_names(source)
    return tuple(name for name in _field_names(kind) if name in own or hasattr(source, name))


def _field_names(kind: Any) -> Collection[str]:
    return kind.model_fields if issubclass(kind, BaseModel) else [field.name for field in fields(kind)]
