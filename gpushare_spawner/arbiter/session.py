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
    """Balance of latency and overhead in a GPU's arbiter. Benchmarks and tests scale the values.

    Values that are the same everywhere are constants of the modules that use them.
    """

    overhead_bound: float = 0.025
    """Part of the GPU's time that forced hand-offs may cost in the long run: e in Q >= s/e. Above 0, below 1."""
    interactive_overhead_bound: float = 0.20
    """The same while an interactive session waits: it just returned from a pause, or has worked for at most
    `short_burst` since. At least `overhead_bound`, below 1."""
    min_time_slice: float = 0.1
    """Seconds for which an incoming session may use the GPU, after its page-in, before its time slice can end. The end
    costs about a millisecond even without paging; a hundred times that keeps the cost at 1 %."""
    bandwidth_guess: float = 8e9
    """Bytes per second of bulk paging, each way, until the first measurements are in. Below PCIe gen3 x16's 12e9: too
    low a guess makes the first time slices long, too high a guess makes them wasteful."""
    bandwidth_memory: float = 0.7
    """Weight of the old estimate at a new measurement (exponentially weighted moving average)."""
    measured_from: int = 16 * 2**20
    """Bytes below which transfers are not counted: they measure latency rather than bandwidth."""
    switch_seconds: float = 0.001
    """Cost of a hand-off without paging: close one gate, drain the device, open the other."""
    hand_off_credit: float = 10.0
    """Seconds of hand-offs that quiet times can save, for sessions that return after a pause with a short burst.
    The credit refills at the rate `overhead_bound`, so the long-run bound holds with it."""
    pause: float = 1.0
    """Seconds without GPU work after which a session's next burst may spend credit."""
    long_pause: float = 30.0
    """Seconds without GPU work after which a session counts as absent: its debt begins to fade, and its pages leave the
    GPU before others' pages."""
    returning_pause: float = 10.0
    """Seconds without GPU work after which a session counts as returning even if its bursts are typically long.
    Programs pause for seconds between their phases; users often return within half a minute: 8 % of the pauses, where
    their median is two minutes (lognormal, sigma 1)."""
    unnoticed_page_in: float = 0.08
    """Seconds of page-in that a returning user does not notice: idle sessions page out so much each before one of them
    pages out all. 100 ms count as instantaneous (J. Nielsen, Usability Engineering, 1993); 20 ms of them are left for
    other sessions to give way."""
    short_burst: float = 5.0
    """Seconds of work since its last pause for which a session counts as interactive."""
    max_debt: float = 300.0
    """Seconds (with all sessions working) within which a session is served again after any overrun: a kernel cannot be
    interrupted, and a hung holder must not be penalized without end. A kernel of 3 s of a session with one unit of a
    hundred is repaid in full."""
    period: float = 0.2
    """Seconds in which each of the sessions that run together gets its part. Long enough for few switches, too
    short for a user to notice."""
    shortest_run: float = 0.01
    """Minimum GPU seconds of a session after it was held back: two slices of the hardware."""
    shortest_hold: float = 0.015
    """Minimum seconds for which a session is held back: a stop and a start cost about a millisecond each."""
    revoke_timeout: float = 10.0
    """Seconds after which waiting clients are granted at the latest, although a revoked client has not answered (its
    kernel still runs, or it hangs). Results stay correct: the pages then compete."""
    usual_revoke_timeout: float = 4.0
    """GPU seconds that a session may receive between REVOKE and its answer. The time-out is multiplied by the number of
    running sessions. Kernels of 3 s end within it."""
    shortest_revoke_timeout: float = 1.0
    """The same for a session that has ignored REVOKEs: above 0, at most `usual_revoke_timeout`."""
    page_out_step: int = 256 * 2**20
    """Bytes of one page-out order for a growing holder, instead of one order for each memory allocation."""
    proven_after: float = 1.0
    """Seconds of undisturbed work after which the observed memory use of a client counts as its use."""
    memory_poll_interval: float = 0.1
    """Seconds between reads of the memory on the GPU while clients run together only because less of their memory was
    seen there than they allocated. At 20 GB/s on 16 GB they cannot fill the GPU's last eighth in less."""
    crowded: float = 0.875
    """Part of the memory for managed pages. If clients that work together have more on the GPU, the figures no longer
    show their use: the driver may be moving pages out."""
    tolerance: float = 1 / 64
    """Part of the GPU's memory by which a client may exceed its proven use without doubt."""
    doubt_for: float = 60.0
    """Seconds for which new clients of a session are doubted after a doubt of another client: a new connection must not
    help."""
    context_bytes: int = 0
    """Device memory that each connected process takes beside its allocations (its CUDA context: some hundred MiB on a
    real GPU, nothing on a simulated one)."""
    exclusive: bool = False
    """One session at a time, even where all fit: for benchmarks, and for GPUs whose tenants must not run side by
    side."""


