"""Tells the accounts which sessions have work, and which of them have processes on the GPU, as the roster has it."""

from __future__ import annotations

from collections.abc import Mapping

from gpushare_spawner.arbiter.accounting import Accounts
from gpushare_spawner.arbiter.recent_use import RecentUse, User
from gpushare_spawner.arbiter.roster import Roster
from gpushare_spawner.arbiter.session import Client, Session
from gpushare_spawner.arbiter.settings import ArbiterSettings


class Charging:
    """Keeps the accounts in step with the roster."""

    def __init__(self, roster: Roster, settings: ArbiterSettings) -> None:
        self._roster = roster
        self._settings = settings
        self.accounts = Accounts(settings)
        self.recent_use = RecentUse()

    def advance(self, elapsed: float, time_slices: Mapping[str, float], memory_short: bool) -> None:
        """Account for the seconds since the last decision, up to the roster's `now`.

        `memory_short`: a client waits that does not fit beside those with leases. They keep it out whether
        they work or are quiet, so a lease counts all the time; the driver's samples correct what they computed.
        """
        processes = {}
        for session in self._roster.sessions.values():
            count = self._left_behind(session, elapsed) if session.left_behind else 0
            for client in session.clients.values():
                if client.lease and (memory_short or self.on_device(client)):
                    count += 1
            if count:
                processes[session.id] = count
        self.recent_use.advance(self._roster.now - elapsed, self._roster.now, self.working)
        held_back = any(client.parked and self._roster.now >= client.pausing_until for client in self._roster.clients)
        self.accounts.advance(self._roster.now, elapsed, processes, time_slices, held_back, memory_short)

    def settle(self, time_slices: Mapping[str, float], memory_short: bool = False) -> None:
        """Tell the accounts which sessions have work from now on. `memory_short`: sessions take turns."""
        for session in self._roster.sessions.values():
            for client in session.clients.values():
                if client.waiting or (client.lease and self.on_device(client)):
                    time_slice = max(time_slices.get(session.id, 0.0), self._settings.period)
                    self.accounts.work(session.id, time_slice, memory_short)
                    break
            else:
                self.accounts.rest(session.id)

    @property
    def working(self) -> list[User]:
        """Clients that say that they have work on the GPU."""
        return [user_of(client) for client in self._roster.clients if client.bursting]

    def burst_ended(self, client: Client) -> None:
        """A client has reported how long its burst had the GPU busy."""
        busy = client.busy_reported - client.busy_before_burst
        self.recent_use.burst_ended(user_of(client), client.burst_since, busy)

    def on_device(self, client: Client) -> bool:
        """Whether a client with a lease may have work on the GPU. IDLE counts only where the driver's samples would
        contradict a lie."""
        return client.bursting or not self.accounts.measured(client.session.id, self._roster.now)

    def _left_behind(self, session: Session, elapsed: float) -> int:
        """The number of processes that may still compute although they have disconnected."""
        session.left_behind = {
            client: until for client, until in session.left_behind.items() if until > self._roster.now - elapsed
        }
        return len(session.left_behind)


def user_of(client: Client) -> User:
    """How a client is named in `RecentUse`."""
    return client.session.id, client.id
