"""What the arbiter knows of its clients and sessions.

How long a client is typically quiet between two bursts, and whether it is worth waiting for it.

What the arbiter decides: orders to clients, which the agent sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from statistics import median
from typing import TypeAlias

from gpushare_spawner.model.report import NOTHING, Delivered, WaitCounts

WINDOW = 7
"""Spans remembered. Odd, so that the median is one of them; few, so that a new phase of a program is soon learned."""

CLEARLY_LONGER = 4
"""A pause that is so many times as long as the typical short one is of another kind: the phase, or the cell, is
over."""


class RecentSpans:
    """The last few spans of a kind, in seconds."""

    def __init__(self) -> None:
        self._spans: deque[float] = deque(maxlen=WINDOW)

    def learn(self, seconds: float) -> None:
        """One more span, in seconds; negative ones are noise of the clock and count as 0."""
        self._spans.append(max(0.0, seconds))

    @property
    def typical(self) -> float | None:
        """Their median: one minute among milliseconds does not spoil it. None: nothing learned yet."""
        return median(self._spans) if self._spans else None

    def patience(self, hand_off_seconds: float) -> float:
        """If these are a holder's pauses: seconds of quiet for which it keeps the GPU although another client waits.

        Pauses are of two kinds, those between a program's kernels and those between its phases, or its user's cells; it
        is the short ones, shorter than a hand-off, that are worth waiting for. So: until this pause is clearly none of
        them, if the hand-offs that are saved by it make up for the waiting, by the part of the pauses that were short.
        0 where there were none, or none is known. Never longer than the hand-off costs, so at most two hand-offs'
        worth is lost, whatever the pause turns out to be. (The ski-rental argument, sharpened by what is known of the
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
    """Why a lease is taken back; the numbers of the wire protocol."""

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
    """The client may run bursts."""

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
    """The client is to stop launching, to wait until the device is quiet, and to release the lease."""

    client: ClientId
    lease: int
    page_out: int
    """Bytes to page out, after the release; 0: none."""
    reason: RevokeReason


@dataclass(frozen=True)
class PageOut:
    """A client without a lease is to page out."""

    client: ClientId
    amount: int
    """Bytes."""


@dataclass(frozen=True)
class Refuse:
    """The memory that calls of the client wait for does not come: they return the driver's error.

    The client still waits for a lease.
    """

    client: ClientId


@dataclass(frozen=True)
class Pace:
    """A holder is to queue no more than so much work on the GPU from now on. Helps others, and decides nothing."""

    client: ClientId
    lease: int
    seconds: float
    """0: no bound."""


Decision: TypeAlias = LeaseGrant | Revoke | PageOut | Refuse


class Presence(Enum):
    """Where the memory of a session is whose memory moves as a whole."""

    ON_GPU = auto()
    LEAVING = auto()
    """It is to be suspended. Its memory is on the GPU until it is."""
    AWAY = auto()
    """It is suspended: nothing of it is on the GPU, its CUDA contexts included."""
    COMING = auto()
    """One of its clients has a lease, and it is being resumed."""


class Pin(Enum):
    """Whether the memory of a session that moves as a whole cannot leave the GPU now."""

    NONE = auto()
    BRIEF = auto()
    """The session is busy: it is tried again within seconds."""
    LASTING = auto()


class Need(Enum):
    """Whether a session can have the memory that its clients are short of."""

    POSSIBLE = auto()
    LATER = auto()
    """Not before a session that is pinned for a moment can be suspended. Its clients wait, and nothing leaves the GPU
    for them yet."""
    IMPOSSIBLE = auto()
    """It is not reckoned with: nothing leaves the GPU for it."""


@dataclass(eq=False)
class Client:
    """One connected CUDA process on one GPU. Bytes; instants and spans in seconds."""

    id: ClientId
    session: ArbitratedSession
    claimed_managed: int = 0
    """Managed memory, as the client says."""
    allocated: int = 0
    """Memory that can leave the GPU: the managed memory; all memory where the session's memory moves as a whole."""
    working_set: int = 0
    """The part of `allocated` that it is taken to use, and at most the GPU's memory."""
    stated: int = 0
    """All that it has said to have; not what it says to need when it asks for a lease."""
    present: int = 0
    """See `Session.present`."""
    claimed_plain: int = 0
    """Memory that cannot leave the GPU, as the client says."""
    plain: int = 0
    """The part of `claimed_plain`, with the CUDA context, that the driver confirms, and `unclaimed`: on the GPU whether
    it works or not."""
    unconfirmed: int = 0
    """The part that the driver does not confirm: it is reckoned with while the client works or waits, like a working
    set, so that a false claim keeps no others from running together."""
    short: int = 0
    """The part of what it claims that it does not have: calls wait for this memory. Only where its session's memory
    leaves the GPU as a whole."""
    short_since: float = 0.0
    """Since when it has been `short`."""
    turn_since: float | None = None
    """Since when it is its turn and it lacks `short`; None: it is not, or lacks nothing."""
    device_memory: int | None = None
    """What the driver shows for its process; None: it does not show it."""
    unclaimed: int = 0
    """The part of it beyond all that the process has claimed: nobody knows whether it can leave the GPU."""
    touched: int | None = None
    """The most of its managed memory that was ever seen on the GPU, or known to have been paged out; None: never
    looked."""
    shown: int = 0
    """The last such figure, without what had been paged out."""
    proven: int | None = None
    """`touched` when it had last been seen at work undisturbed: alone, or on a GPU that had memory left; None:
    never."""
    proven_at: float = float("-inf")
    doubted: bool = False
    """The GPU was nearly full while it worked beside others, and it may use more than was seen: all that it has
    allocated counts until it is proven."""
    grown_at: float = float("-inf")
    """When it last allocated managed memory."""
    worked_until: float = float("-inf")
    """End of its last burst."""

    waiting: bool = False
    waiting_since: float = 0.0
    owed_when_asked: float = 0.0
    """Seconds that its session owed when it asked; at least 0."""
    order: int = 0
    """Counts requests: the client with the lower number asked first."""

    lease: int = 0
    """0: none."""
    granted_at: float = 0.0
    came_at: float = 0.0
    """When its working set came to the GPU for the present time slice; leases come and go within it."""
    last_granted: float = -1.0
    last_used: float = -1.0
    """When its last lease ended. The client that has not used its pages for longest pages out first."""
    revoked: RevokeReason | None = None
    revoke_deadline: float = 0.0
    received_at_revoke: float | None = None
    """GPU seconds that its session had received when it was revoked; None where it was quiet then."""
    overdue: bool = False
    """It was revoked and did not answer in time: the others no longer wait for it."""
    again: bool = False
    """It asked again before it returned its revoked lease."""

    quiet_since: float | None = None
    """End of its last burst, while it is quiet under its lease."""
    last_quiet: float | None = None
    """End of its last burst, while it is quiet; kept when the lease is returned."""
    burst_since: float = 0.0
    busy_reported: float = 0.0
    """GPU-busy seconds reported in this lease so far."""
    busy_before_burst: float = 0.0
    burst_so_far: float = 0.0
    """Seconds of the present burst in leases that ended only because others were owed time."""
    displaced: bool = False
    """It had to give way; what its return costs counts as overhead."""
    forced_in: bool = False
    """Another client had to give way for it."""
    early: bool = False
    """It came, or had to go, while an interactive session waited."""
    parked: bool = False
    """It belongs to the group that has the GPU's memory, and does not run: others are owed time, or it pauses."""
    expected_until: float = 0.0
    """Until when a parked client that returned its lease because others are owed time is expected to ask again."""
    pausing_until: float = 0.0
    """Until when a client that returned its lease by itself keeps its place: see `Suspensions.keep_on_gpu`."""
    paging_until: float = 0.0
    """Until when its pages are taken to come in, so that it cannot use the GPU yet."""
    pace: float = 0.0
    """Seconds of work that it may queue on the GPU, as it was told last; 0: no bound."""

    gaps: RecentSpans = field(default_factory=RecentSpans)

    @property
    def footprint(self) -> int:
        """Bytes that must fit into the GPU's memory, beside what is always there, while it works. Where its session's
        memory moves as a whole, all of it."""
        return self.session.total if self.session.moves_whole else self.working_set + self.unconfirmed

    @property
    def unit(self) -> Client | ArbitratedSession:
        """What its footprint is of: the footprint of several clients of one unit counts once."""
        return self.session if self.session.moves_whole else self

    @property
    def waits_for_a_pin(self) -> bool:
        """Whether it waits for memory that comes free only when a pinned session can be suspended."""
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
        """Until when it stays parked without a lease and without work."""
        return max(self.expected_until, self.pausing_until)

    @property
    def wants_memory(self) -> bool:
        """Whether its working set is wanted on the GPU now."""
        return self.waiting or self.lease != 0 or self.parked

    @property
    def occupies_memory(self) -> bool:
        """Whether its working set is to be reckoned with: it has a lease and may still use it, or is parked."""
        return self.parked or (self.lease != 0 and not self.overdue)

    @property
    def bursting(self) -> bool:
        """Whether it has a lease and work on the GPU."""
        return self.lease != 0 and self.quiet_since is None


@dataclass(eq=False)
class ArbitratedSession:
    """One notebook server: the weight is its, however many clients it has."""

    id: str
    share: int
    """Weight that was set; 0: released."""
    clients: dict[ClientId, Client] = field(default_factory=dict)
    gpu_seconds: float = 0.0
    last_activity: float | None = None
    quiet_from: float | None = None
    """End of its last burst while none of its clients works; None while one does, or if there was none yet."""
    paused: bool = True
    """Its present request came after a pause."""
    pause: float = float("inf")
    """Seconds without GPU work before the present request, if it came after a pause; infinite for the first."""
    attained: float = 0.0
    """Seconds for which it held a lease and worked since its last pause."""
    bursts: RecentSpans = field(default_factory=RecentSpans)
    left_behind: dict[ClientId, float] = field(default_factory=dict)
    """Clients that left with a lease while their processes live, and until when they are taken to compute."""
    doubted_at: float = float("-inf")
    """When one of its clients was doubted last."""
    waits: WaitCounts = field(default_factory=WaitCounts)
    """Of its clients, from the request to the lease."""
    whole: bool = False
    """Its memory leaves the GPU only as a whole, with its CUDA contexts, while all its processes are suspended."""
    pin: Pin = Pin.NONE
    """Whether it is `whole` and cannot be suspended now: its memory cannot leave the GPU."""
    presence: Presence = Presence.ON_GPU
    need: Need = Need.POSSIBLE
    """Whether what its clients are short of can be had."""
    margin: int = 0
    """Bytes that were lacking when it could not be resumed, beyond its own."""
    retry_at: float = float("-inf")
    """Until when it is not resumed, as the last try failed."""
    coming_until: float = 0.0
    """Until when its memory is taken to come in."""

    @property
    def weight(self) -> int:
        """At least 1: each session that asks is served in the end."""
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
    def own_memory(self) -> int:
        """Bytes on the GPU while it is there, where its memory moves as a whole."""
        return sum(client.working_set for client in self.clients.values())

    @property
    def total(self) -> int:
        """Bytes that must be free or its own before one of its clients works, where its memory moves as a whole."""
        return self.own_memory + self.margin

    @property
    def present(self) -> int:
        """Bytes that it has on the GPU while it is there: of what its clients claim, what the driver confirms; all
        where the driver does not show them."""
        return sum(client.present for client in self.clients.values())

    @property
    def confirmed(self) -> bool:
        """Whether the driver shows the processes of all clients that claim memory."""
        return all(client.device_memory is not None or not client.stated for client in self.clients.values())

    @property
    def holding(self) -> bool:
        """Whether one of its clients has a lease, or keeps its place for a moment."""
        return any(client.lease or client.parked for client in self.clients.values())

    @property
    def last_used(self) -> float:
        """When a lease of one of its clients ended last."""
        return max((client.last_used for client in self.clients.values()), default=-1.0)


@dataclass(frozen=True)
class SessionView:
    """A session as others may see it."""

    waiting: bool
    """It has work and one of its clients has no lease for it."""
    running: bool
    """A burst is in progress."""
    held: bool
    """One of its clients holds a lease."""
    memory_bytes: int
    """Allocated, managed and plain."""
    resident_bytes: int
    """The part of it that is thought to be on the GPU."""
    gpu_seconds: float
    """With a burst on the GPU, as far as reported, and the burst in progress since its pages are in."""
    last_activity: float | None
    """End of the last burst, on the clock that the arbiter is driven with; the instant of the view while one is in
    progress; None: no burst yet."""
    delivered: Delivered = NOTHING
    """What it was entitled to and received, and how long it waited, since it was added to this arbiter."""
    paged_out_bytes: int = 0
    """What was paged out on orders and not fetched since."""
