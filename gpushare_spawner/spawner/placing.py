"""Gets the share of one spawn: joins the queue, tells the user the position, and says where the server will run.

Does not decide who gets what: see `queue.reservations`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from gpushare_spawner.model.layers import LAYERS
from gpushare_spawner.spawner.progress import SpawnProgress
from gpushare_spawner.spawner.queue.queue import Alternative, Reservation, SpawnRequest, Ticket
from gpushare_spawner.spawner.queue.reservations import Reservations
from gpushare_spawner.wording.spawn import layers as layer_words
from gpushare_spawner.wording.spawn import queue as words

Reserved = TypeVar("Reserved", bound=Reservation)


async def reserve_share(
    reservations: Reservations[Reserved],
    request: SpawnRequest,
    patience: float,
    progress: SpawnProgress,
    alternatives: tuple[Alternative, ...],
    decided: Callable[[], None] = lambda: None,
) -> Reserved:
    """Return a reservation, after a wait of at most ``patience`` seconds; ``progress`` hears of the position.

    ``alternatives``: the other templates that the user may start; ``progress`` hears which of them would start now.
    ``decided`` is called once the spawn has a place, or must wait for one by the first pass over the queue.
    Raises SpawnRefused; then, and when the wait is cancelled, nothing stays reserved.
    """
    telling: list[asyncio.Task[None]] = []
    ends_at = time.time() + patience

    def joined(ticket: Ticket) -> None:
        ticket.alternatives = alternatives
        telling.append(asyncio.ensure_future(progress.follow(ticket, ends_at)))
        telling.append(asyncio.ensure_future(_tell_that_it_waits(ticket, decided)))

    try:
        reserved = await reservations.reserve(request, patience, joined)
    finally:
        for task in telling:
            task.cancel()
    decided()
    return reserved


async def _tell_that_it_waits(ticket: Ticket, decided: Callable[[], None]) -> None:
    """Call ``decided`` once a pass over the queue has left the spawn waiting."""
    await ticket.considered.wait()
    # a pass also sets the event for a spawn that it refuses or places: that wait ends by itself
    if not ticket.result.done():
        decided()


def report_placement(
    reservation: Reservation, node: str, progress: SpawnProgress, log: logging.Logger, name: str
) -> None:
    """Tell user and log which GPUs were found for the server ``name``. ``node``: where the GPUs are, or empty."""
    if reservation.offer is not None:
        title = LAYERS[reservation.offer.layer].title
        progress.tell(layer_words.placed(title), progress=30)
        log.info("%s: %s by %s", name, reservation.request.share, title)
        return
    gpus = words.placed_on([(gpu.index, gpu.model) for gpu in reservation.gpus], node)
    progress.tell(words.placed(gpus, reservation.request.share, reservation.placement.borrowed), progress=30)
    log.info("%s: %s on %s", name, reservation.request.share, gpus)
