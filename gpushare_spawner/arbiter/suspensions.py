"""Sessions whose memory leaves the GPU only as a whole: which of them are to be suspended, and whether one fits again.

The driver evicts managed pages by itself where memory is short, and never such a session. So what stays of them beside
the clients that have the GPU must fit there, and their memory is free only when they have been suspended.
"""

from __future__ import annotations

from collections.abc import Collection

from gpushare_spawner.arbiter.memory import together
from gpushare_spawner.arbiter.roster import Roster
from gpushare_spawner.arbiter.session import ArbitratedSession, Client, Need, Presence
from gpushare_spawner.arbiter.settings import ArbiterSettings


class Suspensions:
    """Orders suspensions of the sessions on one GPU. Bytes."""

    def __init__(self, roster: Roster, settings: ArbiterSettings) -> None:
        self._roster = roster
        self._settings = settings
        self._ordered: list[str] = []

    def taken(self) -> list[str]:
        """Return the sessions that were ordered to be suspended since the last call."""
        ordered, self._ordered = self._ordered, []
        return ordered

    def order(self, session: ArbitratedSession) -> None:
        """The session is to be suspended."""
        self._roster.move(session, Presence.LEAVING)
        self._ordered.append(session.id)

    def candidates(self, group: Collection[Client]) -> list[ArbitratedSession]:
        """Return the sessions outside a group that can be suspended now: with memory, without a lease, and not short of
        memory themselves."""
        inside = {client.session for client in group}
        return [
            session
            for session in self._roster.sessions.values()
            if session.moves_whole
            and session.presence is Presence.ON_GPU
            and session not in inside
            and not session.holding
            and not session.short_of_memory
        ]

    def order_for(self, group: Collection[Client]) -> None:
        """Order suspensions until the group, and what stays of such sessions beside it, fit on the GPU.

        The least recently used session goes first, and none that is not needed. Sessions that give their leases back
        first are reckoned with, and ordered when they have. A session that is itself short of memory goes last, and
        only for one whose turn comes before its own.
        """
        inside = {client.session for client in group}
        present = (Presence.ON_GPU, Presence.COMING)
        comes = any(client.waiting for client in group)
        outside = [
            one
            for one in self._roster.sessions.values()
            if one.moves_whole
            and one.presence in present
            and one not in inside
            and one.present
            and (comes or not one.short_of_memory)
        ]
        wanted = together(group) + self._contexts_to_come(inside)
        if not outside or not wanted:
            return
        capacity = self._roster.vram_budget().for_managed
        excess = min(capacity, wanted) + sum(one.present for one in outside) - capacity
        chosen: list[ArbitratedSession] = []
        for session in sorted(outside, key=_right_to_stay):
            if excess <= 0:
                break
            chosen.append(session)
            excess -= session.present
        for session in list(chosen):
            if excess + session.present <= 0:
                chosen.remove(session)
                excess += session.present
        for session in chosen:
            if not session.holding:
                self.order(session)

    def order_released(self) -> None:
        """Order suspensions of released sessions, also where nobody needs their memory: their CUDA contexts leave too,
        and the GPU has room for programs that no arbiter knows. A session whose clients ask for a lease stays.
        """
        for session in self.candidates(()):
            if not session.share and session.present and not any(client.waiting for client in session.clients.values()):
                self.order(session)

    def can_come(self, client: Client) -> bool:
        """Whether the client can come now, for all that is still on the GPU of sessions that move as a whole."""
        using = [one for one in self._roster.clients if one.occupies_memory and one is not client]
        counted = {one.session for one in using} | {client.session}
        beside = sum(
            session.present
            for session in self._roster.sessions.values()
            if session.moves_whole and session not in counted and self._in_the_way(session, client)
        )
        capacity = self._roster.vram_budget().for_managed
        return not beside or min(capacity, together([*using, client])) + beside <= capacity

    def keep_on_gpu(self, client: Client, until: float) -> None:
        """A client has returned its lease by itself, after a second without work. Where its session's memory moves as a
        whole, its place is kept while its pause can be one of those that are shorter than the moves that giving way
        costs: else such a session would be moved in each of its pauses.
        """
        if client.session.moves_whole and client.session.presence is Presence.ON_GPU:
            client.pausing_until = until
            client.parked = client.parked or self._roster.now < until

    def _in_the_way(self, session: ArbitratedSession, client: Client) -> bool:
        if session.presence is Presence.AWAY:
            return False
        # others no longer wait for one that ignores a revoked lease, unless they need memory that only it can free
        overdue = any(one.lease for one in session.clients.values())
        needs = client.session.moves_whole or (client.short and client.session.need is Need.POSSIBLE)
        return bool(needs) or session.presence is not Presence.ON_GPU or not overdue

    def _contexts_to_come(self, inside: Collection[ArbitratedSession]) -> int:
        """What connected processes will need for their CUDA contexts, which the driver does not show yet."""
        waiting = sum(
            client.device_memory is None and client.session not in inside and not client.session.moves_whole
            for client in self._roster.clients
        )
        return waiting * self._settings.context_bytes


def _right_to_stay(session: ArbitratedSession) -> tuple[bool, bool, bool, bool, float]:
    """Sessions that hold a lease go last, then those that are short of memory, then those that wait, then those used of
    late. First goes one that only claims to have memory: a claim pushes no other session out."""
    waiting = any(client.waiting for client in session.clients.values())
    return session.holding, session.confirmed, session.short_of_memory, waiting, session.last_used
