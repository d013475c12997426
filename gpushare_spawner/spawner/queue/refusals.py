"""Why a spawn does not get a share, as a user reads it."""

from __future__ import annotations

from gpushare_spawner.model.quantity import format_seconds
from gpushare_spawner.spawner.queue.queue import Wish
from gpushare_spawner.spawner.refusal import StartRefused


def queue_full(wish: Wish, length: int) -> StartRefused:
    """As many spawns wait as may: ``length``."""
    waiting = f", and {length} servers are waiting already" if length else ""
    return StartRefused(
        f"No GPU is free for {wish.share} now{waiting}. "
        "Try again in a few minutes, or choose a template without a GPU.",
        reason="queue-full",
        status=503,
        retry_after=120,
    )


def waited_too_long(wish: Wish, waited: float, hint: str) -> StartRefused:
    """``waited``: seconds; ``hint``: what it waited for, as a sentence, or nothing."""
    why = f" {hint}" if hint else ""
    return StartRefused(
        f"No room for {wish.share} after a wait of {format_seconds(waited)}.{why} "
        "Nothing is reserved for you. Try again later, or choose a smaller template.",
        reason="no-room",
        status=503,
        retry_after=60,
    )


def impossible(wish: Wish, where: str, why: str) -> StartRefused:
    """No wait would help. ``where``: the GPUs' place; ``why``: a sentence."""
    place = f"{where}, which for you is node {wish.node} alone" if wish.node else where
    return StartRefused(f"{wish.template.name} cannot be started on {place}: {why}", reason="no-such-gpu", status=409)


def nothing_known(away: str, error: Exception) -> StartRefused:
    """Nothing is known of the GPUs for too long. ``away`` says so, without a full stop."""
    return StartRefused(
        f"{away}, so nothing can be started on a GPU. "
        "Try again in a minute, or choose a template without a GPU; tell the admin if it stays so.",
        reason="agent-away",
        status=503,
        retry_after=60,
        log_message=f"{away}: {error}",
    )
