"""In which order clients page out, and how much each of them at most, so that few users notice it when they return.

A user does not notice a page-in of some milliseconds. So many sessions that lack a little are better than a few that
lack all. But a session whose return takes noticeable time anyway is not delayed much more by the rest of its pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpushare_spawner.arbiter.memory.residency import Residency
from gpushare_spawner.arbiter.session import Client
from gpushare_spawner.arbiter.settings import ArbiterSettings


def page_out_order(
    clients: Iterable[Client],
    residency: Residency,
    capacity: int,
    page_in_bandwidth: float,
    now: float,
    settings: ArbiterSettings,
) -> Iterator[tuple[Client, int]]:
    """Yield clients without a lease, with the bytes that each pages out at most; a client can come more than once.

    First idle clients whose next page-in would be noticed already, with all that they have. Then idle clients up to
    what is not noticed. Then all. Each time the least recently used before the others; clients that wait, or that are
    held back for a moment, come last. `capacity`: bytes for managed pages. `page_in_bandwidth`: bytes per second.
    A client whose session's memory moves as a whole stands for the session.
    """
    order = sorted(clients, key=lambda client: (client.parked, client.waiting, client.last_used))
    idle = [
        client
        for client in order
        if not client.wants_memory and now - client.last_used >= settings.long_pause and client.last_used >= 0
    ]
    unnoticed = int(settings.unnoticed_page_in * page_in_bandwidth)
    lacking = {client: residency.prefetch(client, capacity) for client in idle}
    for client in idle:
        if lacking[client] > unnoticed:
            yield client, capacity
    for client in idle:
        if client.session.moves_whole:
            if client.session.present <= unnoticed:
                yield client, client.session.present
        elif lacking[client] < unnoticed:
            yield client, unnoticed - lacking[client]
    for client in order:
        yield client, capacity
