"""Which clients can be on the GPU together: working sets that fill its memory without exceeding it."""

from __future__ import annotations

from collections.abc import Iterable

from gpushare_spawner.arbiter.session import Client


def together(clients: Iterable[Client]) -> int:
    """Return the bytes that clients need on the GPU together. What moves as a whole counts once."""
    return sum({client.unit: client.footprint for client in clients}.values())


class VramBudget:
    """The GPU's memory for which bursting clients compete."""

    def __init__(self, vram_bytes: int, always_resident: int, exclusive: bool) -> None:
        """`always_resident`: bytes that cannot leave the GPU. `exclusive`: one session at a time."""
        self.for_managed = max(0, vram_bytes - always_resident)
        """Bytes left for the working sets that move."""
        self._overfull = always_resident > vram_bytes
        self._exclusive = exclusive

    def fits(self, group: Iterable[Client]) -> bool:
        """Whether these may hold leases together. One alone always may."""
        clients = list(group)
        if len({client.unit for client in clients}) <= 1:
            return True
        if self._exclusive and any(client.session is not clients[0].session for client in clients):
            return False
        return not self._overfull and together(clients) <= self.for_managed

    def fill(self, order: Iterable[Client], group: Iterable[Client] = ()) -> list[Client]:
        """The group, and the clients of `order` that still fit beside it, in this order."""
        chosen = dict.fromkeys(group)
        units = {client.unit: client.footprint for client in chosen}
        taken = sum(units.values())
        session = next((client.session for client in chosen), None)
        free = -1 if self._overfull else self.for_managed - taken
        for client in order:
            unit = client.unit
            footprint = 0 if unit in units else client.footprint
            if chosen:
                if footprint > free or client in chosen or (self._exclusive and client.session is not session):
                    continue
            else:
                session = client.session
            chosen[client] = None
            units[unit] = footprint
            free -= footprint
        return list(chosen)

    def blockers(self, waiter: Client, group: list[Client]) -> list[Client]:
        """Those of the group that keep the waiter out: it would fit without that one, or never beside it.

        All of them where no single one does. None where it fits.
        """
        if self._exclusive:
            strangers = [client for client in group if client.session is not waiter.session]
            if strangers:
                return strangers
        if self._overfull:
            return list(group)
        excess = together([*group, waiter]) - self.for_managed
        if excess <= 0 or not group:
            return []
        alone = self.for_managed - waiter.footprint
        return [client for client in group if client.footprint >= excess or client.footprint > alone] or list(group)
