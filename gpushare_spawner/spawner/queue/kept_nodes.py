"""Keeps nodes of other sharing layers free for spawns that later ones overtake. One object for one pass over the queue.

No ledger has these GPUs, and their layer's scheduler chooses one. So what is kept is a whole node: the pods of later
spawns must not go there, and what runs there ends sooner or later. GPUs with an agent are kept by claims: see `placer`.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from gpushare_spawner.spawner.queue.other_layers import Kept
from gpushare_spawner.spawner.queue.queue import Ticket

MOST_OVERTAKEN = 5
"""Later spawns that are placed before a spawn that waits, until a node is kept for it. Ours: a node that is kept stands
partly empty, and most spawns wait for no more than the next end of a session."""


class KeptNodes:
    """Asked for each ticket in the order of the queue, so that a spawn knows what is kept for those before it."""

    def __init__(self) -> None:
        self._kept: set[str] = set()
        self._reached: set[str] = set()
        """Nodes that the spawns with a kept node could use."""
        self._waiting: list[tuple[Ticket, frozenset[str]]] = []
        """Those before, each with the nodes that it could use."""

    def seen_by(self, ticket: Ticket) -> Kept:
        """Return what a ticket must leave to those before it, and what is kept for it."""
        return Kept(frozenset(self._kept), ticket.kept_elsewhere)

    def waits(self, ticket: Ticket, able: frozenset[str], least_used: Callable[[Set[str]], str]) -> None:
        """Note that a ticket has no place, and keep a node for it if enough later spawns have overtaken it.

        ``able``: the nodes that could serve it. A spawn that waits for nodes of which one is kept already for a spawn
        before it has none kept: of one kind of nodes no more than one stands partly empty.
        """
        self._waiting.append((ticket, able))
        if ticket.overtaken < MOST_OVERTAKEN or able <= self._reached:
            ticket.kept_elsewhere = ""
            return
        left = able - self._kept
        if ticket.kept_elsewhere not in left:
            ticket.kept_elsewhere = least_used(left)
        self._kept.add(ticket.kept_elsewhere)
        self._reached |= able

    def placed(self, able: frozenset[str]) -> None:
        """Note that a ticket got a place on one of these nodes: it has overtaken those that could use one of them."""
        for ticket, nodes in self._waiting:
            ticket.overtaken += not nodes.isdisjoint(able)
