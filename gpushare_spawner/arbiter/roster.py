"""The sessions and clients of one GPU: their bursts and pauses, their memory, and how others may see them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from gpushare_spawner.arbiter.memory import Residency, VramBudget, together
from gpushare_spawner.arbiter.session import ArbitratedSession, Client, ClientId, Need, Pin, Presence, SessionView
from gpushare_spawner.arbiter.settings import ArbiterSettings
from gpushare_spawner.model.report import Delivered

LOOK_AT_PROVEN = 5
"""How many times less often clients are looked at of which it was proven what they use: they may use more one day."""


class Roster:
    """The sessions and clients of one GPU. `now` is the time of the last event. Unknown names raise KeyError."""

    def __init__(self, vram_bytes: int, settings: ArbiterSettings) -> None:
        self.vram = vram_bytes
        self._settings = settings
        self.sessions: dict[str, ArbitratedSession] = {}
        self._clients: dict[ClientId, Client] = {}
        self.residency = Residency()
        self.now = float("-inf")
        self.crowded_at = float("-inf")
        """When clients that worked together were last seen to fill the GPU."""
        self.holder_grew = False
        """A holder has allocated more since the last decision."""
        self._requests = count(1)
        self._vram_budget: VramBudget | None = None
        """Valid until a client connects, leaves or allocates; None: to be computed again."""
        self.short: dict[Client, None] = {}
        """Clients that are short of memory, the longest first."""
        self._weighed: set[ArbitratedSession] = set()
        """Sessions of which it was found whether they can have what they are short of."""

    # -- the clients ------------------------------------------------------------------------------------------------

    def client(self, client: ClientId) -> Client:
        return self._clients[client]

    @property
    def clients(self) -> Iterable[Client]:
        """In the order in which they connected."""
        return self._clients.values()

    @property
    def waiting(self) -> list[Client]:
        return [client for client in self._clients.values() if client.waiting]

    @property
    def asking(self) -> list[Client]:
        """The clients that wait and do not belong to the group that has the memory, and that can come."""
        return [
            client
            for client in self._clients.values()
            if client.waiting
            and not client.parked
            and not (client.session.whole and (self.stuck(client.session) or client.waits_for_a_pin))
        ]

    def stuck(self, session: ArbitratedSession) -> bool:
        """Whether a session is away and cannot be resumed now: what cannot leave the GPU leaves too little memory for
        what it had there, or the last try failed a moment ago. What its processes are still to have does not count:
        they may never have it."""
        if session.presence is not Presence.AWAY:
            return False
        return self.now < session.retry_at or min(self.vram, session.present) > self.vram_budget().for_managed

    @property
    def staying(self) -> list[Client]:
        """The group that has the memory: those with a lease that was not revoked, and those that are parked."""
        return [c for c in self._clients.values() if c.parked or (c.lease and c.revoked is None)]

    @property
    def holding(self) -> list[Client]:
        """Those with a lease, revoked or not."""
        return [client for client in self._clients.values() if client.lease]

    def connect(self, client: ClientId, session: str) -> None:
        if client in self._clients:
            raise ValueError(f"client {client!r} is connected already")
        known = self.sessions[session]
        connected = Client(client, known, doubted=self.now - known.doubted_at < self._settings.doubt_for)
        self._clients[client] = known.clients[client] = connected
        self.residency.add(connected)
        self._reckon(connected)

    def forget(self, client: Client) -> None:
        """The client is gone, with its lease and its memory."""
        self.end_of_lease(client)
        self._set_short(client, 0)
        del self._clients[client.id], client.session.clients[client.id]
        self.residency.remove(client)
        self._vram_budget = None
        session = client.session
        if not session.clients and session.presence in (Presence.AWAY, Presence.COMING):
            session.presence, session.margin = Presence.ON_GPU, 0  # nothing is left that could come back

    def vram_budget(self) -> VramBudget:
        """The GPU's memory, less what cannot leave it."""
        if self._vram_budget is None:
            self._vram_budget = VramBudget(
                self.vram, sum(client.plain for client in self.clients), self._settings.exclusive
            )
        return self._vram_budget

    def excess(self) -> dict[ArbitratedSession, int]:
        """Bytes by which all sessions with work exceed the memory together, by session: no more has to move for it.

        A session counts for the others with at most the GPU's memory, however many clients it has.
        """
        sums: dict[ArbitratedSession, int] = {}
        excess = -self.vram_budget().for_managed
        for session in self.sessions.values():
            own = together(client for client in session.clients.values() if client.wants_memory)
            sums[session] = own
            excess += min(self.vram, own)
        return {session: max(0, excess + own - min(self.vram, own)) for session, own in sums.items()}

    def elapse(self, seconds: float) -> None:
        """Time went by: the sessions that work have attained more."""
        for session in {client.session for client in self._clients.values() if client.bursting}:
            session.attained += seconds

    # -- what happens to a client ------------------------------------------------------------------------------------

    def set_memory(self, client: Client, managed: int, plain: int, short: int = 0, needed: bool = False) -> None:
        """The client says what it has allocated, in bytes, with `short` bytes that calls wait for. `needed`: perhaps
        also with what it is about to allocate."""
        if managed < 0 or plain < 0 or short < 0:
            raise ValueError(f"amounts of memory are at least 0, not {managed}, {plain} and {short}")
        self._set_short(client, min(short, plain) if client.session.whole else 0)
        grown = max(0, managed - client.claimed_managed)
        if grown:
            client.grown_at = self.now
        client.claimed_managed, client.claimed_plain = managed, plain
        if not needed:
            client.stated = managed + plain - client.short
        self._reckon(client, grown if client.held else 0)
        self.holder_grew = self.holder_grew or (client.held and grown > 0)

    def device_memory(self, client: Client, amount: int | None, unclaimed: int = 0) -> None:
        """The driver shows so many bytes for the client's process, its CUDA context included; None: it does not.
        `unclaimed`: the bytes of it that the process has not claimed."""
        if client.session.presence is not Presence.ON_GPU:
            return  # what it had there is what it needs when it comes back
        if (client.device_memory, client.unclaimed) != (amount, unclaimed):
            client.device_memory, client.unclaimed = amount, unclaimed
            self._reckon(client)

    def working_set(self, client: Client, resident: int) -> None:
        """So many bytes of the client's managed memory are on the GPU now, at most."""
        if client.session.moves_whole:
            return
        before = client.working_set
        client.shown = resident
        client.touched = max(client.touched or 0, resident + self.residency.away(client))
        self._notice_crowd()
        since = max(client.grown_at, client.granted_at, self.crowded_at)
        at_work = client.bursting and self.now - since >= self._settings.look_after
        if at_work or (client.granted_at > self.crowded_at and client.worked_until > client.grown_at):
            client.proven, client.proven_at, client.doubted = client.touched, self.now, False
        self._reckon(client)
        if client.held and client.working_set > before:
            self._reckon(client, client.working_set - before)
            self.holder_grew = True

    @property
    def look_every(self) -> float | None:
        """Seconds in which the next figures are needed: soon where clients that want memory fit together by what was
        not proven of them, less soon where by what was; None where they fit whatever they touch."""
        wanting = [client for client in self._clients.values() if client.wants_memory]
        if (
            sum(min(client.allocated, self.vram) + self._fixed(client) - client.plain for client in wanting)
            <= self.vram_budget().for_managed
        ):
            return None
        if len(wanting) < 2:
            return None
        wanting = [client for client in wanting if not client.session.moves_whole]
        if not wanting:
            return None
        unproven = any(c.proven_at < c.grown_at or c.proven is None or c.doubted for c in wanting)
        return self._settings.look_every if unproven else LOOK_AT_PROVEN * self._settings.look_every

    def _notice_crowd(self) -> None:
        """Doubt what was seen of clients that fill the GPU together."""
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
                for each in client.session.clients.values():  # or its processes could do so one after the other
                    each.doubted = True
                    self._reckon(each)

    def _reckon(self, client: Client, used_now: int = 0) -> None:
        """Find what is to be reckoned with of the client's memory. `used_now`: bytes that a holder has begun to use."""
        if client.session.moves_whole:
            self._reckon_whole(client)
            return
        client.allocated = client.claimed_managed
        fixed = min(client.claimed_plain - client.short + self._settings.context_bytes, self.vram)
        confirmed = min(fixed, client.device_memory or 0)
        plain = min(confirmed + client.unclaimed, self.vram)
        if plain != client.plain:
            client.plain = plain
            self._vram_budget = None
        # what the driver shows of a process holds until it shows more, as for managed memory
        client.unconfirmed = 0 if client.device_memory is not None else fixed - confirmed
        if client.session.need is Need.POSSIBLE:
            client.unconfirmed = min(client.unconfirmed + client.short, self.vram)  # others leave the GPU for it
        used = client.allocated if client.touched is None or client.doubted else client.touched
        client.working_set = min(client.allocated, used, self.vram)
        self.residency.resized(client, self.vram_budget().for_managed, used_now)

    def _fixed(self, client: Client) -> int:
        """Bytes that cannot leave the GPU, as the client says, with its CUDA context."""
        return min(client.claimed_plain + self._settings.context_bytes, self.vram)

    def _reckon_whole(self, client: Client) -> None:
        """All that the client has moves as a whole. A context that the driver does not show yet counts all the same."""
        if client.plain:
            client.plain = 0
            self._vram_budget = None
        client.unconfirmed = 0
        possible = client.session.need is Need.POSSIBLE
        claimed = client.claimed_managed + client.claimed_plain - (0 if possible else client.short)
        context, shown = self._settings.context_bytes, client.device_memory
        client.allocated = client.working_set = min(
            self.vram, max(claimed, claimed + context if shown is None else shown)
        )
        stated = client.stated + context if client.stated else 0
        client.present = min(client.working_set, stated if shown is None else shown)
        self.residency.moved(client)

    def weigh_needs(self) -> None:
        """Find the sessions that can have what they are short of, now or when a pinned session can be suspended.

        They cannot where that exceeds the GPU beside what cannot leave it, or where others have not left for too long.
        """
        weighed = {client.session for client in self.short}
        for session in weighed | self._weighed:
            need = self._need(session)
            if need is not session.need:
                session.need = need
                for client in session.clients.values():
                    self._reckon(client)
        self._weighed = weighed
        for client in self.short:
            if client.waits_for_a_pin and not client.lease:
                client.parked = False  # it keeps no other from the memory meanwhile

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
        claimed, shown = client.claimed_managed + client.claimed_plain, client.device_memory
        return claimed + self._settings.context_bytes if shown is None else max(claimed, shown)

    def _at_most_on_gpu(self, client: Client) -> int:
        """Bytes that the driver shows for the client; as it says, where the driver does not show it."""
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
        """Whether a client has lacked memory for too long."""
        due = self.memory_due(client)
        return due is not None and self.now >= due

    def memory_due(self, client: Client) -> float | None:
        """When a client that is short of memory waits for it no longer; None for others."""
        if not client.waiting or not client.short:
            return None
        due = client.short_since + self._settings.longest_memory_wait
        return due if client.turn_since is None else min(due, client.turn_since + self._settings.memory_timeout)

    def turn_comes(self, client: Client) -> None:
        """The client waits, and is one of those that are to have the GPU now."""
        if client.waiting and client.short and client.turn_since is None:
            client.turn_since = self.now

    def refuse_memory(self, client: Client) -> None:
        """The client is told that what it is short of does not come."""
        client.claimed_plain -= client.short
        self._set_short(client, 0)
        client.turn_since = None
        self._reckon(client)

    def move(self, session: ArbitratedSession, presence: Presence) -> None:
        """The memory of a session that moves as a whole is elsewhere from now on."""
        session.presence = presence
        for client in session.clients.values():
            self._reckon(client)

    def set_pin(self, session: ArbitratedSession, pin: Pin) -> None:
        """Whether the memory of a `whole` session cannot leave the GPU from now on."""
        if session.pin is not pin:
            session.pin = pin
            for client in session.clients.values():
                self._reckon(client)
            self._vram_budget = None

    def wait(self, client: Client, owed: float = 0.0) -> None:
        """It wants a lease from now on. `owed`: seconds that its session owes."""
        client.waiting = True
        client.waiting_since = self.now
        client.owed_when_asked = owed
        client.order = next(self._requests)

    def work_again(self, client: Client) -> None:
        """A burst begins, or is asked for: learn how long the pause was."""
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
        session.quiet_from = None

    def seen_at_work(self, session: str, since: float) -> None:
        """The driver shows that the session has computed since that instant. If all its clients with a lease have been
        quiet for `surely_quiet` then, they work: they did not say so. Nothing for an unknown session."""
        known = self.sessions.get(session)
        holding = [client for client in known.clients.values() if client.lease] if known is not None else []
        latest = since - self._settings.surely_quiet
        if all(client.quiet_since is not None and client.quiet_since <= latest for client in holding):
            for client in holding:
                self.work_again(client)

    def quiet(self, client: Client, since: float) -> None:
        """Its burst ended at that instant; it keeps its lease."""
        client.session.bursts.learn(client.burst_so_far + client.busy_reported - client.busy_before_burst)
        client.burst_so_far = 0.0
        client.quiet_since = client.last_quiet = client.worked_until = since
        self._no_longer_active(client.session, since)

    def report_busy(self, client: Client, busy_seconds: float) -> None:
        """It was busy for so long in this lease; no longer than the lease has lasted."""
        busy = max(client.busy_reported, min(busy_seconds, self.now - client.granted_at))
        client.session.gpu_seconds += busy - client.busy_reported
        client.busy_reported = busy

    def released(self, client: Client) -> None:
        """The client returned its lease."""
        if client.quiet_since is None:
            burst = client.burst_so_far + client.busy_reported - client.busy_before_burst
            # a burst in pieces, because others were owed time, is one burst all the same
            client.burst_so_far = burst if client.parked else 0.0
            if client.revoked is None:
                self.quiet(client, self.now)
            elif burst > self._settings.short_burst:
                # A burst that was cut short tells only that it is long, if it is.
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
        """It has a lease, and its working set comes in."""
        if not client.session.moves_whole:
            self.residency.granted(client, self.vram_budget().for_managed, self.now)
        elif client.session.presence is Presence.AWAY:
            self.move(client.session, Presence.COMING)
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

    # -- views -------------------------------------------------------------------------------------------------------

    def waiting_sessions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(c.session.id for c in sorted(self.waiting, key=lambda c: c.order)))

    def holding_sessions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(c.session.id for c in sorted(self.holding, key=lambda c: c.lease)))

    def view(self, session: str, now: float | None = None) -> SessionView:
        """Return the session as it is at that instant; None: at the last event. A burst alone on the GPU has no events
        while it runs."""
        now = self.now if now is None else max(self.now, now)
        known = self.sessions[session]
        clients = known.clients.values()
        running = [client for client in clients if client.bursting]
        # a burst begins when its pages are in: to page in is no use of the GPU, though the lease is charged
        since = (max(client.burst_since, client.paging_until) for client in running)
        unreported = max((max(0.0, now - instant) for instant in since), default=0.0)
        return SessionView(
            waiting=any(client.waiting for client in clients),
            running=bool(running),
            held=any(client.lease for client in clients),
            memory_bytes=sum(client.claimed_managed + client.claimed_plain for client in clients),
            resident_bytes=sum(map(self._resident, clients)),
            gpu_seconds=known.gpu_seconds + unreported,
            last_activity=now if running else known.last_activity,
            delivered=Delivered(waits=known.waits.counts),
            paged_out_bytes=sum(self.residency.away(client) for client in clients),
        )

    def _resident(self, client: Client) -> int:
        resident = self.residency.of(client)
        if client.session.moves_whole:
            return min(resident, client.claimed_managed + client.claimed_plain)  # without its contexts
        return resident + min(client.claimed_plain, self.vram)
