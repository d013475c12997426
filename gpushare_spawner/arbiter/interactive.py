"""Which sessions a user waits for, and which time slices may end early for them: least attained service first.

What a session has attained is the time for which it held a lease and worked since its last pause, on the arbiter's
clock. A session that returns after a pause has attained nothing, and may take the place of those that have attained
most. This changes the order in which sessions are served and how often, never how much: only sessions that have had no
more than their part are preferred.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpushare_spawner.arbiter.memory.vram_budget import VramBudget
from gpushare_spawner.arbiter.session import Client, Session
from gpushare_spawner.arbiter.settings import ArbiterSettings


def is_interactive(session: Session, settings: ArbiterSettings) -> bool:
    """Whether a user seems to wait for it: it has just returned, or has worked only for a short time since.

    A session whose bursts are typically long counts only after `returning_pause`: programs pause for seconds between
    their phases, too.
    """
    short = (session.bursts.typical or 0.0) <= settings.short_burst
    return session.attained <= settings.short_burst and (short or session.pause >= settings.returning_pause)


def bound(waiting: Iterable[Client], settings: ArbiterSettings) -> float:
    """The part of the GPU's time that hand-offs may cost now."""
    if any(is_interactive(session, settings) for session in {client.session for client in waiting}):
        return settings.interactive_overhead_bound
    return settings.overhead_bound


def newcomers(waiting: Iterable[Client], settings: ArbiterSettings) -> list[Client]:
    """The first client of each session that may take the GPU before the time slice is over, the least attained first:
    they have paused."""
    first: dict[Session, Client] = {}
    for client in waiting:
        first.setdefault(client.session, client)
    returned = [client for session, client in first.items() if session.paused and is_interactive(session, settings)]
    return sorted(returned, key=lambda client: client.session.attained)


def group_with(newcomer: Client, holders: Iterable[Client], budget: VramBudget) -> list[Client]:
    """The newcomer and the holders that stay beside it, chosen in the order of least attained service."""
    return budget.fill(sorted(holders, key=lambda client: client.session.attained), [newcomer])


def part_of_gpu(moving: Iterable[Client], beside: Iterable[Client]) -> float:
    """The part of the GPU that stands still while these clients' memory moves and the others beside them work on.

    By weight: what the GPU does meanwhile for the sessions that stay is not lost.
    """
    moved = {client.session for client in moving}
    others = {client.session for client in beside if client.bursting or client.parked} - moved
    weight = sum(session.weight for session in moved)
    return weight / (weight + sum(session.weight for session in others)) if weight else 1.0
