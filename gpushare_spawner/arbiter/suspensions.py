"""Suspensions of sessions, and the check whether a session fits again. A suspended session has no memory on the GPU.

The driver evicts managed pages by itself if memory is short, but never a suspendable session. Such sessions must
fit next to the clients that have the GPU, and only a suspension frees their memory. agent/suspend carries out
suspensions and resumptions.
"""

from __future__ import annotations

from collections.abc import Collection

from gpushare_spawner.arbiter.memory import together
from gpushare_spawner.arbiter.roster import Roster
from gpushare_spawner.arbiter.session import ArbiterSettings, ArbitratedSession, Client, Need, Presence


class Suspensions:
    """Orders to suspend one GPU's sessions. Amounts are in bytes."""

    def __init__(self, roster: Roster, settings: ArbiterSettings) -> None:
        self._roster = roster
        self._settings = settings
        self._ordered: list[str] = []
        self._stays_until: float | None = None
        """Earliest end of the time for which a session that was resumed for an expected launch stays."""

    def taken(self) -> list[str]:
        """Return the sessions ordered to be suspended since the last call."""
        ordered, self._ordered = self._ordered, []
        return ordered

    def order(self, session: ArbitratedSession) -> None:
        """Order the suspension of a session."""
        self._roster.set_presence(session, Presence.SUSPENDING)
        self._ordered.append(session.id)

    def candidates(self, group: Collection[Client]) -> list[ArbitratedSession]:
        """Return the sessions outside a group that can be suspended now.

        These sessions have memory on the GPU and no lease, and are not short of memory.
        """
        inside = {client.session for client in group}
        return [
            session
            for session in self._roster.sessions.values()
            if session.suspendable
            and session.presence is Presence.ON_GPU
            and session not in inside
            and not session.occupies_gpu
            and not session.short_of_memory
        ]

    def order_for(self, group: Collection[Client]) -> None:
        """Order suspensions until the group and the remaining sessions of this kind fit on the GPU.

        The least recently used session is suspended first, and no more sessions than needed. Sessions that must first
        return their leases also count; their suspension is ordered afterwards. A session that is short of memory is
        suspended last, and only for a client that is served before it.
        """
        inside = {client.session for client in group}
        present = (Presence.ON_GPU, Presence.RESUMING)
        comes = any(client.waiting for client in group)
        outside = [
            session
            for session in self._roster.sessions.values()
            if session.suspendable
            and session.presence in present
            and session not in inside
            and session.present
            and (comes or not session.short_of_memory)
        ]
        required = together(group) + self._contexts_to_come(inside)
        if not outside or not required:
            return
        capacity = self._roster.vram_budget().for_managed
        excess = min(capacity, required) + sum(other.present for other in outside) - capacity
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
            if not session.occupies_gpu and not session.resuming_early:
                self.order(session)

    def order_released(self) -> None:
        """Order suspensions of released sessions, even if no session needs their memory.

        This also removes their CUDA contexts, so that programs without an arbiter get memory. A session stays while a
        client waits for a lease, its launch is expected, or it was just resumed for one.
        """
        self._stays_until = None
        for session in self.candidates(()):
            if (
                not session.assigned_weight
                and session.present
                and not self._just_resumed(session)
                and not session.anticipated
                and not any(client.waiting for client in session.clients.values())
            ):
                self.order(session)

    def _just_resumed(self, session: ArbitratedSession) -> bool:
        """Return whether a session was resumed for a launch that has not come yet and can still come soon."""
        until = session.resumed_at + self._settings.long_pause
        if session.resumed_at <= session.last_used or self._roster.now >= until:
            return False
        self._stays_until = min(until, self._stays_until or until)
        return True

    def due(self) -> list[float]:
        """Return the instant at which the passage of time alone leads to a suspension."""
        return [] if self._stays_until is None else [self._stays_until]

    def can_come(self, client: Client) -> bool:
        """Return whether the client now fits next to the suspendable sessions on the GPU."""
        using = [other for other in self._roster.clients if other.occupies_memory and other is not client]
        counted = {other.session for other in using} | {client.session}
        beside = sum(
            session.present
            for session in self._roster.sessions.values()
            if session.suspendable and session not in counted and self._in_the_way(session, client)
        )
        capacity = self._roster.vram_budget().for_managed
        return not beside or min(capacity, together([*using, client])) + beside <= capacity

    def keep_on_gpu(self, client: Client, until: float) -> None:
        """Keep the place of a client that returned its lease on its own, after a second without work.

        This applies to suspendable sessions, as long as the pause can be shorter than a suspension's moves.
        Otherwise such a session would be moved during each pause.
        """
        if client.session.suspendable and client.session.presence is Presence.ON_GPU:
            client.pausing_until = until
            client.parked = client.parked or self._roster.now < until

    def _in_the_way(self, session: ArbitratedSession, client: Client) -> bool:
        if session.presence is Presence.SUSPENDED:
            return False
        # others stop waiting for a session that ignores REVOKE, unless they need memory that only that session can free
        overdue = any(member.lease for member in session.clients.values())
        needs = client.session.suspendable or (client.short and client.session.need is Need.POSSIBLE)
        return bool(needs) or session.presence is not Presence.ON_GPU or not overdue

    def _contexts_to_come(self, inside: Collection[ArbitratedSession]) -> int:
        """Return the bytes of CUDA contexts to come, for connected processes that the driver does not show yet."""
        waiting = sum(
            client.device_memory is None and client.session not in inside and not client.session.suspendable
            for client in self._roster.clients
        )
        return waiting * self._settings.context_bytes


def _right_to_stay(session: ArbitratedSession) -> tuple[bool, bool, bool, bool, float]:
    """Return the sort key of suspensions; the session with the lowest key is suspended first.

    Sessions with a lease come last, preceded by sessions short of memory, waiting or expected sessions, and recently
    used sessions. Sessions with only stated memory come first: a false statement must not displace another session.
    """
    waiting = any(client.waiting or client.anticipated for client in session.clients.values())
    return session.occupies_gpu, session.confirmed, session.short_of_memory, waiting, session.last_present
