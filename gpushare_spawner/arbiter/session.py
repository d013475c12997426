"""Settings of the arbiter, the state of its sessions and clients, and the decisions: orders that the agent sends.

roster.py changes the state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from statistics import median
from typing import TypeAlias

from gpushare_spawner.model.report import NOTHING, Delivered, WaitCounts


@dataclass(frozen=True)
class ArbiterSettings:
    """Settings that balance latency and overhead in a GPU's arbiter. Benchmarks and tests scale the values.

    Values that are the same everywhere are constants of the modules that use them.
    """

    overhead_bound: float = 0.025
    """Fraction of the GPU's time that forced hand-offs may cost in the long run: e in Q >= s/e. Above 0, below 1."""
    interactive_overhead_bound: float = 0.20
    """The same while an interactive session waits. It has just returned from a pause, or has worked for at most
    `short_burst` since. At least `overhead_bound`, below 1."""
    min_time_slice: float = 0.1
    """Seconds for which an incoming session may use the GPU, after its page-in, before its time slice can end. The end
    costs about a millisecond even without paging; a hundred times that keeps the cost at 1 %."""
    bandwidth_guess: float = 8e9
    """Bytes per second of bulk paging in each direction, until the first measurements.

    Below PCIe gen3 x16's 12e9: if the guess is too low, the first time slices are long; if it is too high, they are
    wasteful.
    """
    bandwidth_memory: float = 0.7
    """Weight of the old estimate in an exponentially weighted moving average."""
    measured_from: int = 16 * 2**20
    """Bytes below which transfers are not counted: they measure latency rather than bandwidth."""
    switch_seconds: float = 0.001
    """Cost of a hand-off without paging: close one gate, drain the device, open the other."""
    hand_off_credit: float = 10.0
    """Seconds of hand-offs that quiet times can save for sessions that return after a pause with a short burst.
    The credit refills at the rate `overhead_bound`, so the long-run bound still holds."""
    pause: float = 1.0
    """Seconds without GPU work after which a session's next burst may spend credit."""
    long_pause: float = 30.0
    """Seconds without GPU work after which a session counts as absent: its debt begins to fade, and its pages leave the
    GPU before others'."""
    returning_pause: float = 10.0
    """Seconds without GPU work after which a session counts as returning even if its bursts are typically long.
    Programs pause for seconds between their phases; users often return within half a minute: 8 % of the pauses if the
    median is two minutes (lognormal, sigma 1)."""
    unnoticed_page_in: float = 0.08
    """Seconds of page-in that a returning user does not notice: each idle session pages out this much before any of
    them pages out everything. 100 ms count as instantaneous (J. Nielsen, Usability Engineering, 1993); 20 ms of this
    are left for other sessions to give way."""
    short_burst: float = 5.0
    """Seconds of work since its last pause for which a session counts as interactive."""
    max_debt: float = 300.0
    """Seconds (with all sessions working) within which a session is served again after any overrun: a kernel cannot be
    interrupted, and a hung holder must not be penalized indefinitely. A 3 s kernel of a session with one unit in a
    hundred is repaid in full."""
    period: float = 0.2
    """Seconds in which each of the sessions that run together gets its part: long enough to keep switches rare, and too
    short for a user to notice."""
    shortest_run: float = 0.01
    """Minimum GPU seconds of a session after it was held back: two hardware time slices."""
    shortest_hold: float = 0.015
    """Minimum seconds for which a session is held back: a stop and a start cost about a millisecond each."""
    revoke_timeout: float = 10.0
    """Seconds after which, at the latest, waiting clients get their leases even if a revoked client has not answered
    (its kernel still runs, or it hangs). Results remain correct: the clients' pages then compete for memory."""
    usual_revoke_timeout: float = 4.0
    """GPU seconds that a session may receive between REVOKE and its answer.

    The time-out is multiplied by the number of running sessions. 3 s kernels end within it.
    """
    shortest_revoke_timeout: float = 1.0
    """The same for a session that has ignored REVOKEs: above 0, at most `usual_revoke_timeout`."""
    page_out_step: int = 256 * 2**20
    """Bytes of one page-out order for a growing holder, to avoid one order per memory allocation."""
    proven_after: float = 1.0
    """Seconds of undisturbed work after which a client's observed memory use counts as its use."""
    memory_poll_interval: float = 0.1
    """Seconds between reads of the memory on the GPU while clients run together only because less of their memory was
    observed there than they allocated. At 20 GB/s on 16 GB they cannot fill the GPU's last eighth faster."""
    crowded: float = 0.875
    """Fraction of the memory for managed pages.

    If clients that work together have more on the GPU, the figures no longer show their use: the driver may be evicting
    pages.
    """
    tolerance: float = 1 / 64
    """Fraction of the GPU's memory by which a client may exceed its proven use without becoming doubtful."""
    doubt_for: float = 60.0
    """Seconds for which a session's new clients are also doubted after one of its clients was: reconnecting must not
    help."""
    context_bytes: int = 0
    """Device memory that each connected process takes in addition to its allocations (its CUDA context: a few hundred
    MiB on a real GPU, none on a simulated GPU)."""
    exclusive: bool = False
    """Whether only one session runs at a time, even if all fit: for benchmarks, and for GPUs with tenants that must not
    run side by side."""


