"""Roster of one GPU's sessions and clients: bursts, pauses, memory and snapshots. schedule.py decides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import count

from gpushare_spawner.arbiter.memory import Residency, VramBudget, together
from gpushare_spawner.arbiter.recent_use import BurstRecorder
from gpushare_spawner.arbiter.session import (
    ArbiterSettings,
    ArbitratedSession,
    Client,
    ClientId,
    Need,
    Pin,
    Presence,
    SessionView,
)
from gpushare_spawner.model.report import Delivered

MEMORY_TIMEOUT = 60.0
"""Seconds for which a client waits for missing memory during its turn: others may ignore REVOKE, or their suspension
may be slow. The program then gets the driver's error. A suspension of 80 GB took 15 s in one report
(NVIDIA/cuda-checkpoint, issue 29)."""
LONGEST_MEMORY_WAIT = 600.0
"""Maximum seconds for which a client waits for missing memory, including the time before its turn.

A turn comes within minutes (the bound on a wait for a lease); this limit also ends a wait behind sessions that make no
progress.
"""
SURELY_QUIET = 0.2
"""Seconds after IDLE from which a driver sample shows no earlier work: samples are averages over up to a sixth of a
second."""
PROVEN_INTERVAL_FACTOR = 5
"""Factor by which the interval grows for clients with proven use: they can use more later."""


class Roster:
    """Sessions and clients of one GPU. `now` is the time of the last event. Unknown IDs raise KeyError."""

    def __init__(self, vram_bytes: int, settings: ArbiterSettings) -> None:
        self.vram = vram_bytes
        self._settings = settings
        self.sessions: dict[str, ArbitratedSession] = {}
        self.recorders: defaultdict[str, BurstRecorder] = defaultdict(BurstRecorder)
        """The bursts of each session that has had work."""
        self._clients: dict[ClientId, Client] = {}
        self.residency = Residency()
        self.now = float("-inf")
        self.crowded_at = float("-inf")
        """Last time at which clients that worked together filled the GPU."""
        self.holder_grew = False
        """Whether a holder has allocated more since the last decision."""
        self._requests = count(1)
        self._vram_budget: VramBudget | None = None
        """Valid until a client connects, disconnects or allocates; None: must be recomputed."""
        self.short: dict[Client, None] = {}
        """Clients that are short of memory, longest shortage first."""
        self._weighed: set[ArbitratedSession] = set()
        """Sessions that the last `weigh_needs` checked."""

    # -- the clients ------------------------------------------------------------------------------------------------

    def client(self, client: ClientId) -> Client:
        return self._clients[client]

    @property
    def clients(self) -> Iterable[Client]:
        """Clients in the order of connection."""
        return self._clients.values()

    @property
    def waiting(self) -> list[Client]:
        return [client for client in self._clients.values() if client.waiting]

    @property
    def asking(self) -> list[Client]:
        """Waiting clients that can get a lease and are outside the group that has the memory."""
        return [
            client
            for client in self._clients.values()
            if client.waiting
            and not client.parked
            and not client.session.at_limit
            and not (client.session.suspends and (self.stuck(client.session) or client.waits_for_a_pin))
        ]

    def stuck(self, session: ArbitratedSession) -> bool:
        """Return whether a session is suspended and cannot resume now.

        Memory that cannot leave the GPU leaves too little space for the session's memory, or the last attempt has just
        failed. Later memory allocations by its processes do not count: they may never succeed.
        """
        if session.presence is not Presence.SUSPENDED:
            return False
        return self.now < session.retry_at or min(self.vram, session.present) > self.vram_budget().for_managed

    @property
    def staying(self) -> list[Client]:
        """The group that has the memory: clients with a lease that was not revoked, and parked clients."""
        return [c for c in self._clients.values() if c.parked or (c.lease and c.revoked is None)]

    @property
    def leaseholders(self) -> list[Client]:
        """Clients with a lease, revoked or not."""
        return [client for client in self._clients.values() if client.lease]

    def connect(self, client: ClientId, session: str) -> None:
        if client in self._clients:
            raise ValueError(f"client {client!r} is connected already")
        owner = self.sessions[session]
        connected = Client(client, owner, doubted=self.now - owner.doubted_at < self._settings.doubt_for)
        self._clients[client] = owner.clients[client] = connected
        self.residency.add(connected)
        self._reckon(connected)

    def forget(self, client: Client) -> None:
        """Remove a client, its lease and its memory."""
        self.end_of_lease(client)
        self._set_short(client, 0)
        del self._clients[client.id], client.session.clients[client.id]
        self.residency.remove(client)
        self._vram_budget = None
        session = client.session
        self._record_end(session, self.now)
        if not session.clients and session.presence in (Presence.SUSPENDED, Presence.RESUMING):
            session.presence, session.margin, session.resuming_early = (
                Presence.ON_GPU,
                0,
                False,
            )  # nothing is left to resume

    def vram_budget(self) -> VramBudget:
        """Return the GPU's memory minus the memory that cannot leave it."""
        if self._vram_budget is None:
            self._vram_budget = VramBudget(
                self.vram, sum(client.plain for client in self.clients), self._settings.exclusive
            )
        return self._vram_budget

    def excess(self) -> dict[ArbitratedSession, int]:
        """Return, by session, the bytes by which all sessions with work exceed the memory: the most to move for it.

        For the others, a session counts with at most the GPU's memory, regardless of the number of clients.
        """
        sums: dict[ArbitratedSession, int] = {}
        excess = -self.vram_budget().for_managed
        for session in self.sessions.values():
            own = together(client for client in session.clients.values() if client.wants_memory)
            sums[session] = own
            excess += min(self.vram, own)
        return {session: max(0, excess + own - min(self.vram, own)) for session, own in sums.items()}

    def elapse(self, seconds: float) -> None:
        """Add elapsed time to the working sessions' attained service, and to the bursts of sessions with work."""
        computing: dict[ArbitratedSession, int] = {}
        bursting: set[ArbitratedSession] = set()
        for client in self._clients.values():
            session = client.session
            if client.bursting:
                bursting.add(session)
                computing[session] = computing.get(session, 0) + (client.paging_until < self.now)
            elif client.waiting:
                computing.setdefault(session, 0)
        for session in bursting:
            session.attained += seconds
        # the hardware divides time evenly between the processes that have work
        processes, contended = sum(computing.values()), len(computing) > 1
        for session, own in computing.items():
            self.recorders[session.id].advance(seconds, own / processes if own else 0.0, contended)

    # -- events of a client ------------------------------------------------------------------------------------------

    def set_memory(self, client: Client, managed: int, plain: int, short: int = 0, needed: bool = False) -> None:
        """Record a client's stated memory allocation in bytes, including `short` bytes for which calls wait.

        `needed`: the figures may include the next memory allocation.
        """
        if managed < 0 or plain < 0 or short < 0:
            raise ValueError(f"amounts of memory must be at least 0, not {managed}, {plain} and {short}")
        self._set_short(client, min(short, plain) if client.session.suspends else 0)
        grown = max(0, managed - client.stated_managed)
        if grown:
            client.grown_at = self.now
        client.stated_managed, client.stated_plain = managed, plain
        if not needed:
            client.stated = managed + plain - client.short
        self._reckon(client, grown if client.held else 0)
        self.holder_grew = self.holder_grew or (client.held and grown > 0)

    def device_memory(self, client: Client, amount: int | None, unstated: int = 0) -> None:
        """Record the driver's bytes for the client's process, including its CUDA context; None: not shown.

        `unstated`: the part that the process has not stated.
        """
        if client.session.presence is not Presence.ON_GPU:
            return  # the resumption needs as much memory as the process has there
        if (client.device_memory, client.unstated) != (amount, unstated):
            client.device_memory, client.unstated = amount, unstated
            self._reckon(client)

    def working_set(self, client: Client, resident: int) -> None:
        """Record an upper bound on the client's managed bytes on the GPU."""
        if client.session.suspendable:
            return
        before = client.working_set
        client.shown = resident
        client.touched = max(client.touched or 0, resident + self.residency.in_host_memory(client))
        self._notice_crowd()
        since = max(client.grown_at, client.granted_at, self.crowded_at)
        at_work = client.bursting and self.now - since >= self._settings.proven_after
        if at_work or (client.granted_at > self.crowded_at and client.worked_until > client.grown_at):
            client.proven, client.proven_at, client.doubted = client.touched, self.now, False
        self._reckon(client)
        if client.held and client.working_set > before:
            self._reckon(client, client.working_set - before)
            self.holder_grew = True

    @property
    def memory_poll_interval(self) -> float | None:
        """Seconds until new figures are needed; None if the clients fit regardless of their use.

        The interval is short if clients fit together only because of unproven use, and longer if because of proven use.
        """
        wanting = [client for client in self._clients.values() if client.wants_memory]
        moving = [client for client in wanting if not client.session.suspendable]
        at_most = sum(min(client.allocated, self.vram) + self._fixed(client) - client.plain for client in wanting)
        if len(wanting) < 2 or not moving or at_most <= self.vram_budget().for_managed:
            return None
        unproven = any(c.proven_at < c.grown_at or c.proven is None or c.doubted for c in moving)
        return self._settings.memory_poll_interval * (1 if unproven else PROVEN_INTERVAL_FACTOR)

    def _notice_crowd(self) -> None:
        """Mark the figures of clients that fill the GPU together as doubtful."""
        capacity = self.vram_budget().for_managed
        working = [client for client in self._clients.values() if client.lease]
        if len(working) < 2 or sum(client.shown for client in working) < capacity * self._settings.crowded:
            return
        self.crowded_at = self.now
        for client in working:
            touched = client.touched
            if client.doubted or touched is None or client.allocated <= touched:
                continue
            if client.proven is None or touched > client.proven + self.vram * self._settings.tolerance:
                client.session.doubted_at = self.now
                self.holder_grew = True
                for other in client.session.clients.values():  # otherwise its processes could do so one after another
                    other.doubted = True
                self._reckon_all(client.session)

    def _reckon_all(self, session: ArbitratedSession) -> None:
        for client in session.clients.values():
            self._reckon(client)

    def _reckon(self, client: Client, used_now: int = 0) -> None:
        """Compute the client's memory figures. `used_now`: bytes that a holder has begun to use."""
        if client.session.suspendable:
            self._reckon_suspendable(client)
            return
        client.allocated = client.stated_managed
        fixed = min(client.stated_plain - client.short + self._settings.context_bytes, self.vram)
        confirmed = min(fixed, client.device_memory or 0)
        plain = min(confirmed + client.unstated, self.vram)
        if plain != client.plain:
            client.plain = plain
            self._vram_budget = None
        # the driver's figure for a process is valid until it shows more, as for managed memory
        client.unconfirmed = 0 if client.device_memory is not None else fixed - confirmed
        if client.session.need is Need.POSSIBLE:
            client.unconfirmed = min(client.unconfirmed + client.short, self.vram)  # others page out for this
        used = client.allocated if client.touched is None or client.doubted else client.touched
        client.working_set = min(client.allocated, used, self.vram)
        self.residency.resized(client, self.vram_budget().for_managed, used_now)

    def _fixed(self, client: Client) -> int:
        """Return the stated bytes that cannot leave the GPU, with the CUDA context."""
        return min(client.stated_plain + self._settings.context_bytes, self.vram)

    def _reckon_suspendable(self, client: Client) -> None:
        """Compute the figures of a suspendable session's client, including a CUDA context not yet shown."""
        if client.plain:
            client.plain = 0
            self._vram_budget = None
        client.unconfirmed = 0
        possible = client.session.need is Need.POSSIBLE
        stated = client.stated_managed + client.stated_plain - (0 if possible else client.short)
        context, shown = self._settings.context_bytes, client.device_memory
        client.allocated = client.working_set = min(
            self.vram, max(stated, stated + context if shown is None else shown)
        )
        stated = client.stated + context if client.stated else 0
        client.present = min(client.working_set, stated if shown is None else shown)
        self.residency.presence_changed(client)

    def weigh_needs(self) -> None:
        """Find the sessions that can get the memory they lack, now or after a pinned session is suspended.

        A session cannot if its need and the memory that cannot leave the GPU exceed the GPU, or if it has waited too
        long.
        """
        weighed = {client.session for client in self.short}
        for session in weighed | self._weighed:
            need = self._need(session)
            if need is not session.need:
                session.need = need
                self._reckon_all(session)
        self._weighed = weighed
        for client in self.short:
            if client.waits_for_a_pin and not client.lease:
                client.parked = False  # it must not keep the memory from others meanwhile

    def _need(self, session: ArbitratedSession) -> Need:
        if not session.short_of_memory:
            return Need.POSSIBLE
        if any(map(self.waited_too_long, session.clients.values())):
            return Need.IMPOSSIBLE
        others = [client for client in self.clients if client.session is not session]
        brief = sum(map(self._at_most_on_gpu, (client for client in others if client.session.pin is Pin.BRIEF)))
        lasting = sum(client.plain for client in others if client.session.pin is not Pin.BRIEF)
        left = self.vram - lasting - sum(map(self._needed, session.clients.values()))
        if left < 0:
            return Need.IMPOSSIBLE
        return Need.POSSIBLE if left >= brief else Need.LATER

    def _needed(self, client: Client) -> int:
        stated, shown = client.stated_managed + client.stated_plain, client.device_memory
        return stated + self._settings.context_bytes if shown is None else max(stated, shown)

    def _at_most_on_gpu(self, client: Client) -> int:
        """Return the driver's bytes for the client, or the stated bytes if there are none."""
        shown = client.device_memory
        return min(self.vram, client.stated + self._settings.context_bytes if shown is None else shown)

    def _set_short(self, client: Client, short: int) -> None:
        if not client.short:
            client.short_since, client.turn_since = self.now, None
        client.short = short
        if short:
            self.short[client] = None
        else:
            self.short.pop(client, None)

    def waited_too_long(self, client: Client) -> bool:
        """Return whether a client has lacked memory for too long."""
        due = self.memory_due(client)
        return due is not None and self.now >= due

    def memory_due(self, client: Client) -> float | None:
        """Return the end of the wait for a client that is short of memory; None for others."""
        if not client.waiting or not client.short:
            return None
        due = client.short_since + LONGEST_MEMORY_WAIT
        return due if client.turn_since is None else min(due, client.turn_since + MEMORY_TIMEOUT)

    def turn_comes(self, client: Client) -> None:
        """Record that it is a waiting client's turn to use the GPU."""
        if client.waiting and client.short and client.turn_since is None:
            client.turn_since = self.now

    def refuse_memory(self, client: Client) -> None:
        """Remove the shortage of a client that is refused memory."""
        client.stated_plain -= client.short
        self._set_short(client, 0)
        client.turn_since = None
        self._reckon(client)

    def set_presence(self, session: ArbitratedSession, presence: Presence) -> None:
        """Set the location of a suspendable session's memory."""
        session.presence, session.resuming_early = presence, False
        self._reckon_all(session)

    def set_pin(self, session: ArbitratedSession, pin: Pin) -> None:
        """Set whether the memory of a session with `suspends` can leave the GPU."""
        if session.pin is not pin:
            session.pin = pin
            self._reckon_all(session)
            self._vram_budget = None

    def wait(self, client: Client, owed: float = 0.0) -> None:
        """Add a client to the queue for a lease. `owed`: seconds that its session owes."""
        client.waiting = True
        client.waiting_since = self.now
        client.owed_at_request = owed
        client.order = next(self._requests)

    def work_again(self, client: Client) -> None:
        """Begin or request a burst, and learn the length of the preceding pause."""
        if client.last_quiet is not None:
            client.gaps.learn(self.now - client.last_quiet)
        client.last_quiet = client.quiet_since = None
        client.burst_since = self.now
        client.busy_before_burst = client.busy_reported
        session = client.session
        if not any(c is not client and (c.waiting or c.bursting) for c in session.clients.values()):
            since = session.quiet_from
            pause = float("inf") if since is None else self.now - since
            session.paused = pause >= self._settings.pause
            if session.paused:
                session.pause, session.attained = pause, 0.0
            self.recorders[session.id].begin(self.now)
        session.quiet_from = None

    def seen_at_work(self, session: str, since: float) -> None:
        """Treat quiet clients of a session as working if the driver shows work since an instant.

        This applies if all its clients with a lease had been quiet for `SURELY_QUIET` at that instant. No effect for an
        unknown session.
        """
        record = self.sessions.get(session)
        holders = [client for client in record.clients.values() if client.lease] if record is not None else []
        latest = since - SURELY_QUIET
        if all(client.quiet_since is not None and client.quiet_since <= latest for client in holders):
            for client in holders:
                self.work_again(client)

    def quiet(self, client: Client, since: float) -> None:
        """Record the end of a burst at an instant; the client keeps its lease."""
        client.session.bursts.learn(client.burst_so_far + client.busy_reported - client.busy_before_burst)
        client.burst_so_far = 0.0
        client.quiet_since = client.last_quiet = client.worked_until = since
        self._no_longer_active(client.session, since)

    def report_busy(self, client: Client, busy_seconds: float) -> None:
        """Record the busy time in this lease, at most the age of the lease."""
        busy = max(client.busy_reported, min(busy_seconds, self.now - client.granted_at))
        client.session.gpu_seconds += busy - client.busy_reported
        client.busy_reported = busy

    def released(self, client: Client) -> None:
        """Record the return of a lease."""
        if client.quiet_since is None:
            burst = client.burst_so_far + client.busy_reported - client.busy_before_burst
            # a burst interrupted because others were owed time is still one burst
            client.burst_so_far = burst if client.parked else 0.0
            if client.revoked is None:
                self.quiet(client, self.now)
            elif burst > self._settings.short_burst:
                # An interrupted burst only proves that it is long.
                client.session.bursts.learn(burst)
        self.end_of_lease(client)

    def end_of_lease(self, client: Client) -> None:
        if not client.lease:
            return
        was_bursting = client.bursting
        client.last_used = self.now if client.quiet_since is None else client.quiet_since
        client.worked_until = client.last_used
        client.lease = 0
        client.quiet_since = client.revoked = None
        client.overdue = client.again = False
        client.busy_reported = client.busy_before_burst = 0.0
        if was_bursting:
            self._no_longer_active(client.session, self.now)

    def granted(self, client: Client, lease: int) -> None:
        """Record a grant; the working set is paged in."""
        if not client.session.suspendable:
            self.residency.granted(client, self.vram_budget().for_managed, self.now)
        elif client.session.presence is Presence.SUSPENDED:
            self.set_presence(client.session, Presence.RESUMING)
        if client.waiting:
            client.session.waits.add(self.now - client.waiting_since)
        client.lease, client.waiting = lease, False
        client.granted_at = client.burst_since = client.last_granted = self.now
        if not client.parked:
            client.came_at = self.now
        client.forced_in = client.displaced = client.early = client.parked = False

    def _no_longer_active(self, session: ArbitratedSession, since: float) -> None:
        session.last_activity = max(since, session.last_activity or since)
        if not any(client.waiting or client.bursting for client in session.clients.values()):
            session.quiet_from = since
        self._record_end(session, since)

    def _record_end(self, session: ArbitratedSession, since: float) -> None:
        clients = session.clients.values()
        if not any(client.waiting or client.bursting for client in clients):
            memory = sum(client.stated_managed + client.stated_plain for client in clients)
            self.recorders[session.id].end(since, self.now, memory)

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def snapshot(
        self, session: str, now: float | None = None, entitled: float = 0.0, delivered: float = 0.0
    ) -> SessionView:
        """Return the session's state at an instant; None: at the last event. `entitled`, `delivered`: GPU seconds.

        A burst that is alone on the GPU causes no events while it runs.
        """
        now = self.now if now is None else max(self.now, now)
        record = self.sessions[session]
        clients = record.clients.values()
        running = [client for client in clients if client.bursting]
        # a burst begins after its page-in, which is not GPU use, although the lease is charged
        since = (max(client.burst_since, client.paging_until) for client in running)
        unreported = max((max(0.0, now - instant) for instant in since), default=0.0)
        waiting = any(client.waiting for client in clients)
        stopped = waiting and record.at_limit  # it waits for no other session, and its burst goes on
        return SessionView(
            waiting=waiting and not stopped,
            running=bool(running) or stopped,
            held=any(client.lease for client in clients) or stopped,
            memory_bytes=sum(client.stated_managed + client.stated_plain for client in clients),
            resident_bytes=sum(map(self._resident, clients)),
            gpu_seconds=record.gpu_seconds + unreported,
            last_activity=now if running or stopped else record.last_activity,
            delivered=Delivered(entitled, delivered, record.waits.counts),
            paged_out_bytes=sum(self.residency.in_host_memory(client) for client in clients),
            guesses_used=record.guesses_used,
            guesses_unused=record.guesses_unused,
        )

    def memory_of(self, client: Client) -> tuple[int, int]:
        """Return a client's stated bytes that are not paged out, and those that are, used or not."""
        stated = client.stated_managed + client.stated_plain
        paged_out = min(stated, max(self.residency.in_host_memory(client), stated - self.vram))
        return stated - paged_out, paged_out

    def _resident(self, client: Client) -> int:
        resident = self.residency.of(client)
        if client.session.suspendable:
            return min(resident, client.stated_managed + client.stated_plain)  # without its contexts
        return resident + min(client.stated_plain, self.vram)
