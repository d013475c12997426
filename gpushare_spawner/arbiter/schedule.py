"""The time slice: which session it belongs to, when it ends, and which sessions run beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpushare_spawner.arbiter import time_slices
from gpushare_spawner.arbiter.accounting import Accounts
from gpushare_spawner.arbiter.memory import VramBudget, together
from gpushare_spawner.arbiter.roster import Roster
from gpushare_spawner.arbiter.session import ArbitratedSession, Client, Presence, RevokeReason
from gpushare_spawner.arbiter.settings import ArbiterSettings
from gpushare_spawner.arbiter.time_slices import HandOffCost, HandOffCredit, TimeSliceLengths

INSTANT = 1e-6
"""Seconds; what is due within a microsecond is due now."""
NEVER = float("inf")


@dataclass
class TimeSlice:
    """The time for which the present holders are left alone. A client that joins them does not make it longer."""

    head: ArbitratedSession
    """The session that the time slice belongs to; the others run beside it."""
    start: float | None
    """None: the head still waits for others to give way."""


@dataclass(frozen=True)
class Selection:
    """The clients that should be on the GPU now."""

    group: list[Client]
    """Those that stay and those that are to come; all other holders are to give way."""
    reason: RevokeReason
    """Why those that work have to give way."""


@dataclass(frozen=True)
class _Promise:
    """When a session's clients are served at the latest. Seconds."""

    rounds: float
    """Weight of all that work for each unit of the session's weight."""
    least: float
    """No client that has waited for less goes first."""
    time_slices: float
    """Time slices of the session in which each of its clients is served twice."""
    debt: float
    """What the session owes now; negative where it is owed time."""


