"""The arbiter of one physical GPU: clients' messages and the time go in, decisions come out. docs/arbiter.md explains the rules.

Every method takes `now`, seconds on any monotonic clock, and returns the decisions that follow, in the order in which they are to
be sent. Unknown clients and sessions raise KeyError; stale, doubled and late messages are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from gpushare_spawner.arbiter.co_run import Room
from gpushare_spawner.arbiter.decisions import ClientId, Decision, Grant, PageOut, Revoke, RevokeReason
from gpushare_spawner.arbiter.fairness import FairOrder
from gpushare_spawner.arbiter.quantum import HandOffCost, HandOffCredit, Turns
from gpushare_spawner.arbiter.residency import Residency
from gpushare_spawner.arbiter.session import Client, Session, SessionView
from gpushare_spawner.arbiter.settings import ArbiterSettings
from gpushare_spawner.arbiter.think_time import patience

INSTANT = 1e-6
"""Seconds; what is due within a microsecond is due now."""


@dataclass
class _Turn:
    """The time for which the present holders are left alone. Whoever joins them meanwhile does not make it longer."""

    head: Session
    """Whose turn it is; the others run beside it."""
    start: float | None
    """None: the head still waits for others to give way."""


class GpuArbiter:
    """Leases for one GPU. See the module's text for the conventions of all methods."""

    def __init__(self, vram_bytes: int, settings: ArbiterSettings = ArbiterSettings()) -> None:  # noqa: B008 (frozen)
        if vram_bytes <= 0:
            raise ValueError(f"a GPU has more than {vram_bytes} bytes of memory")
        self._vram = vram_bytes
        self._settings = settings
        self._sessions: dict[str, Session] = {}
        self._clients: dict[ClientId, Client] = {}
        self._fair = FairOrder()
        self._residency = Residency()
        self._cost = HandOffCost(settings)
        self._credit = HandOffCredit(settings)
        self._turns = Turns(0.0, {})
        self._turn: _Turn | None = None
        self._charged: dict[str, float] = {}
        """Sessions that are charged at present, and since when they have been charged without a break."""
        self._charged_until: dict[str, float] = {}
        self._grown = False
        """A holder has allocated more since the last decision."""
        self._now = float("-inf")
        self._wakeup: float | None = None
        self._leases = count(1)
        self._requests = count(1)

    # -- sessions ----------------------------------------------------------------------------------------------------

    def add_session(self, session: str, weight: int, now: float) -> list[Decision]:
        """A session with a share of `weight` units (0: released). Raises ValueError if it is there already."""
        if session in self._sessions:
            raise ValueError(f"session {session!r} is on this GPU already")
        self._check_weight(weight)
        self._advance(now)
        added = Session(session, weight)
        self._sessions[session] = added
        self._fair.add(session, added.weight)
        return self._decide()

    def set_weight(self, session: str, weight: int, now: float) -> list[Decision]:
        """Change the session's weight. 0 releases it: its leases are revoked, and all its pages go to host memory.

        A released session that asks again is served as if its weight were 1, until a weight is set.
        """
        known = self._sessions[session]
        self._check_weight(weight)
        self._advance(now)
        known.share = weight
        self._fair.set_weight(session, known.weight)
        decisions: list[Decision] = []
        if weight == 0:
            for client in known.clients.values():
                if client.held:
                    everything = self._residency.order_out(client, client.managed)
                    decisions.append(self._revoke(client, RevokeReason.RELEASED, everything))
                elif not client.lease and not client.waiting:
                    decisions += self._page_out(client, client.managed)
        return decisions + self._decide()

    def remove_session(self, session: str, now: float) -> list[Decision]:
        """The session is over, with all its clients."""
        known = self._sessions[session]
        self._advance(now)
        for client in list(known.clients.values()):
            self._forget_client(client)
        del self._sessions[session]
        self._fair.remove(session)
        self._charged.pop(session, None)
        self._charged_until.pop(session, None)
        return self._decide()

    # -- clients -----------------------------------------------------------------------------------------------------

    def connect(self, client: ClientId, session: str, now: float) -> list[Decision]:
        """A process of the session. Raises ValueError if the client is connected already."""
        if client in self._clients:
            raise ValueError(f"client {client!r} is connected already")
        known = self._sessions[session]
        self._advance(now)
        connected = Client(client, known)
        self._clients[client] = known.clients[client] = connected
        self._residency.add(connected)
        return self._decide()

    def disconnect(self, client: ClientId, now: float) -> list[Decision]:
        """The process left, or crashed: its lease is free and its memory is gone."""
        known = self._clients[client]
        self._advance(now)
        self._end_of_lease(known)
        self._forget_client(known)
        return self._decide()

    def memory(self, client: ClientId, managed: int, plain: int, now: float) -> list[Decision]:
        """What the client has allocated, in bytes: managed, and plain (which cannot leave the GPU)."""
        known = self._clients[client]
        self._advance(now)
        self._set_memory(known, managed, plain)
        return self._decide()

    def request(self, client: ClientId, managed: int, plain: int, now: float) -> list[Decision]:
        """The client has work and wants a lease. A client that has one is told it again."""
        known = self._clients[client]
        self._advance(now)
        self._set_memory(known, managed, plain)
        decisions: list[Decision] = []
        if known.revoked is not None:
            known.again = True
        elif known.lease:
            self._work_again(known)
            decisions.append(Grant(known.id, known.lease, 0.0, 0))
        elif not known.waiting:
            self._work_again(known)
            self._wait(known)
        return decisions + self._decide()

    def idle(
        self, client: ClientId, lease: int, busy_seconds: float, quiet_seconds: float, now: float
    ) -> list[Decision]:
        """The client's burst is over and it keeps its lease. It was busy so long in this lease, and quiet since so long."""
        known = self._clients[client]
        self._advance(now)
        if lease and lease == known.lease and known.quiet_since is None:
            quiet_seconds = min(max(0.0, quiet_seconds), self._now - known.burst_since)
            self._report_busy(known, busy_seconds)
            known.session.bursts.learn(known.busy_reported - known.busy_before_burst)
            self._refund(known, quiet_seconds)
            self._quiet(known, self._now - quiet_seconds)
        return self._decide()

    def busy(self, client: ClientId, lease: int, now: float) -> list[Decision]:
        """The client works again under the lease it kept."""
        known = self._clients[client]
        self._advance(now)
        if lease and lease == known.lease and known.quiet_since is not None:
            self._work_again(known)
        return self._decide()

    def release(self, client: ClientId, lease: int, busy_seconds: float, now: float) -> list[Decision]:
        """The client gives its lease back; what it was told to page out follows."""
        known = self._clients[client]
        self._advance(now)
        if not lease or lease != known.lease:
            return self._decide()
        self._report_busy(known, busy_seconds)
        if known.quiet_since is None:
            burst = known.busy_reported - known.busy_before_burst
            # A burst that was cut short tells only that it is long, if it is.
            if known.revoked is None or burst > self._settings.short_burst:
                known.session.bursts.learn(burst)
            if known.revoked is None:
                self._quiet(known, self._now)
        again = known.again
        self._end_of_lease(known)
        decisions: list[Decision] = []
        if again:
            self._wait(known)
        elif known.session.share == 0:
            decisions += self._page_out(known, known.managed)
        return decisions + self._decide()

    def paged_in(self, client: ClientId, amount: int, seconds: float, now: float) -> list[Decision]:
        """The client has prefetched so many bytes in so many seconds."""
        self._clients[client]
        self._advance(now)
        self._cost.bandwidth_in.learn(amount, seconds)
        return self._decide()

    def paged_out(self, client: ClientId, amount: int, seconds: float, now: float) -> list[Decision]:
        """The client has moved so many bytes to host memory in so many seconds."""
        known = self._clients[client]
        self._advance(now)
        self._cost.bandwidth_out.learn(amount, seconds)
        self._residency.paged_out(known, amount)
        return self._decide()

    # -- time --------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Decision]:
        """Time went by. Needed at `next_wakeup`; at any other time it does no harm."""
        self._advance(now)
        return self._decide()

    def next_wakeup(self) -> float | None:
        """The next instant at which time alone decides something; None: there is none, and nothing need be polled."""
        return self._wakeup

    # -- views -------------------------------------------------------------------------------------------------------

    def waiting(self) -> tuple[str, ...]:
        """Sessions of which a client has work and no lease, the longest waiting first."""
        waiting = sorted((client for client in self._clients.values() if client.waiting), key=lambda c: c.order)
        return tuple(dict.fromkeys(client.session.id for client in waiting))

    def holders(self) -> tuple[str, ...]:
        """Sessions that hold a lease, revoked ones that have not been given back included; the oldest lease first."""
        holding = sorted((client for client in self._clients.values() if client.lease), key=lambda c: c.lease)
        return tuple(dict.fromkeys(client.session.id for client in holding))

    def session_view(self, session: str) -> SessionView:
        """The session as it is now."""
        known = self._sessions[session]
        clients = list(known.clients.values())
        running = [client for client in clients if client.bursting]
        unreported = max((self._now - client.burst_since for client in running), default=0.0)
        return SessionView(
            waiting=any(client.waiting for client in clients),
            running=bool(running),
            held=any(client.lease for client in clients),
            memory_bytes=sum(client.managed + client.plain for client in clients),
            resident_bytes=sum(self._residency.of(client) + client.plain for client in clients),
            gpu_seconds=known.gpu_seconds + unreported,
            last_activity=self._now if running else known.last_activity,
        )

    # -- bookkeeping -------------------------------------------------------------------------------------------------

    @staticmethod
    def _check_weight(weight: int) -> None:
        if weight < 0:
            raise ValueError(f"a weight is at least 0, not {weight}")

    def _set_memory(self, client: Client, managed: int, plain: int) -> None:
        if managed < 0 or plain < 0:
            raise ValueError(f"amounts of memory are at least 0, not {managed} and {plain}")
        grown = managed - client.managed
        client.managed, client.plain = managed, plain
        used_now = max(0, grown) if client.held else 0
        self._residency.resized(client, self._room().for_managed, used_now)
        self._grown = self._grown or (client.held and grown > 0)

    def _room(self) -> Room:
        clients = self._clients.values()
        always = sum(client.plain for client in clients) + len(clients) * self._settings.context_bytes
        return Room(self._vram, always, self._settings.exclusive)

    def _wait(self, client: Client) -> None:
        client.waiting = True
        client.waiting_since = self._now
        client.order = next(self._requests)

    def _work_again(self, client: Client) -> None:
        """A burst begins, or is asked for: learn how long the pause was."""
        if client.last_quiet is not None:
            client.gaps.learn(self._now - client.last_quiet)
        client.last_quiet = client.quiet_since = None
        client.burst_since = self._now
        client.busy_before_burst = client.busy_reported
        session = client.session
        others = any(c is not client and (c.waiting or c.bursting) for c in session.clients.values())
        if not others:
            since = session.quiet_from
            session.paused = since is None or self._now - since >= self._settings.pause
        session.quiet_from = None

    def _quiet(self, client: Client, since: float) -> None:
        client.quiet_since = client.last_quiet = since
        self._no_longer_active(client.session, since)

    def _no_longer_active(self, session: Session, since: float) -> None:
        session.last_activity = max(since, session.last_activity or since)
        if not any(client.waiting or client.bursting for client in session.clients.values()):
            session.quiet_from = since

    def _report_busy(self, client: Client, busy_seconds: float) -> None:
        busy = max(client.busy_reported, min(busy_seconds, self._now - client.granted_at))
        client.session.gpu_seconds += busy - client.busy_reported
        client.busy_reported = busy

    def _refund(self, client: Client, quiet_seconds: float) -> None:
        """The quiet time before a burst's end was noticed is not charged."""
        since = self._charged.get(client.session.id)
        if since is None or any(c is not client and c.lease for c in client.session.clients.values()):
            return
        charged = self._now - max(since, client.granted_at)
        # Never all of it: a client that calls every burst quiet time still gets on in virtual time.
        self._fair.charge(client.session.id, -min(quiet_seconds, self._settings.quiet_refund, 0.9 * charged))

    def _end_of_lease(self, client: Client) -> None:
        if client.lease:
            was_bursting = client.bursting
            client.lease = 0
            client.quiet_since = client.revoked = None
            client.overdue = client.again = False
            client.busy_reported = client.busy_before_burst = 0.0
            if was_bursting:
                self._no_longer_active(client.session, self._now)

    def _forget_client(self, client: Client) -> None:
        client.lease = 0
        client.waiting = False
        del self._clients[client.id], client.session.clients[client.id]
        self._residency.remove(client)

    def _revoke(self, client: Client, reason: RevokeReason, page_out: int) -> Revoke:
        client.revoked = reason
        client.revoke_deadline = self._now + self._settings.revoke_timeout
        return Revoke(client.id, client.lease, page_out, reason)

    def _page_out(self, client: Client, amount: int) -> list[Decision]:
        ordered = self._residency.order_out(client, amount)
        return [PageOut(client.id, ordered)] if ordered else []

    # -- charging ----------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Let the time go by: charge those who kept others waiting."""
        if now <= self._now:
            return
        elapsed = now - self._now if self._charged or self._now > float("-inf") else 0.0
        self._now = now
        self._credit.refill(elapsed)
        for session in self._charged:
            self._fair.charge(session, elapsed)
            self._charged_until[session] = now
        total = max(1, self._fair.total_weight)
        # By rights nobody is ever behind by more than the time in which everybody's request is served once.
        behind = 2 * max((r / self._sessions[s].weight for s, r in self._turns.requests.items()), default=0.0)
        for session in self._charged:
            debt = self._settings.max_debt * self._sessions[session].weight / total
            self._fair.forgive(session, max(2 * self._turns.requests.get(session, 0.0), debt))
        for session, known in self._sessions.items():
            clients = known.clients.values()
            if any(c.held for c in clients) and not any(c.waiting for c in clients):
                self._fair.forget(session, behind * known.weight)

    def _recharge(self) -> None:
        """Settle who is charged from now on: the sessions whose leases keep others waiting.

        Who is met in the middle of a turn is charged for the turn so far, at most for one request: it had the GPU.
        """
        charged = {}
        for session in self._in_the_way():
            if session.id in self._charged:
                charged[session.id] = self._charged[session.id]
                continue
            charged[session.id] = self._now
            start = self._turn.start if self._turn is not None else None
            if start is not None:
                alone = self._now - max(start, self._charged_until.get(session.id, start))
                self._fair.charge(session.id, min(alone, self._turns.requests.get(session.id, 0.0)))
            self._charged_until[session.id] = self._now
        self._charged = charged

    def _in_the_way(self) -> list[Session]:
        waiting = [client for client in self._clients.values() if client.waiting]
        holding = [client for client in self._clients.values() if client.lease]
        if not waiting or not holding:
            return [client.session for client in holding if client.overdue]
        room = self._room()
        blocking: dict[Session, None] = {}
        for waiter in waiting:
            found = [
                client
                for client in holding
                if client.overdue
                or not room.fits([client, waiter])
                or room.fits([waiter, *(c for c in holding if c is not client and not c.overdue)])
            ]
            if not room.fits([waiter, *(c for c in holding if not c.overdue)]):
                blocking.update((client.session, None) for client in found or holding)
        return list(blocking)

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _decide(self) -> list[Decision]:
        for client in self._clients.values():
            if client.revoked is not None and self._now + INSTANT >= client.revoke_deadline:
                client.overdue = True
        self._plan_turns()
        self._recharge()
        self._settle_turn()
        decisions = self._choose()
        self._recharge()
        return decisions

    def _plan_turns(self) -> None:
        wanting = {
            session: [client for client in session.clients.values() if client.waiting or client.lease]
            for session in self._sessions.values()
        }
        room = self._room()
        moving = max(0, sum(c.managed for clients in wanting.values() for c in clients) - room.for_managed)
        weights = {session.id: session.weight for session, clients in wanting.items() if clients}
        costs = {
            session.id: sum(self._hand_off_seconds(client, moving) for client in clients)
            for session, clients in wanting.items()
            if clients
        }
        self._turns = Turns.plan(weights, costs, self._settings)
        for session in self._sessions:
            if session not in weights:
                self._fair.leave(session)
        for session in weights:
            self._fair.join(session, self._turns.requests[session])

    def _hand_off_seconds(self, client: Client, moving: int) -> float:
        amount = min(client.managed, moving)
        return self._cost.one_after_the_other(amount)

    def _settle_turn(self) -> None:
        """A turn whose head is gone passes to one of those who are there, and does not get longer."""
        staying = [client for client in self._clients.values() if client.held]
        turn = self._turn
        if turn is not None and turn.start is None and any(c.waiting for c in turn.head.clients.values()):
            return
        if not staying:
            self._turn = None
            return
        if turn is None or turn.start is None:
            self._turn = _Turn(staying[0].session, self._now)
        elif not any(client.session is turn.head for client in staying):
            turn.head = max((c.session for c in staying), key=lambda s: self._turns.requests[s.id])

    def _choose(self) -> list[Decision]:
        room = self._room()
        clients = self._clients.values()
        waiting = [client for client in clients if client.waiting]
        staying = [client for client in clients if client.held]
        rank = {
            session: place for place, session in enumerate(self._fair.order(self._turns.requests, self._turns.requests))
        }
        head = self._turn.head if self._turn is not None else None

        def by_turn(client: Client) -> tuple[float, int, bool, float, int]:
            return self._kept_waiting(client), rank[client.session.id], client.held, client.last_granted, client.order

        def by_right(client: Client) -> tuple[bool, tuple[float, int, bool, float, int]]:
            return client.session is not head, by_turn(client)

        yielding = [client for client in staying if self._gives_way_at(client) <= self._now + INSTANT]
        yielding.sort(key=lambda client: -(client.quiet_since or 0.0))
        firm = sorted((client for client in staying if client not in yielding), key=by_right)
        waiting.sort(key=by_right)

        reason = RevokeReason.QUANTUM
        group = room.fill(waiting, room.fill(firm))
        blocked = [client for client in waiting if client not in group]
        due: list[float] = []
        if blocked and firm and self._turn is not None and self._turn.start is not None:
            over, early, newcomer = self._turn_over_at(firm, waiting), float("inf"), None
            for client in sorted(blocked, key=by_turn):
                at = self._early_at(client, firm)
                if at < early:
                    early, newcomer = at, client
            if over <= self._now + INSTANT:
                group = room.fill(sorted([*firm, *waiting], key=by_turn))
                self._begin_turn(group[0])
            elif newcomer is not None and early <= self._now + INSTANT:
                reason = RevokeReason.GUARANTEE
                group = room.fill([newcomer, *firm, *waiting])
                self._begin_turn(newcomer)
            else:
                due += [over, early]
            blocked = [client for client in waiting if client not in group]
        group = room.fill(yielding, group)
        if blocked:
            due += [self._gives_way_at(client) for client in firm if client.quiet_since is not None]

        decisions = self._carry_out(room, group, waiting, staying, reason)
        turn = self._turn
        if blocked and not due and turn is not None and turn.start is not None:
            # The turn has just begun: its end is what those who wait will wait for.
            firm = [client for client in self._clients.values() if client.held]
            due.append(self._turn_over_at(firm, [client for client in waiting if client.waiting]))
            due += [self._early_at(client, firm) for client in blocked]
            due += [self._gives_way_at(client) for client in firm if client.quiet_since is not None]
        due += [client.revoke_deadline for client in clients if client.revoked is not None and not client.overdue]
        self._wakeup = min((at for at in due if at < float("inf")), default=None)
        return decisions

    def _kept_waiting(self, client: Client) -> float:
        """Since when a client has waited, if that is longer than it was promised; infinite for all others.

        By rights everybody is served within its request's time, two at most where turns overlap. But a session's virtual time
        tells nothing of one client that waits while another runs beside the neighbours; so the promise is kept for each client.
        """
        if not client.waiting:
            return float("inf")
        session = client.session
        asking = sum(c.waiting or c.lease != 0 for c in session.clients.values())
        promised = 2 * asking * self._turns.requests[session.id] * self._fair.total_weight / session.weight
        return client.waiting_since if self._now - client.waiting_since > promised else float("inf")

    def _begin_turn(self, first: Client) -> None:
        self._turn = _Turn(first.session, self._now if first.held else None)

    def _gives_way_at(self, client: Client) -> float:
        """When this holder's quiet no longer protects it from those who wait; infinite while it works."""
        if client.quiet_since is None:
            return float("inf")
        everybody = sum(c.managed for c in self._clients.values() if c.waiting or c.lease)
        moving = max(0, everybody - self._room().for_managed)
        return client.quiet_since + patience(client.gaps.seconds, self._hand_off_seconds(client, moving))

    def _turn_over_at(self, firm: list[Client], waiting: list[Client]) -> float:
        """When those who wait may take their turn from the holders."""
        turn = self._turn
        assert turn is not None
        assert turn.start is not None
        request = self._turns.requests[turn.head.id]
        running = sum(client.session is turn.head for client in firm)
        asking = sum(client.session is turn.head for client in waiting)
        # Clients of one session that cannot run together take turns within the session's turn.
        length = request * running / max(1, running + asking)
        over = turn.start + max(length, self._settings.min_quantum)
        if self._credit.seconds < 0:
            # More was spent on hand-offs than the bound allows: make this turn longer, but never longer than a round.
            latest = turn.start + max(length, self._turns.round_seconds)
            over = max(over, min(self._now + self._credit.wait_for(0.0), latest))
        return over

    def _early_at(self, client: Client, firm: list[Client]) -> float:
        """When a newcomer may take the GPU before the turn is over; infinite: not at all."""
        session, turn = client.session, self._turn
        typical = session.bursts.seconds
        if (
            turn is None
            or turn.start is None
            or not session.paused
            or (typical is not None and typical > self._settings.short_burst)
            or not self._fair.eligible(session.id)
            or any(holder.session is session for holder in firm)
        ):
            return float("inf")
        room = self._room()
        moving = max(0, sum(c.managed for c in [client, *firm]) - room.for_managed)
        costs = [self._hand_off_seconds(holder, moving) for holder in firm]
        both_ways = self._hand_off_seconds(client, moving) + max(costs, default=0.0)
        # A holder that may itself be about to finish a short burst is not made to give way to another such.
        lasting = [holder.session.bursts.seconds or 0.0 for holder in firm]
        patient = any(seconds <= self._settings.short_burst for seconds in lasting)
        undisturbed = self._settings.short_burst if patient else self._settings.min_quantum
        settled = turn.start + max(costs, default=0.0) + undisturbed
        return max(settled, self._now + self._credit.wait_for(both_ways))

    def _carry_out(
        self, room: Room, group: list[Client], waiting: list[Client], staying: list[Client], reason: RevokeReason
    ) -> list[Decision]:
        """Bring the holders to what the group says: revoke, make room, grant."""
        incoming = [client for client in group if client.waiting]
        outgoing = [client for client in staying if client not in group]
        forced = any(client.quiet_since is None for client in outgoing)
        # Those without a lease make room first, the longest quiet ones before the others.
        bystanders = sorted(
            (client for client in self._clients.values() if not client.lease and client not in incoming),
            key=lambda client: (client.waiting, client.last_granted),
        )
        need = sum(self._residency.missing(client, room.for_managed) for client in incoming)
        need = min(need, room.for_managed)
        if not incoming and self._grown and self._residency.free(room.for_managed) < 0:
            need = self._settings.page_out_step
        self._grown = False
        # Without need nothing is ordered, whatever is thought to be on the GPU: a client that cannot page out is not asked for ever.
        orders = self._residency.make_room(need, room.for_managed, [*bystanders, *outgoing]) if need else []
        amounts = {client: amount for client, amount in orders}
        decisions: list[Decision] = []
        for client in outgoing:
            quiet = client.quiet_since is not None
            client.displaced = client.displaced or not quiet
            decisions.append(self._revoke(client, RevokeReason.IDLE if quiet else reason, amounts.get(client, 0)))
        decisions += [PageOut(client.id, amount) for client, amount in orders if client not in outgoing]
        for client in incoming:
            client.forced_in = client.forced_in or forced
            present = [other for other in self._clients.values() if other.in_the_room]
            if room.fits([*present, client]):
                decisions.append(self._grant(client, room, contended=len(group) < len({*group, *waiting, *staying})))
        return decisions

    def _grant(self, client: Client, room: Room, contended: bool) -> Grant:
        held_before = any(other.held for other in self._clients.values())
        prefetch = self._residency.missing(client, room.for_managed)
        self._residency.granted(client, room.for_managed)
        client.lease = next(self._leases)
        client.waiting = False
        client.granted_at = client.burst_since = client.last_granted = self._now
        client.busy_reported = client.busy_before_burst = 0.0
        client.quiet_since = None
        if client.forced_in or client.displaced:
            self._credit.spend(self._cost.both_ways_at_once(prefetch))
        client.forced_in = client.displaced = False
        if self._turn is None or (self._turn.start is None and (self._turn.head is client.session or not held_before)):
            self._turn = _Turn(client.session, self._now)
        quantum = self._turns.requests[self._turn.head.id] if contended else 0.0
        return Grant(client.id, client.lease, quantum, prefetch)
