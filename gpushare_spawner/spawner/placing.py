"""Gets the share of one spawn: joins the queue, tells the user the position, and says where the server will run.

Does not decide who gets what: see `queue.waiting_room`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TypeVar

from gpushare_spawner.spawner.progress import Story
from gpushare_spawner.spawner.queue.queue import Reservation, Ticket, Wish
from gpushare_spawner.spawner.queue.waiting_room import WaitingRoom

Reserved = TypeVar("Reserved", bound=Reservation)


async def reserve_share(room: WaitingRoom[Reserved], wish: Wish, patience: float, progress: Story) -> Reserved:
    """Return a reservation, after a wait of at most ``patience`` seconds; ``progress`` hears of the position.

    Raises StartRefused; then, and when the wait is cancelled, nothing stays reserved.
    """
    telling: list[asyncio.Task[None]] = []

    def joined(ticket: Ticket) -> None:
        telling.append(asyncio.ensure_future(progress.follow(ticket)))

    try:
        return await room.reserve(wish, patience, joined)
    finally:
        for task in telling:
            task.cancel()


def report_placement(reservation: Reservation, place: str, progress: Story, log: logging.Logger, name: str) -> None:
    """Tell user and log which GPUs were found for the server ``name``. ``place``: what follows the GPUs, or nothing."""
    gpus = " and ".join(f"GPU {gpu.index} ({gpu.model})" for gpu in reservation.gpus) + place
    borrowed = reservation.placement.borrowed
    lent = f"; {borrowed} % of it is lent by idle neighbours and goes back to them first" if borrowed else ""
    progress.tell(f"Placed on {gpus}{lent}.", progress=30)
    log.info("%s: %s on %s", name, reservation.wish.share, gpus)