class Schedule:
    """Chooses the clients that are on the GPU. Changes nothing but the time slice."""

    def __init__(self, roster: Roster, accounts: Accounts, cost: HandOffCost, settings: ArbiterSettings) -> None:
        self._roster = roster
        self._accounts = accounts
        self.left_out: list[Client] = []
        """Clients with work that do not fit beside the group that has the memory, or is to have it."""
        self._cost = cost
        self._settings = settings
        self.batch_credit = HandOffCredit(settings, settings.overhead_bound)
        self.interactive_credit = HandOffCredit(settings, settings.interactive_overhead_bound)
        self.bound = settings.overhead_bound
        """Part of the time that hand-offs may cost at present."""
        self.lengths = TimeSliceLengths(0.0, {})
        self.time_slice: TimeSlice | None = None
        self._excess: dict[ArbitratedSession, int] = {}
        self._short_at = -NEVER
        """When those that compete last did not all fit into the memory."""
        self._in_order: list[Client] = []
        """The clients that wait, in the order of their right to a time slice, as of the last choice."""

    def credit(self, early: bool = False) -> HandOffCredit:
        """What a hand-off spends now; `early`: one for an interactive session, there or back."""
        interactively = early or self.bound > self._settings.overhead_bound
        return self.interactive_credit if interactively else self.batch_credit

    def refill(self, elapsed: float) -> None:
        """Time went by, in seconds."""
        self.batch_credit.refill(elapsed)
        self.interactive_credit.refill(elapsed)

    # -- before each decision ----------------------------------------------------------------------------------------

    def plan(self) -> None:
        """Find the sessions that compete, and the length of each session's time slice."""
        self._excess = self._roster.excess()
        if any(self._excess.values()):
            self._short_at = self._roster.now
        vram = self._roster.vram
        weights: dict[str, int] = {}
        costs: dict[str, float] = {}
        known: dict[int, float] = {}
        for session, excess in self._excess.items():
            wanting = [client for client in session.clients.values() if client.wants_memory]
            if wanting:
                weights[session.id] = session.weight
                if session.moves_whole:
                    costs[session.id] = self.hand_off_seconds(wanting[0], excess)
                    continue
                moving = [_moving(client, excess) for client in wanting]
                amount = sum(moving)
                if amount not in known:
                    known[amount] = self._cost.of_session(moving, vram)
                costs[session.id] = known[amount]
        self.bound = time_slices.bound(self._roster.asking, self._settings)
        self.lengths = TimeSliceLengths.plan(weights, costs, self._settings, self.bound)

    @property
    def memory_short(self) -> bool:
        """Whether the sessions that compete do not all fit into the memory, or did not within `long_pause`."""
        return self._roster.now - self._short_at < self._settings.long_pause

    def settle_time_slice(self) -> None:
        """A time slice whose head is gone passes to a session that is present, and does not get longer."""
        staying, time_slice = self._roster.staying, self.time_slice
        if (
            time_slice is not None
            and time_slice.start is None
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
        """Choose the clients that should be on the GPU now. Begins a new time slice where the old one is over."""
        budget, now = self._roster.vram_budget(), self._roster.now
        staying, asking = self._roster.staying, self._roster.asking
        present = {client.session.id for client in staying}
        # among equals the sessions that wait come first
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

        yielding = [client for client in staying if self._gives_way_at(client) <= now + INSTANT]
        yielding.sort(key=lambda client: -(client.quiet_since or 0.0))
        firm = sorted((client for client in staying if client not in yielding), key=by_right)
        self._in_order = sorted(asking, key=by_order)
        waiting = [client for client in self._in_order if client.session is head]
        waiting += [client for client in self._in_order if client.session is not head]

        reason = RevokeReason.TIME_SLICE
        group = budget.fill(waiting, budget.fill(firm))
        inside = set(group)
        blocked = any(client not in inside for client in waiting)
        if blocked and firm and self.time_slice is not None and self.time_slice.start is not None:
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
        # Quiet holders stay where no client needs the memory.
        group = budget.fill(yielding, group)
        inside = set(group)
        self.left_out = [c for c in self._roster.clients if (c.waiting or c.bursting) and c not in inside]
        return Selection(group, reason)

    def granted(self, client: Client, beside_others: bool) -> None:
        """The client has got a lease; its time slice begins, unless it joins that of another session."""
        time_slice = self.time_slice
        if time_slice is None or (
            time_slice.start is None and (time_slice.head is client.session or not beside_others)
        ):
            self.time_slice = TimeSlice(client.session, self._roster.now)

    def due(self) -> float | None:
        """The next instant at which time alone changes the choice."""
        self._begin_without_head()
        instants = [c.revoke_deadline for c in self._roster.holding if c.revoked is not None and not c.overdue]
        firm = self._roster.staying
        if (
            self._blocked(self._roster.vram_budget())
            and firm
            and self.time_slice is not None
            and self.time_slice.start is not None
        ):
            instants.append(self._time_slice_over_at())
            still_asking = [client for client in self._in_order if client.waiting and not client.parked]
            newcomer = self._newcomer(still_asking, firm)
            if newcomer is not None:
                instants.append(self._early_at(newcomer, firm))
            instants += [self._gives_way_at(client) for client in firm if client.quiet_since is not None]
        return min((at for at in instants if self._roster.now + INSTANT < at < NEVER), default=None)

    def _begin_without_head(self) -> None:
        """Where no client gives way any more and the head still does not fit, the time slice belongs to a session that
        is present: it will end."""
        staying = self._roster.staying
        leaving = any(client.revoked is not None and not client.overdue for client in self._roster.holding)
        leaving = leaving or any(session.presence is Presence.LEAVING for session in self._roster.sessions.values())
        if self.time_slice is not None and self.time_slice.start is None and staying and not leaving:
            self.time_slice = TimeSlice(staying[0].session, self._roster.now)

    # -- when what is due --------------------------------------------------------------------------------------------

    def hand_off_seconds(self, client: Client, excess: int) -> float:
        """What it costs to hand the GPU to the client and, later, to another, where no more than `excess` bytes must
        move."""
        moving, session = _moving(client, excess), client.session
        if session.moves_whole:
            return self._cost.of_whole(session.id, moving)
        return self._cost.one_after_the_other(moving)

    def pauses(self, client: Client) -> bool:
        """Whether a quiet client is in a pause that is worth waiting for, with its lease or after it returned it."""
        if client.waiting or client.bursting:
            return False
        until = self._gives_way_at(client) if client.lease else client.pausing_until
        return self._roster.now + INSTANT < until

    def _blocked(self, budget: VramBudget) -> bool:
        """Whether a client waits that does not fit beside those that stay, and not only until those that leave have
        left."""
        asking = self._roster.asking
        chosen = set(budget.fill(asking, self._roster.staying)) if asking else set()
        return any(client not in chosen for client in asking)

    def _gives_way_at(self, client: Client) -> float:
        """When a quiet holder has to give way to the clients that wait; never while it works."""
        if client.quiet_since is None:
            return NEVER
        cost = self.hand_off_seconds(client, self._excess.get(client.session, 0))
        return client.quiet_since + client.gaps.patience(cost)

    def pausing_until(self, client: Client) -> float:
        """Until when a client of a session that moves as a whole is taken to be in a pause that is shorter than its
        moves, whether it keeps its lease or not. The past where it is not, or has not worked yet."""
        if client.last_quiet is None:
            return -NEVER
        return client.last_quiet + client.gaps.patience(self._cost.of_whole(client.session.id, client.session.total))

    def _time_slice_over_at(self) -> float:
        """When the time slice of the holders ends, if a client waits."""
        time_slice = self.time_slice
        if time_slice is None or time_slice.start is None:
            return NEVER
        clients = time_slice.head.clients.values()
        running = sum(client.member for client in clients)
        asking = sum(client.waiting and not client.parked for client in clients)
        # Clients of one session that cannot run together divide the session's time slice.
        length = self.lengths.by_session[time_slice.head.id] * running / max(1, running + asking)
        over = time_slice.start + max(length, self._settings.min_time_slice)
        credit = self.credit()
        if credit.seconds < 0:
            # More was spent on hand-offs than the bound allows: make this time slice longer, but never longer than
            # a round.
            latest = time_slice.start + max(length, self.lengths.round_seconds)
            over = max(over, min(self._roster.now + credit.wait_for(0.0), latest))
        return over

    def _newcomer(self, blocked: list[Client], firm: list[Client]) -> Client | None:
        """The first waiting client that may take the GPU before the time slice is over."""
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
        """When it may do so: those who make way have had some time, and the credit is there for the way and the way
        back."""
        time_slice, settings, budget, now = (
            self.time_slice,
            self._settings,
            self._roster.vram_budget(),
            self._roster.now,
        )
        if time_slice is None or time_slice.start is None:
            return NEVER
        staying = time_slices.group_with(newcomer, firm, budget)
        leaving = [client for client in firm if client not in staying]
        excess = max(0, together([newcomer, *firm]) - budget.for_managed)
        costs = {client: self.hand_off_seconds(client, excess) for client in leaving}
        settled = max((client.came_at + cost + settings.min_time_slice for client, cost in costs.items()), default=0.0)
        # Least attained first; and not to and fro between two that have attained alike.
        least = 2 * newcomer.session.attained
        settled = max([settled, *(now + least - client.session.attained for client in leaving)])
        both_ways = self.hand_off_seconds(newcomer, excess) + max(costs.values(), default=0.0)
        both_ways *= time_slices.part_of_gpu([newcomer], staying)
        return max(settled, now + self.interactive_credit.wait_for(both_ways))

    def _promises(self, asking: list[Client]) -> dict[ArbitratedSession, _Promise]:
        """What was promised to the clients that wait, by session: a session can have many."""
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
        """Since when a client has waited, if that is longer than it was promised; infinite for all others.

        Each session is served within its time slice's part of a round, two at most where time slices overlap. But a
        session's virtual time tells nothing of one client that waits while another runs beside the neighbours; so the
        promise is kept for each client. What the session owes is paid back first.
        """
        if not client.waiting or client.parked:
            return NEVER
        promise, waited = promises[client.session], self._roster.now - client.waiting_since
        if waited <= promise.least:
            return NEVER
        # the debt as it was when the client asked: it has waited for what has been repaid since
        debt = max(client.owed_when_asked, promise.debt)
        return client.waiting_since if waited > (promise.time_slices + debt) * promise.rounds else NEVER


def _moving(client: Client, excess: int) -> int:
    """Bytes that move for the client where `excess` bytes are too many: of what moves as a whole, all or nothing."""
    if client.session.moves_whole:
        return client.session.total if excess else 0
    return min(client.working_set, excess)