WINDOW = 7
"""Number of spans retained. Odd, so that the median is a span; small, so that a program's new phase is soon learned."""

CLEARLY_LONGER = 4
"""Factor from which a pause is not a typical short pause: the phase, or the cell, is over."""


class RecentSpans:
    """Recent spans of one kind, in seconds."""

    def __init__(self) -> None:
        self._spans: deque[float] = deque(maxlen=WINDOW)

    def learn(self, seconds: float) -> None:
        """Add a span in seconds. Negative spans are clock noise and count as 0."""
        self._spans.append(max(0.0, seconds))

    @property
    def typical(self) -> float | None:
        """Median of the spans, which a single long span does not distort. None if there are no spans yet."""
        return median(self._spans) if self._spans else None

    def patience(self, hand_off_seconds: float) -> float:
        """Return the seconds for which a quiet holder with these pauses keeps the GPU while another client waits.

        Pauses occur between a program's kernels, between its phases or between its user's cells. Only pauses shorter
        than a hand-off are worth waiting for. The holder keeps the GPU until the current pause is clearly longer,
        provided that the saved hand-offs outweigh the wait, given the fraction of short pauses. Returns 0 without short
        pauses. The wait is never longer than the cost of a hand-off, so at most the cost of two hand-offs is lost. (The
        ski-rental argument, refined by the recorded pauses; disk schedulers idle for the same reason: BFQ, Valente &
        Checconi 2010.)
        """
        short = [span for span in self._spans if span < hand_off_seconds]
        if not short:
            return 0.0
        waited = min(hand_off_seconds, CLEARLY_LONGER * median(short))
        saved = hand_off_seconds * len(short) / len(self._spans)
        return waited if waited <= saved else 0.0


ClientId: TypeAlias = Hashable
"""One connected CUDA process on one GPU; several clients may belong to one session."""


class RevokeReason(IntEnum):
    """Reason to revoke a lease, with the wire protocol's numbers."""

    IDLE = 0
    """The holder is quiet and another client waits."""
    TIME_SLICE = 1
    """The holder's time slice is over, or the leases held together no longer fit into the GPU's memory."""
    GUARANTEE = 2
    """Another session is entitled to the GPU now, before the holder's time slice is over."""
    RELEASED = 3
    """The session's share was released."""


@dataclass(frozen=True)
class LeaseGrant:
    """Grant of a lease: the client may run bursts."""

    client: ClientId
    lease: int
    """ID of the lease: never 0, and never reused by one arbiter."""
    time_slice: float
    """Planned duration of the time slice in seconds, for the log; 0: until revoked. The arbiter ends it by `Revoke`."""
    prefetch: int
    """Bytes to page in before the first launch; 0: none."""
    pace: float = 0.0
    """Seconds of work that the client may queue on the GPU; 0: no limit."""


@dataclass(frozen=True)
class Revoke:
    """Order to stop launching, to wait until the device is quiet, and to release the lease."""

    client: ClientId
    lease: int
    page_out: int
    """Bytes to page out, after the release; 0: none."""
    reason: RevokeReason


@dataclass(frozen=True)
class PageOut:
    """Order to page out, for a client without a lease."""

    client: ClientId
    amount: int
    """Bytes."""