WINDOW = 7
"""Number of spans kept. Odd, so that the median is a span; small, so that a new phase of a program is soon learned."""

CLEARLY_LONGER = 4
"""Factor from which a pause is no typical short pause: the phase, or the cell, is over."""


class RecentSpans:
    """Recent spans of a kind, in seconds."""

    def __init__(self) -> None:
        self._spans: deque[float] = deque(maxlen=WINDOW)

    def learn(self, seconds: float) -> None:
        """Add a span in seconds. Negative spans are clock noise and count as 0."""
        self._spans.append(max(0.0, seconds))

    @property
    def typical(self) -> float | None:
        """Median of the spans, which one long span does not distort. None if there are no spans yet."""
        return median(self._spans) if self._spans else None

    def patience(self, hand_off_seconds: float) -> float:
        """Return the seconds of quiet for which a holder with these pauses keeps the GPU while another client waits.

        Pauses are between a program's kernels, or between its phases or its user's cells. Only pauses shorter than a
        hand-off are worth the wait. The holder keeps the GPU until this pause is clearly longer, if the saved hand-offs
        outweigh the wait, by the part of short pauses. 0 without short pauses. The wait is never longer than the cost
        of a hand-off, so at most the cost of two hand-offs is lost. (The ski-rental argument, refined by the recorded
        pauses; disk schedulers idle for the same reason: BFQ, Valente & Checconi 2010.)
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
    """Reason to revoke a lease, with the numbers of the wire protocol."""

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
    """Never 0, never used twice by one arbiter."""
    time_slice: float
    """Seconds that the time slice is planned to last, for the log; 0: until revoked. The arbiter ends it by
    `Revoke`."""
    prefetch: int
    """Bytes to page in before the first launch; 0: none."""
    pace: float = 0.0
    """Seconds of work that the client may queue on the GPU; 0: no bound."""


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
class Refuse:
    """Refusal of memory: calls of the client that wait for it return the driver's error.

    The client still waits for a lease.
    """

    client: ClientId


@dataclass(frozen=True)
class Pace:
    """Limit of the work that a holder may queue on the GPU. It helps others, and is no decision."""

    client: ClientId
    lease: int
    seconds: float
    """0: no bound."""


Decision: TypeAlias = LeaseGrant | Revoke | PageOut | Refuse


class Presence(Enum):
    """Place of a session's memory that moves as a whole."""

    ON_GPU = auto()
    LEAVING = auto()
    """A suspension is ordered. The memory is on the GPU until then."""
    AWAY = auto()
    """The session is suspended: no memory is on the GPU, not even its CUDA contexts."""
    COMING = auto()
    """A client has a lease, and the session is being resumed."""


class Pin(Enum):
    """Obstacle that keeps memory that moves as a whole on the GPU."""

    NONE = auto()
    BRIEF = auto()
    """The session is busy. The next attempt comes within seconds."""
    LASTING = auto()


class Need(Enum):
    """Possibility to give a session the memory that its clients are short of."""

    POSSIBLE = auto()
    LATER = auto()
    """Possible after a briefly pinned session is suspended. The clients wait, and no memory leaves the GPU for them
    yet."""
    IMPOSSIBLE = auto()
    """Not counted: no memory leaves the GPU for it."""


