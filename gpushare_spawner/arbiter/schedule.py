"""Schedule of the time slice: its session, its end and its neighbors. For sessions that all fit, see nested_sets.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpushare_spawner.arbiter import time_slices
from gpushare_spawner.arbiter.accounting import Accounts
from gpushare_spawner.arbiter.memory import VramBudget, together
from gpushare_spawner.arbiter.roster import Roster
from gpushare_spawner.arbiter.session import ArbiterSettings, ArbitratedSession, Client, Presence, RevokeReason
from gpushare_spawner.arbiter.time_slices import HandOffCost, HandOffCredit, TimeSliceLengths

INSTANT = 1e-6
"""Seconds within which an event counts as due now: a microsecond."""
NEVER = float("inf")


@dataclass
class TimeSlice:
    """Time for which the current holders keep the GPU. A client that joins them does not extend it."""

    head: ArbitratedSession
    """Session that owns the time slice; others run alongside."""
    start: float | None
    """Start of the time slice; None if the head still waits for others to give way."""


@dataclass(frozen=True)
class Selection:
    """Clients that should be on the GPU now."""

    group: list[Client]
    """Clients that stay and clients that join; all other holders give way."""
    reason: RevokeReason
    """Reason why working clients give way."""


@dataclass(frozen=True)
class _Promise:
    """Latest time of service for a session's clients. Times are in seconds."""

    rounds: float
    """Weight of all working sessions per unit of the session's weight."""
    least: float
    """Minimum wait of a client that goes first."""
    time_slices: float
    """Seconds of the session's time slices in which each of its clients is served twice."""
    debt: float
    """Seconds that the session owes now; negative: it is owed time."""