@dataclass(frozen=True)
class PageIn:
    """Order to page in before the launch that is expected from a client without a lease.

    For a client of a suspended session: order to resume the session.
    """

    client: ClientId
    amount: int
    """Bytes."""


@dataclass(frozen=True)
class Refuse:
    """Refusal of memory: the client's calls that wait for it return the driver's error.

    The client still waits for a lease.
    """

    client: ClientId


@dataclass(frozen=True)
class Pace:
    """Limit on the work that a holder may queue on the GPU. It helps other sessions and is not a decision."""

    client: ClientId
    lease: int
    seconds: float
    """0: no limit."""


Decision: TypeAlias = LeaseGrant | Revoke | PageOut | PageIn | Refuse


class Presence(Enum):
    """Location of a suspendable session's memory."""

    ON_GPU = auto()
    SUSPENDING = auto()
    """A suspension is ordered. The memory is on the GPU until the suspension."""
    SUSPENDED = auto()
    """The session is suspended: no memory is on the GPU, not even its CUDA contexts."""
    RESUMING = auto()
    """A client has a lease, and the session is being resumed."""


class Pin(Enum):
    """Obstacle that keeps a session from being suspended."""

    NONE = auto()
    BRIEF = auto()
    """The session is busy. The next attempt comes within seconds."""
    LASTING = auto()


class Need(Enum):
    """Whether a session can get the memory that its clients lack."""

    POSSIBLE = auto()
    LATER = auto()
    """Possible after a briefly pinned session is suspended.

    The clients wait, and no memory leaves the GPU for them yet.
    """
    IMPOSSIBLE = auto()
    """The need is not counted: no memory leaves the GPU for it."""


