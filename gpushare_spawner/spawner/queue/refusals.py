"""Why a spawn does not get a share, as a user reads it."""

from __future__ import annotations

from gpushare_spawner.model.quantity import format_seconds
from gpushare_spawner.spawner.queue.queue import PlacementRequest
from gpushare_spawner.spawner.refusal import SpawnRefused


def queue_full(request: PlacementRequest, length: int) -> SpawnRefused:
    """As many spawns wait as may: ``length``."""
    waiting = f", and {length} servers are waiting already" if length else ""
    return SpawnRefused(
        f"No GPU is free for {request.share} now{waiting}. "
        "Try again in a few minutes, or choose a template without a GPU.",
        reason="queue-full",
        status=503,
        retry_after=120,
    )


def waited_too_long(request: PlacementRequest, waited: float, hint: str) -> SpawnRefused:
    """``waited``: seconds; ``hint``: what it waited for, as a sentence, or nothing."""
    why = f" {hint}" if hint else ""
    return SpawnRefused(
        f"No room for {request.share} after a wait of {format_seconds(waited)}.{why} "
        "Nothing is reserved for you. Try again later, or choose a smaller template.",
        reason="no-room",
        status=503,
        retry_after=60,
    )


def impossible(request: PlacementRequest, where: str, why: str) -> SpawnRefused:
    """No wait would help. ``where``: the GPUs' place; ``why``: a sentence."""
    place = f"{where}, which for you is node {request.node} alone" if request.node else where
    return SpawnRefused(
        f"{request.template.name} cannot be started on {place}: {why}", reason="no-such-gpu", status=409
    )


def nothing_known(unavailable: str, error: Exception) -> SpawnRefused:
    """Nothing is known of the GPUs for too long. ``unavailable`` says so, without a full stop."""
    return SpawnRefused(
        f"{unavailable}, so nothing can be started on a GPU. "
        "Try again in a minute, or choose a template without a GPU; tell the admin if it stays so.",
        reason="agent-away",
        status=503,
        retry_after=60,
        log_message=f"{unavailable}: {error}",
    )
