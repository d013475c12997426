"""Turns: whose it is, when it ends, and who runs beside its head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpushare_spawner.arbiter import interactive
from gpushare_spawner.arbiter.accounting import Accounts
from gpushare_spawner.arbiter.co_run import Room
from gpushare_spawner.arbiter.decisions import RevokeReason
from gpushare_spawner.arbiter.quantum import HandOffCost, HandOffCredit, Turns
from gpushare_spawner.arbiter.roster import Roster
from gpushare_spawner.arbiter.session import Client, Session
from gpushare_spawner.arbiter.settings import ArbiterSettings

INSTANT = 1e-6
"""Seconds; what is due within a microsecond is due now."""
NEVER = float("inf")


@dataclass
class Turn:
    """The time for which the present holders are left alone. Whoever joins them meanwhile does not make it longer."""

    head: Session
    """Whose turn it is; the others run beside it."""
    start: float | None
    """None: the head still waits for others to give way."""


@dataclass(frozen=True)
class Choice:
    """Who should be on the GPU now."""

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
    turns: float
    """Time slices of the session in which each of its clients has its turn, twice over."""
    debt: float
    """What the session owes now; negative where it is owed time."""


class Schedule:
    """Chooses who is on the GPU. Changes nothing but the turn."""

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
        self.turns = Turns(0.0, {})
        self.turn: Turn | None = None
        self._excess: dict[Session, int] = {}
        self._in_order: list[Client] = []
        """Those who wait, by their right to a turn, as of the last choice."""

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
        """Who competes, and how long everybody's turn would be."""
        self._excess = self._roster.excess()
        vram = self._roster.vram
        weights: dict[str, int] = {}
        costs: dict[str, float] = {}
        known: dict[int, float] = {}
        for session, excess in self._excess.items():
            moving = [min(c.working_set, excess) for c in session.clients.values() if c.wants_memory]
            if moving:
                weights[session.id] = session.weight
                amount = sum(moving)
                if amount not in known:
                    known[amount] = self._cost.of_session(moving, vram)
                costs[session.id] = known[amount]
        self.bound = interactive.bound(self._roster.asking, self._settings)
        self.turns = Turns.plan(weights, costs, self._settings, self.bound)

    def settle_turn(self) -> None:
        """A turn whose head is gone passes to one of those who are there, and does not get longer."""
        staying, turn = self._roster.staying, self.turn
        if (
            turn is not None
            and turn.start is None
            and any(c.waiting and not c.parked for c in turn.head.clients.values())
        ):
            return
        if not staying:
            self.turn = None
        elif turn is None or turn.start is None:
            self.turn = Turn(staying[0].session, self._roster.now)
        elif not any(client.session is turn.head for client in staying):
            turn.head = max((c.session for c in staying), key=lambda session: self.turns.requests[session.id])

    # -- the decision ------------------------------------------------------------------------------------------------

    def choose(self) -> Choice:
        """Who should be on the GPU now. Begins a new turn where the old one is over."""
        room, now = self._roster.room(), self._roster.now
        staying, asking = self._roster.staying, self._roster.asking
        present = {client.session.id for client in staying}
        # among equals those who wait come first
        candidates = sorted(self.turns.requests, key=lambda session: session in present)
        order = self._accounts.order(candidates, self.turns.requests)
        rank = {session: place for place, session in enumerate(order)}
        head = self.turn.head if self.turn is not None else None
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
        by_turn = keys.__getitem__

        def by_right(client: Client) -> tuple[bool, tuple[float, int, bool, float, int]]:
            return client.session is not head, keys[client]

        yielding = [client for client in staying if self._gives_way_at(client) <= now + INSTANT]
        yielding.sort(key=lambda client: -(client.quiet_since or 0.0))
        firm = sorted((client for client in staying if client not in yielding), key=by_right)
        self._in_order = sorted(asking, key=by_turn)
        waiting = [client for client in self._in_order if client.session is head]
        waiting += [client for client in self._in_order if client.session is not head]

        reason = RevokeReason.QUANTUM
        group = room.fill(waiting, room.fill(firm))
        inside = set(group)
        blocked = any(client not in inside for client in waiting)
        if blocked and firm and self.turn is not None and self.turn.start is not None:
            if self._turn_over_at() <= now + INSTANT:
                group = room.fill(sorted([*firm, *waiting], key=by_turn))
                self.turn = Turn(group[0].session, now if group[0].held else None)
                inside = set(group)
            newcomer = self._newcomer([client for client in self._in_order if client not in inside], firm)
            if newcomer is not None and self._early_at(newcomer, firm) <= now + INSTANT:
                reason = RevokeReason.GUARANTEE
                group = room.fill(waiting, interactive.group_with(newcomer, firm, room))
                if not any(client.session is self.turn.head for client in group):
                    self.turn = Turn(newcomer.session, None)
        # Who is quiet stays where nobody needs the room.
        group = room.fill(yielding, group)
        inside = set(group)
        self.left_out = [c for c in self._roster.clients if (c.waiting or c.bursting) and c not in inside]
        return Choice(group, reason)

    def granted(self, client: Client, beside_others: bool) -> None:
        """The client has got a lease; its turn begins, unless it joins another's."""
        turn = self.turn
        if turn is None or (turn.start is None and (turn.head is client.session or not beside_others)):
            self.turn = Turn(client.session, self._roster.now)

    def due(self) -> float | None:
        """The next instant at which time alone changes the choice."""
        self._begin_without_head()
        instants = [c.revoke_deadline for c in self._roster.holding if c.revoked is not None and not c.overdue]
        firm = self._roster.staying
        if self._blocked(self._roster.room()) and firm and self.turn is not None and self.turn.start is not None:
            instants.append(self._turn_over_at())
            still_asking = [client for client in self._in_order if client.waiting and not client.parked]
            newcomer = self._newcomer(still_asking, firm)
            if newcomer is not None:
                instants.append(self._early_at(newcomer, firm))
            instants += [self._gives_way_at(client) for client in firm if client.quiet_since is not None]
        return min((at for at in instants if self._roster.now + INSTANT < at < NEVER), default=None)

    def _begin_without_head(self) -> None:
        """Where nobody gives way any more and the head still does not fit, those who are there have the turn: it will
        end."""
        staying = self._roster.staying
        leaving = any(client.revoked is not None and not client.overdue for client in self._roster.holding)
        if self.turn is not None and self.turn.start is None and staying and not leaving:
            self.turn = Turn(staying[0].session, self._roster.now)

    # -- when what is due --------------------------------------------------------------------------------------------

    def hand_off_seconds(self, client: Client, excess: int) -> float:
        """What it costs to hand the GPU to the client and, later, to another, where no more than `excess` bytes must
        move."""
        return self._cost.one_after_the_other(min(client.working_set, excess))

    def _blocked(self, room: Room) -> bool:
        """Whether somebody waits who does not fit beside those that stay, and not only until those that leave have
        left."""
        asking = self._roster.asking
        chosen = set(room.fill(asking, self._roster.staying)) if asking else set()
        return any(client not in chosen for client in asking)

    def _gives_way_at(self, client: Client) -> float:
        """When this holder's quiet no longer protects it from those who wait; never while it works."""
        if client.quiet_since is None:
            return NEVER
        cost = self.hand_off_seconds(client, self._excess.get(client.session, 0))
        return client.quiet_since + client.gaps.patience(cost)

    def _turn_over_at(self) -> float:
        """When those who wait may take their turn from the holders."""
        turn = self.turn
        if turn is None or turn.start is None:
            return NEVER
        clients = turn.head.clients.values()
        running = sum(client.member for client in clients)
        asking = sum(client.waiting and not client.parked for client in clients)
        # Clients of one session that cannot run together take turns within the session's turn.
        length = self.turns.requests[turn.head.id] * running / max(1, running + asking)
        over = turn.start + max(length, self._settings.min_quantum)
        credit = self.credit()
        if credit.seconds < 0:
            # More was spent on hand-offs than the bound allows: make this turn longer, but never longer than a round.
            latest = turn.start + max(length, self.turns.round_seconds)
            over = max(over, min(self._roster.now + credit.wait_for(0.0), latest))
        return over

    def _newcomer(self, blocked: list[Client], firm: list[Client]) -> Client | None:
        """The first of those who wait that may take the GPU before the turn is over."""
        holders = {client.session for client in firm}
        return next(
            (
                client
                for client in interactive.newcomers(blocked, self._settings)
                if client.session not in holders
                and self._accounts.lag(client.session.id) >= -self._settings.short_burst
            ),
            None,
        )

    def _early_at(self, newcomer: Client, firm: list[Client]) -> float:
        """When it may do so: those who make way have had some time, and the credit is there for the way and the way
        back."""
        turn, settings, room, now = self.turn, self._settings, self._roster.room(), self._roster.now
        if turn is None or turn.start is None:
            return NEVER
        staying = interactive.group_with(newcomer, firm, room)
        leaving = [client for client in firm if client not in staying]
        excess = max(0, sum(c.footprint for c in [newcomer, *firm]) - room.for_managed)
        costs = {client: self.hand_off_seconds(client, excess) for client in leaving}
        settled = max((client.came_at + cost + settings.min_quantum for client, cost in costs.items()), default=0.0)
        # Least attained first; and not to and fro between two that have attained alike.
        least = 2 * newcomer.session.attained
        settled = max([settled, *(now + least - client.session.attained for client in leaving)])
        both_ways = self.hand_off_seconds(newcomer, excess) + max(costs.values(), default=0.0)
        both_ways *= interactive.part_of_gpu([newcomer], staying)
        return max(settled, now + self.interactive_credit.wait_for(both_ways))

    def _promises(self, asking: list[Client]) -> dict[Session, _Promise]:
        """What was promised to the clients that wait, by session: a session can have many."""
        longest = {client.session: 0.0 for client in asking}
        for client in asking:
            waited = self._roster.now - client.waiting_since
            if waited > longest[client.session]:
                longest[client.session] = waited
        total, promises = self._accounts.total_weight, {}
        for session, waited in longest.items():
            rounds = max(1.0, total / session.weight)
            twice = 2 * self.turns.requests[session.id]
            promise = _Promise(rounds, twice * rounds, 0.0, 0.0)
            if waited > promise.least:
                wanting = sum(c.waiting or c.lease != 0 for c in session.clients.values())
                promise = _Promise(rounds, promise.least, wanting * twice, -self._accounts.lag(session.id))
            promises[session] = promise
        return promises

    def _kept_waiting(self, client: Client, promises: Mapping[Session, _Promise]) -> float:
        """Since when a client has waited, if that is longer than it was promised; infinite for all others.

        By rights everybody is served within its request's time, two at most where turns overlap. But a session's
        virtual time tells nothing of one client that waits while another runs beside the neighbours; so the promise
        is kept for each client. What the session owes is paid back first.
        """
        if not client.waiting or client.parked:
            return NEVER
        promise, waited = promises[client.session], self._roster.now - client.waiting_since
        if waited <= promise.least:
            return NEVER
        # the debt as it was when the client asked: it has waited for what has been repaid since
        debt = max(client.owed_when_asked, promise.debt)
        return client.waiting_since if waited > (promise.turns + debt) * promise.rounds else NEVER