@dataclass(eq=False)
class Client:
    """One connected CUDA process on one GPU. Amounts are in bytes, instants and spans in seconds."""

    id: ClientId
    session: ArbitratedSession
    stated_managed: int = 0
    """Managed memory, as stated by the client."""
    allocated: int = 0
    """Memory that can leave the GPU: managed memory, or all memory of a suspendable session."""
    working_set: int = 0
    """Part of `allocated` that counts as used, at most the GPU's memory."""
    stated: int = 0
    """All stated memory, excluding the needs stated in a lease request."""
    present: int = 0
    """See `ArbitratedSession.present`."""
    stated_plain: int = 0
    """Memory that cannot leave the GPU, as stated by the client."""
    plain: int = 0
    """Part of `stated_plain` and the CUDA context that the driver confirms, plus `unstated`.

    It is always on the GPU.
    """
    unconfirmed: int = 0
    """Part that the driver does not confirm.

    Like a working set, it counts only while the client works or waits, so that a false statement does not prevent
    others from running together.
    """
    short: int = 0
    """Part of the stated memory that is missing and for which calls wait.

    Used only if the session `suspends`.
    """
    short_since: float = 0.0
    """Start of the shortage."""
    turn_since: float | None = None
    """Start of its turn with a shortage; None if it is not its turn, or it lacks no memory."""
    device_memory: int | None = None
    """Driver's figure for its process; None if the driver does not show it."""
    unstated: int = 0
    """Part beyond the process's stated memory. Whether this part can leave the GPU is unknown."""
    touched: int | None = None
    """Largest amount of its managed memory observed on the GPU, plus the amount paged out; None: never read."""
    shown: int = 0
    """Last amount observed on the GPU, without the amount paged out."""
    proven: int | None = None
    """`touched` when it last worked undisturbed: alone, or on a GPU with free memory; None: never."""
    proven_at: float = float("-inf")
    doubted: bool = False
    """Whether the GPU was nearly full while it worked alongside others, so that it may use more than was observed.

    Its whole memory allocation counts until its use is proven.
    """
    grown_at: float = float("-inf")
    """Time of the last managed memory allocation."""
    worked_until: float = float("-inf")
    """End of its last burst."""

    waiting: bool = False
    waiting_since: float = 0.0
    owed_at_request: float = 0.0
    """Seconds that its session owed at the time of its request; at least 0."""
    order: int = 0
    """Sequence number of the request."""

    lease: int = 0
    """0: none."""
    granted_at: float = 0.0
    came_at: float = 0.0
    """Time at which its working set was paged in for the current time slice, which can have several leases."""
    last_granted: float = -1.0
    last_used: float = -1.0
    """End of its last lease. The least recently used client pages out first."""
    revoked: RevokeReason | None = None
    revoke_deadline: float = 0.0
    received_at_revoke: float | None = None
    """GPU seconds that its session had received by the time of the revocation; None if it was quiet then."""
    overdue: bool = False
    """Whether it did not return its revoked lease in time: others no longer wait for it."""
    again: bool = False
    """Whether it requested a lease before it returned its revoked lease."""

    quiet_since: float | None = None
    """End of its last burst, while it is quiet under its lease."""
    last_quiet: float | None = None
    """End of its last burst, while it is quiet; retained after the return of the lease."""
    burst_since: float = 0.0
    busy_reported: float = 0.0
    """GPU-busy seconds reported in this lease so far."""
    busy_before_burst: float = 0.0
    burst_so_far: float = 0.0
    """Seconds of the current burst in earlier leases that ended only because others were owed time."""
    displaced: bool = False
    """Whether it was forced to give way. The cost of its return counts as overhead."""
    forced_in: bool = False
    """Whether another client was forced to give way for it."""
    early: bool = False
    """Whether it got the GPU, or was forced to give way, while an interactive session waited."""
    parked: bool = False
    """Whether it is in the group that has the GPU's memory but does not run: others are owed time, or it pauses."""
    expected_until: float = 0.0
    """End of the time in which a parked client that returned its lease for others is expected to request again."""
    pausing_until: float = 0.0
    """End of the time for which a client that returned its lease unasked keeps its place: `Suspensions.keep_on_gpu`."""
    paging_until: float = 0.0
    """Expected end of its page-in, before which it cannot use the GPU."""
    pace: float = 0.0
    """Last sent limit on queued work in seconds; 0: no limit."""
    pages_in_early: bool = False
    """Whether it can page in without a lease."""
    anticipated: bool = False
    """Whether its pages come in for a launch that is expected: see anticipation.py."""

    gaps: RecentSpans = field(default_factory=RecentSpans)

    @property
    def footprint(self) -> int:
        """Bytes that must fit into the GPU's memory while it works, in addition to memory that is always there.

        For a suspendable session: all of its memory.
        """
        return self.session.total if self.session.suspendable else self.working_set + self.unconfirmed

    @property
    def unit(self) -> Client | ArbitratedSession:
        """Owner of the footprint, which counts once for all the owner's clients."""
        return self.session if self.session.suspendable else self

    @property
    def waits_for_a_pin(self) -> bool:
        """Whether it waits for memory that can be freed only by suspending a pinned session."""
        return self.waiting and bool(self.short) and self.session.need is Need.LATER

    @property
    def held(self) -> bool:
        """Whether it has a lease that was not revoked."""
        return self.lease != 0 and self.revoked is None

    @property
    def member(self) -> bool:
        """Whether it belongs to the group that has the GPU's memory."""
        return self.held or self.parked

    @property
    def keeps_place_until(self) -> float:
        """End of the time for which it stays parked without a lease and without work."""
        return max(self.expected_until, self.pausing_until)

    @property
    def wants_memory(self) -> bool:
        """Whether its working set is needed on the GPU now."""
        return self.waiting or self.lease != 0 or self.parked

    @property
    def occupies_memory(self) -> bool:
        """Whether its working set counts: it has a lease and may still use it, or is parked."""
        return self.parked or (self.lease != 0 and not self.overdue)

    @property
    def bursting(self) -> bool:
        """Whether it has a lease and work on the GPU."""
        return self.lease != 0 and self.quiet_since is None


