"""Who is charged for the time that goes by: the sessions whose leases keep somebody waiting."""

from __future__ import annotations

from collections.abc import Mapping

from gpushare_spawner.arbiter.fairness import FairOrder
from gpushare_spawner.arbiter.roster import Roster
from gpushare_spawner.arbiter.session import Client, Session
from gpushare_spawner.arbiter.settings import ArbiterSettings


class Charging:
    """Turns the time of leases into virtual time. `requests`: seconds of each competing session's turn."""

    def __init__(self, roster: Roster, settings: ArbiterSettings) -> None:
        self._roster = roster
        self._settings = settings
        self.fair = FairOrder()
        self._since: dict[str, float] = {}
        """Sessions that are charged at present, and since when without a break."""
        self._until: dict[str, float] = {}
        """Up to when a session was charged last."""

    def forget(self, session: str) -> None:
        """The session is gone."""
        self.fair.remove(session)
        self._since.pop(session, None)
        self._until.pop(session, None)

    def advance(self, elapsed: float, requests: Mapping[str, float]) -> None:
        """So many seconds have gone by, up to the roster's present."""
        sessions = self._roster.sessions
        for session in self._since:
            self.fair.charge(session, elapsed)
            self._until[session] = self._roster.now
        total = max(1, self.fair.total_weight)
        for session in self._since:
            debt = self._settings.max_debt * sessions[session].weight / total
            self.fair.forgive(session, max(2 * requests.get(session, 0.0), debt))
        # By rights nobody is ever behind by more than the time in which everybody's request is served once.
        behind = 2 * max((seconds / sessions[name].weight for name, seconds in requests.items()), default=0.0)
        for name, known in sessions.items():
            clients = known.clients.values()
            if any(client.held for client in clients) and not any(client.waiting for client in clients):
                self.fair.forget(name, behind * known.weight)

    def settle(self, turn_start: float | None, requests: Mapping[str, float]) -> None:
        """Find who is charged from now on.

        Who is met in the middle of a turn is charged for the turn so far, at most for one request: it had the GPU.
        """
        since = {}
        now = self._roster.now
        for session in self._in_the_way():
            if session.id in self._since:
                since[session.id] = self._since[session.id]
                continue
            since[session.id] = now
            if turn_start is not None:
                uncharged = now - max(turn_start, self._until.get(session.id, turn_start))
                self.fair.charge(session.id, min(uncharged, requests.get(session.id, 0.0)))
            self._until[session.id] = now
        self._since = since

    def refund(self, client: Client, quiet_seconds: float) -> None:
        """The quiet time before the end of a burst was noticed is not charged."""
        session = client.session
        since = self._since.get(session.id)
        if since is None or any(other is not client and other.lease for other in session.clients.values()):
            return
        charged = self._roster.now - max(since, client.granted_at, client.burst_since)
        # Never all of it: a client that calls every burst quiet time still gets on in virtual time.
        self.fair.charge(session.id, -min(quiet_seconds, self._settings.quiet_refund, 0.9 * charged))

    def _in_the_way(self) -> list[Session]:
        """Sessions without whose leases one of those who wait could run, now or beside those that remain."""
        holding, room = self._roster.holding, self._roster.room()
        present = [client for client in holding if not client.overdue]
        found: dict[Session, None] = {client.session: None for client in holding if client.overdue}
        for waiter in self._roster.waiting:
            found.update((client.session, None) for client in room.blockers(waiter, present))
        return list(found)