class Schedule:
    """Choice of the clients on the GPU. Its only state is the time slice."""

    def __init__(self, roster: Roster, accounts: Accounts, cost: HandOffCost, settings: ArbiterSettings) -> None:
        self._roster = roster
        self._accounts = accounts
        self.left_out: list[Client] = []
        """Clients with work that do not fit next to the group that has or gets the memory."""
        self._cost = cost
        self._settings = settings
        self.batch_credit = HandOffCredit(settings, settings.overhead_bound)
        self.interactive_credit = HandOffCredit(settings, settings.interactive_overhead_bound)
        self.bound = settings.overhead_bound
        """Fraction of the time that hand-offs may cost now."""
        self.lengths = TimeSliceLengths(0.0, {})
        self.time_slice: TimeSlice | None = None
        self._excess: dict[ArbitratedSession, int] = {}
        self._short_at = -NEVER
        """Last time at which not all competing clients fit into memory."""
        self._in_order: list[Client] = []
        """Waiting clients, ordered by their right to a time slice, from the last choice."""

    def credit(self, early: bool = False) -> HandOffCredit:
        """Return the credit that a hand-off spends. `early`: a hand-off to or from an interactive session."""
        interactively = early or self.bound > self._settings.overhead_bound
        return self.interactive_credit if interactively else self.batch_credit

    def refill(self, elapsed: float) -> None:
        """Refill the credits for elapsed seconds."""
        self.batch_credit.refill(elapsed)
        self.interactive_credit.refill(elapsed)

    # -- before each decision ----------------------------------------------------------------------------------------

    def plan(self) -> None:
        """Find the competing sessions and the length of each one's time slice."""
        self._excess = self._roster.excess()
        if any(self._excess.values()):
            self._short_at = self._roster.now
        vram = self._roster.vram
        weights: dict[str, int] = {}
        costs: dict[str, float] = {}
        seconds_by_amount: dict[int, float] = {}
        for session, excess in self._excess.items():
            wanting = [client for client in session.clients.values() if client.wants_memory]
            if wanting:
                weights[session.id] = session.weight
                if session.suspendable:
                    costs[session.id] = self.hand_off_seconds(wanting[0], excess)
                    continue
                moving = [_moving(client, excess) for client in wanting]
                amount = min(sum(moving), vram)
                if amount not in seconds_by_amount:
                    seconds_by_amount[amount] = self._cost.sequential(amount)
                costs[session.id] = seconds_by_amount[amount]
        self.bound = time_slices.bound(self._roster.asking, self._settings)
        self.lengths = TimeSliceLengths.plan(weights, costs, self._settings, self.bound)

    @property
    def memory_short(self) -> bool:
        """Whether not all competing sessions fit into memory, now or within the last `long_pause`."""
        return self._roster.now - self._short_at < self._settings.long_pause

    def pass_on_time_slice(self) -> None:
        """Pass the time slice of a head that has left to a remaining session, without extension."""
        staying, time_slice = self._roster.staying, self.time_slice
        if (
            time_slice is not None
            and time_slice.start is None
            and not time_slice.head.at_limit
            and any(c.waiting and not c.parked for c in time_slice.head.clients.values())
        ):
            return
        if not staying:
            self.time_slice = None
        elif time_slice is None or time_slice.start is None:
            self.time_slice = TimeSlice(staying[0].session, self._roster.now)
        elif not any(client.session is time_slice.head for client in staying):
            time_slice.head = max((c.session for c in staying), key=lambda session: self.lengths.by_session[session.id])

    # -- the decision ------------------------------------------------------------------------------------------------

    def choose(self) -> Selection:
        """Choose the clients that should be on the GPU now. Begins a new time slice after the old one ends.

        staying: the group that has the memory (`Roster.staying`). giving_way: those of them that another client may
        replace at any moment. firm: the others. asking: clients that wait for a lease and may have one. blocked: a
        waiting client found no room. newcomer: the blocked client that may enter before the time slice ends. left_out:
        clients with work that found no room.
        """
        budget, now = self._roster.vram_budget(), self._roster.now
        staying, asking = self._roster.staying, self._roster.asking
        present = {client.session.id for client in staying}
        # at equal rank waiting sessions come first
        candidates = sorted(self.lengths.by_session, key=lambda session: session in present)
        order = self._accounts.order(candidates, self.lengths.by_session)
        rank = {session: place for place, session in enumerate(order)}
        head = self.time_slice.head if self.time_slice is not None else None
        promises = self._promises(asking)
        keys = {
            client: (
                self._kept_waiting(client, promises),
                rank[client.session.id],
                client.held,
                client.last_granted,
                client.order,
            )
            for client in (*staying, *asking)
        }
        by_order = keys.__getitem__

        def by_right(client: Client) -> tuple[bool, tuple[float, int, bool, float, int]]:
            return client.session is not head, keys[client]

        giving_way = [
            client for client in staying if client.session.at_limit or self._gives_way_at(client) <= now + INSTANT
        ]
        giving_way.sort(key=lambda client: -(client.quiet_since or 0.0))
        # firm: holders that need not give way before the time slice ends
        firm = sorted((client for client in staying if client not in giving_way), key=by_right)
        self._in_order = sorted(asking, key=by_order)
        waiting = [client for client in self._in_order if client.session is head]
        waiting += [client for client in self._in_order if client.session is not head]

        reason = RevokeReason.TIME_SLICE
        group = budget.fill(waiting, budget.fill(firm))
        inside = set(group)
        blocked = any(client not in inside for client in waiting)
        if blocked and firm and self.time_slice is not None and self._has_begun:
            if self._time_slice_over_at() <= now + INSTANT:
                group = budget.fill(sorted([*firm, *waiting], key=by_order))
                self.time_slice = TimeSlice(group[0].session, now if group[0].held else None)
                inside = set(group)
            newcomer = self._newcomer([client for client in self._in_order if client not in inside], firm)
            if newcomer is not None and self._early_at(newcomer, firm) <= now + INSTANT:
                reason = RevokeReason.GUARANTEE
                group = budget.fill(waiting, time_slices.group_with(newcomer, firm, budget))
                if not any(client.session is self.time_slice.head for client in group):
                    self.time_slice = TimeSlice(newcomer.session, None)
        # Quiet holders and sessions at their limit stay unless a client needs the memory.
        group = budget.fill(giving_way, group)
        inside = set(group)
        self.left_out = [
            client
            for client in self._roster.clients
            if (client.bursting or (client.waiting and not client.session.at_limit)) and client not in inside
        ]
        return Selection(group, reason)

    def granted(self, client: Client, beside_others: bool) -> None:
        """Record a grant: its time slice begins, unless it joins another session's time slice."""
        time_slice = self.time_slice
        if time_slice is None or (
            time_slice.start is None and (time_slice.head is client.session or not beside_others)
        ):
            self.time_slice = TimeSlice(client.session, self._roster.now)

    def due(self) -> float | None:
        """Return the next instant at which the passage of time alone changes the choice."""
        self._begin_without_head()
        instants = [c.revoke_deadline for c in self._roster.leaseholders if c.revoked is not None and not c.overdue]
        firm = self._roster.staying
        if self._has_begun and firm and self._blocked(self._roster.vram_budget()):
            instants.append(self._time_slice_over_at())
            still_asking = [client for client in self._in_order if client.waiting and not client.parked]
            newcomer = self._newcomer(still_asking, firm)
            if newcomer is not None:
                instants.append(self._early_at(newcomer, firm))
            instants += [self._gives_way_at(client) for client in firm if client.quiet_since is not None]
        return min((at for at in instants if self._roster.now + INSTANT < at < NEVER), default=None)

    def _begin_without_head(self) -> None:
        """Pass the time slice to a session on the GPU if no more clients give way and the head still does not fit.

        The time slice then has an end.
        """
        staying = self._roster.staying
        leaving = any(client.revoked is not None and not client.overdue for client in self._roster.leaseholders)
        leaving = leaving or any(session.presence is Presence.SUSPENDING for session in self._roster.sessions.values())
        if self.time_slice is not None and self.time_slice.start is None and staying and not leaving:
            self.time_slice = TimeSlice(staying[0].session, self._roster.now)

    @property
    def _has_begun(self) -> bool:
        """Whether there is a time slice and its head has the GPU."""
        return self.time_slice is not None and self.time_slice.start is not None

    # -- due times --------------------------------------------------------------------------------------------------

    def hand_off_seconds(self, client: Client, excess: int) -> float:
        """Return the cost of a hand-off to the client and later to another if at most `excess` bytes must move."""
        moving, session = _moving(client, excess), client.session
        if session.suspendable:
            return self._cost.suspend_and_resume(session.id, moving)
        return self._cost.sequential(moving)

    def pauses(self, client: Client) -> bool:
        """Return whether a quiet client, with or without its lease, is in a pause that is worth waiting for."""
        if client.waiting or client.bursting:
            return False
        until = self._gives_way_at(client) if client.lease else client.pausing_until
        return self._roster.now + INSTANT < until

    def _blocked(self, budget: VramBudget) -> bool:
        """Return whether a waiting client does not fit next to the clients that stay."""
        asking = self._roster.asking
        chosen = set(budget.fill(asking, self._roster.staying)) if asking else set()
        return any(client not in chosen for client in asking)

    def _gives_way_at(self, client: Client) -> float:
        """Return the time at which a quiet holder must give way to waiting clients; never while it works."""
        if client.quiet_since is None:
            return NEVER
        cost = self.hand_off_seconds(client, self._excess.get(client.session, 0))
        return client.quiet_since + client.gaps.patience(cost)

    def pausing_until(self, client: Client) -> float:
        """Return the expected end of a short pause of a suspendable session's client.

        A short pause is shorter than the session's moves, with or without a lease. Returns an instant in the past for
        other clients.
        """
        if client.last_quiet is None:
            return -NEVER
        return client.last_quiet + client.gaps.patience(
            self._cost.suspend_and_resume(client.session.id, client.session.total)
        )

    def _time_slice_over_at(self) -> float:
        """Return the end of the holders' time slice if a client waits."""
        time_slice = self.time_slice
        if time_slice is None or time_slice.start is None:
            return NEVER
        clients = time_slice.head.clients.values()
        running = sum(client.member for client in clients)
        asking = sum(client.waiting and not client.parked for client in clients)
        # One session's clients that do not fit together divide its time slice.
        length = self.lengths.by_session[time_slice.head.id] * running / max(1, running + asking)
        over = time_slice.start + max(length, self._settings.min_time_slice)
        credit = self.credit()
        if credit.seconds < 0:
            # Hand-offs have cost more than the bound allows: extend this time slice, at most to a full round.
            latest = time_slice.start + max(length, self.lengths.round_seconds)
            over = max(over, min(self._roster.now + credit.wait_for(0.0), latest))
        return over

    def _newcomer(self, blocked: list[Client], firm: list[Client]) -> Client | None:
        """Return the first waiting client that may get the GPU before the end of the time slice."""
        holders = {client.session for client in firm}
        return next(
            (
                client
                for client in time_slices.newcomers(blocked, self._settings)
                if client.session not in holders
                and self._accounts.lag(client.session.id) >= -self._settings.short_burst
            ),
            None,
        )

    def _early_at(self, newcomer: Client, firm: list[Client]) -> float:
        """Return the time at which the newcomer may get the GPU.

        The clients that give way must have had some time, and the credit must cover the hand-off in both directions.
        """
        settings, budget, now = self._settings, self._roster.vram_budget(), self._roster.now
        if not self._has_begun:
            return NEVER
        staying = time_slices.group_with(newcomer, firm, budget)
        leaving = [client for client in firm if client not in staying]
        excess = max(0, together([newcomer, *firm]) - budget.for_managed)
        costs = {client: self.hand_off_seconds(client, excess) for client in leaving}
        earliest = max((client.came_at + cost + settings.min_time_slice for client, cost in costs.items()), default=0.0)
        # Least attained service first, without alternation between two sessions of equal attained service.
        least = 2 * newcomer.session.attained
        earliest = max([earliest, *(now + least - client.session.attained for client in leaving)])
        both_ways = self.hand_off_seconds(newcomer, excess) + max(costs.values(), default=0.0)
        both_ways *= time_slices.part_of_gpu([newcomer], staying)
        return max(earliest, now + self.interactive_credit.wait_for(both_ways))

    def _promises(self, asking: list[Client]) -> dict[ArbitratedSession, _Promise]:
        """Return the promises to waiting clients, by session, because a session can have many clients."""
        longest = {client.session: 0.0 for client in asking}
        for client in asking:
            waited = self._roster.now - client.waiting_since
            if waited > longest[client.session]:
                longest[client.session] = waited
        total, promises = self._accounts.total_weight, {}
        for session, waited in longest.items():
            rounds = max(1.0, total / session.weight)
            twice = 2 * self.lengths.by_session[session.id]
            promise = _Promise(rounds, twice * rounds, 0.0, 0.0)
            if waited > promise.least:
                wanting = sum(c.waiting or c.lease != 0 for c in session.clients.values())
                promise = _Promise(rounds, promise.least, wanting * twice, -self._accounts.lag(session.id))
            promises[session] = promise
        return promises

    def _kept_waiting(self, client: Client, promises: Mapping[ArbitratedSession, _Promise]) -> float:
        """Return the start of a client's wait if the wait is longer than promised; infinity otherwise.

        Each session is served within its time slice's part of a round, or within two rounds if time slices overlap. A
        session's virtual time does not show that one client waits while another runs alongside the neighbors, so the
        promise applies to each client. The session's debt is repaid first.
        """
        if not client.waiting or client.parked:
            return NEVER
        promise, waited = promises[client.session], self._roster.now - client.waiting_since
        if waited <= promise.least:
            return NEVER
        # the debt at the time of the client's request: the client has waited for the repayment since
        debt = max(client.owed_at_request, promise.debt)
        return client.waiting_since if waited > (promise.time_slices + debt) * promise.rounds else NEVER


def _moving(client: Client, excess: int) -> int:
    """Return the bytes that move for the client, given `excess` bytes; all or none for a suspendable session."""
    if client.session.suspendable:
        return client.session.total if excess else 0
    return min(client.working_set, excess)