@dataclass(eq=False)
class ArbitratedSession:
    """One notebook server with its weight, which all its clients share."""

    id: str
    assigned_weight: int
    """Weight that was set; 0: released."""
    clients: dict[ClientId, Client] = field(default_factory=dict)
    gpu_seconds: float = 0.0
    last_activity: float | None = None
    quiet_from: float | None = None
    """End of its last burst while none of its clients works; None: a client works, or there was no burst."""
    paused: bool = True
    """Whether its current request came after a pause."""
    pause: float = float("inf")
    """Seconds without GPU work before the current request, if it came after a pause; infinite for the first request."""
    attained: float = 0.0
    """Seconds for which it held a lease and worked since its last pause."""
    bursts: RecentSpans = field(default_factory=RecentSpans)
    left_behind: dict[ClientId, float] = field(default_factory=dict)
    """Clients that disconnected with a lease while their processes live, each with the assumed end of its work."""
    doubted_at: float = float("-inf")
    """Last time at which one of its clients was doubted."""
    waits: WaitCounts = field(default_factory=WaitCounts)
    """Its clients' waits from the request to the lease."""
    suspends: bool = False
    """Whether its memory leaves the GPU only as a whole, including CUDA contexts, by suspending all processes."""
    pin: Pin = Pin.NONE
    """Obstacle that keeps its memory on the GPU if it `suspends`."""
    presence: Presence = Presence.ON_GPU
    need: Need = Need.POSSIBLE
    """Whether it can get the memory that its clients lack."""
    margin: int = 0
    """Bytes, beyond its own, that a failed resumption lacked."""
    retry_at: float = float("-inf")
    """Earliest time of the next resumption after a failed attempt."""
    resuming_until: float = 0.0
    """Expected end of its resumption."""
    resuming_early: bool = False
    """Whether it is being resumed for an expected launch, and not for a lease."""
    resumed_at: float = -1.0
    """End of its last resumption for an expected launch."""
    revoke_timeout: float | None = None
    """GPU seconds that it may receive after REVOKE before others get leases; None: the usual time."""
    at_limit: bool = False
    """Whether none of its clients runs now: it has had its limit of GPU time, or works in the background while others
    have work. See gpu_time_limits.py."""
    guesses_used: int = 0
    """Page-ins for expected launches that came."""
    guesses_unused: int = 0
    """Page-ins for expected launches that did not come."""

    @property
    def weight(self) -> int:
        """Weight of at least 1: each session that requests a lease is eventually served."""
        return max(1, self.assigned_weight)

    @property
    def suspendable(self) -> bool:
        """Whether it is or can be suspended. Its memory then leaves the GPU and returns only as a whole."""
        return self.suspends and (self.pin is Pin.NONE or self.presence is not Presence.ON_GPU)

    @property
    def short_of_memory(self) -> bool:
        """Whether calls of one of its clients wait for memory."""
        return any(client.waiting and client.short for client in self.clients.values())

    @property
    def total(self) -> int:
        """Bytes that must be free or its own before one of its clients works, if it is suspendable."""
        return sum(client.working_set for client in self.clients.values()) + self.margin

    @property
    def present(self) -> int:
        """Bytes on the GPU while it is present: the confirmed part of its stated memory.

        If the driver does not show its processes: all stated memory.
        """
        return sum(client.present for client in self.clients.values())

    @property
    def confirmed(self) -> bool:
        """Whether the driver shows the processes of all clients with stated memory."""
        return all(client.device_memory is not None or not client.stated for client in self.clients.values())

    @property
    def anticipated(self) -> bool:
        """Whether its memory comes in for a launch that is expected."""
        return any(client.anticipated for client in self.clients.values())

    @property
    def occupies_gpu(self) -> bool:
        """Whether one of its clients has a lease, or briefly keeps its place."""
        return any(client.lease or client.parked for client in self.clients.values())

    @property
    def last_used(self) -> float:
        """End of its clients' last lease."""
        return max((client.last_used for client in self.clients.values()), default=-1.0)

    @property
    def last_present(self) -> float:
        """End of its clients' last lease or of its last resumption for an expected launch."""
        return max(self.last_used, self.resumed_at)


@dataclass(frozen=True)
class SessionView:
    """Snapshot of a session for other parts of the agent."""

    waiting: bool
    """Whether a client has work and no lease."""
    running: bool
    """Whether a burst is in progress."""
    held: bool
    """Whether a client holds a lease."""
    memory_bytes: int
    """Allocated bytes, managed and plain."""
    resident_bytes: int
    """Part of these bytes that is on the GPU according to the model."""
    gpu_seconds: float
    """Reported time of bursts, including the burst in progress since its page-in."""
    last_activity: float | None
    """End of the last burst, on the arbiter's clock; the instant of the snapshot during a burst; None if there is no
    burst yet."""
    delivered: Delivered = NOTHING
    """Entitled time, received time and waits since the session was added to this arbiter."""
    paged_out_bytes: int = 0
    """Bytes paged out on orders and not fetched since."""
    guesses_used: int = 0
    """Page-ins for expected launches that came."""
    guesses_unused: int = 0
    """Page-ins for expected launches that did not come."""