@dataclass(eq=False)
class Client:
    """One connected CUDA process on one GPU. Bytes; instants and spans in seconds."""

    id: ClientId
    session: ArbitratedSession
    stated_managed: int = 0
    """Managed memory, as the client states."""
    allocated: int = 0
    """Memory that can leave the GPU: managed memory, or all memory if the session's memory moves as a whole."""
    working_set: int = 0
    """Part of `allocated` that counts as used, at most the GPU's memory."""
    stated: int = 0
    """All stated memory, without the needs stated in a lease request."""
    present: int = 0
    """See `ArbitratedSession.present`."""
    stated_plain: int = 0
    """Memory that cannot leave the GPU, as the client states."""
    plain: int = 0
    """Part of `stated_plain`, with the CUDA context, that the driver confirms, and `unstated`. It is always on the
    GPU."""
    unconfirmed: int = 0
    """Part that the driver does not confirm. It counts while the client works or waits, like a working set, so that a
    false statement does not keep others from running together."""
    short: int = 0
    """Part of the stated memory that is missing: calls wait for it. Only if the session's memory leaves the GPU as a
    whole."""
    short_since: float = 0.0
    """Start of the shortage."""
    turn_since: float | None = None
    """Start of its turn with a shortage; None if it is not its turn, or it lacks nothing."""
    device_memory: int | None = None
    """Driver's figure for its process; None if the driver does not show it."""
    unstated: int = 0
    """Part beyond the process's stated memory: it is unknown whether it can leave the GPU."""
    touched: int | None = None
    """Largest amount of its managed memory seen on the GPU, with the amount paged out; None: never read."""
    shown: int = 0
    """Last such figure, without the amount paged out."""
    proven: int | None = None
    """`touched` when it last worked undisturbed: alone, or on a GPU with free memory; None: never."""
    proven_at: float = float("-inf")
    doubted: bool = False
    """Whether the GPU was nearly full while it worked beside others, so that it may use more than was seen. Its whole
    memory allocation counts until the use is proven."""
    grown_at: float = float("-inf")
    """Time of the last managed memory allocation."""
    worked_until: float = float("-inf")
    """End of its last burst."""

    waiting: bool = False
    waiting_since: float = 0.0
    owed_at_request: float = 0.0
    """Seconds that its session owed at the request; at least 0."""
    order: int = 0
    """Number of the request: lower numbers came first."""

    lease: int = 0
    """0: none."""
    granted_at: float = 0.0
    came_at: float = 0.0
    """Time at which its working set came to the GPU for the present time slice, which can have several leases."""
    last_granted: float = -1.0
    last_used: float = -1.0
    """End of its last lease. The least recently used client pages out first."""
    revoked: RevokeReason | None = None
    revoke_deadline: float = 0.0
    received_at_revoke: float | None = None
    """GPU seconds that its session had received at the revocation; None if it was quiet then."""
    overdue: bool = False
    """Whether its revoked lease was not returned in time: others no longer wait for it."""
    again: bool = False
    """Whether it requested a lease before it returned its revoked lease."""

    quiet_since: float | None = None
    """End of its last burst, while it is quiet under its lease."""
    last_quiet: float | None = None
    """End of its last burst, while it is quiet; kept after the return of the lease."""
    burst_since: float = 0.0
    busy_reported: float = 0.0
    """GPU-busy seconds reported in this lease so far."""
    busy_before_burst: float = 0.0
    burst_so_far: float = 0.0
    """Seconds of the present burst in earlier leases that ended only because others were owed time."""
    displaced: bool = False
    """Whether it had to give way. The cost of its return counts as overhead."""
    forced_in: bool = False
    """Whether another client had to give way for it."""
    early: bool = False
    """Whether it came, or had to give way, while an interactive session waited."""
    parked: bool = False
    """Whether it is in the group that has the GPU's memory but does not run: others are owed time, or it pauses."""
    expected_until: float = 0.0
    """End of the time in which a parked client that returned its lease for others is expected to request again."""
    pausing_until: float = 0.0
    """End of the time for which a client that returned its lease by itself keeps its place:
    `Suspensions.keep_on_gpu`."""
    paging_until: float = 0.0
    """Expected end of its page-in, before which it cannot use the GPU."""
    pace: float = 0.0
    """Last sent limit of queued work in seconds; 0: no bound."""

    gaps: RecentSpans = field(default_factory=RecentSpans)

    @property
    def footprint(self) -> int:
        """Bytes that must fit into the GPU's memory while it works, beside memory that is always there.

        All memory of the session if it moves as a whole.
        """
        return self.session.total if self.session.moves_whole else self.working_set + self.unconfirmed

    @property
    def unit(self) -> Client | ArbitratedSession:
        """Owner of the footprint: it counts once for all clients of the owner."""
        return self.session if self.session.moves_whole else self

    @property
    def waits_for_a_pin(self) -> bool:
        """Whether it waits for memory that only the suspension of a pinned session can free."""
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
    share: int
    """Weight that was set; 0: released."""
    clients: dict[ClientId, Client] = field(default_factory=dict)
    gpu_seconds: float = 0.0
    last_activity: float | None = None
    quiet_from: float | None = None
    """End of its last burst while none of its clients works; None: a client works, or there was no burst."""
    paused: bool = True
    """Whether its present request came after a pause."""
    pause: float = float("inf")
    """Seconds without GPU work before the present request, if it came after a pause; infinite for the first."""
    attained: float = 0.0
    """Seconds for which it held a lease and worked since its last pause."""
    bursts: RecentSpans = field(default_factory=RecentSpans)
    left_behind: dict[ClientId, float] = field(default_factory=dict)
    """Clients that left with a lease while their processes live, with the end of their assumed work."""
    doubted_at: float = float("-inf")
    """Last time at which one of its clients was doubted."""
    waits: WaitCounts = field(default_factory=WaitCounts)
    """Waits of its clients, from the request to the lease."""
    whole: bool = False
    """Whether its memory leaves the GPU only as a whole, with its CUDA contexts, by a suspension of all processes."""
    pin: Pin = Pin.NONE
    """Obstacle that keeps the memory of a `whole` session on the GPU."""
    presence: Presence = Presence.ON_GPU
    need: Need = Need.POSSIBLE
    """Possibility to get the memory that its clients are short of."""
    margin: int = 0
    """Bytes beyond its own that were lacking at a failed resumption."""
    retry_at: float = float("-inf")
    """Earliest next resumption after a failed attempt."""
    coming_until: float = 0.0
    """Expected end of its resumption."""
    revoke_timeout: float | None = None
    """GPU seconds that it may receive after REVOKE before others are granted; None: as usual."""

    @property
    def weight(self) -> int:
        """Weight of at least 1: each session that requests a lease is served in the end."""
        return max(1, self.share)

    @property
    def moves_whole(self) -> bool:
        """Whether its memory leaves the GPU, and comes back, only as a whole."""
        return self.whole and (self.pin is Pin.NONE or self.presence is not Presence.ON_GPU)

    @property
    def short_of_memory(self) -> bool:
        """Whether calls of one of its clients wait for memory."""
        return any(client.waiting and client.short for client in self.clients.values())

    @property
    def total(self) -> int:
        """Bytes that must be free or its own before one of its clients works, if its memory moves as a whole."""
        return sum(client.working_set for client in self.clients.values()) + self.margin

    @property
    def present(self) -> int:
        """Bytes on the GPU while it is present: the confirmed part of the stated memory.

        All stated memory if the driver does not show the processes.
        """
        return sum(client.present for client in self.clients.values())

    @property
    def confirmed(self) -> bool:
        """Whether the driver shows the processes of all clients with stated memory."""
        return all(client.device_memory is not None or not client.stated for client in self.clients.values())

    @property
    def occupies_gpu(self) -> bool:
        """Whether one of its clients has a lease, or keeps its place for a moment."""
        return any(client.lease or client.parked for client in self.clients.values())

    @property
    def last_used(self) -> float:
        """End of the last lease of one of its clients."""
        return max((client.last_used for client in self.clients.values()), default=-1.0)


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
    """Allocated, managed and plain."""
    resident_bytes: int
    """Part that the model has on the GPU."""
    gpu_seconds: float
    """Reported time of bursts, with the burst in progress since its page-in."""
    last_activity: float | None
    """End of the last burst, on the arbiter's clock; the instant of the snapshot during a burst; None if there is no
    burst yet."""
    delivered: Delivered = NOTHING
    """Entitled and received time and waits, since the session was added to this arbiter."""
    paged_out_bytes: int = 0
    """Bytes paged out on orders and not fetched since."""
