"""Exceptions for spawns that do not get a share; the sentences are in `wording.refusals`."""

from __future__ import annotations

from gpushare_spawner.quota import Account, Refused
from gpushare_spawner.spawner.queue.queue import SpawnRequest
from gpushare_spawner.spawner.spawn_refused import SpawnRefused
from gpushare_spawner.wording.amounts import duration
from gpushare_spawner.wording.quotas import exceeded
from gpushare_spawner.wording.spawn import refusals as words


def queue_full(request: SpawnRequest, length: int) -> SpawnRefused:
    """As many spawns wait as may: ``length``."""
    return SpawnRefused(words.queue_full(request.share, length), reason="queue-full", status=503, retry_after=120)


def waited_too_long(request: SpawnRequest, waited: float, hint: str) -> SpawnRefused:
    """``waited``: seconds; ``hint``: what it waited for, as a sentence, or nothing."""
    message = words.waited_too_long(request.share, duration(waited), hint)
    return SpawnRefused(message, reason="no-capacity", status=503, retry_after=60)


def quota_exceeded(request: SpawnRequest, account: Account, refused: Refused) -> SpawnRefused:
    """A limit of the account's quota refuses the server."""
    return SpawnRefused(exceeded(account, refused, request.share.total_units), reason="quota", status=409)


def impossible(request: SpawnRequest, where: str, why: str) -> SpawnRefused:
    """No wait would help. ``where``: the GPUs' place; ``why``: a sentence."""
    return SpawnRefused(
        words.impossible(request.template.display_name, where, request.node, why), reason="no-such-gpu", status=409
    )


def nothing_known(unavailable: str, error: Exception) -> SpawnRefused:
    """Nothing is known of the GPUs for too long. ``unavailable`` says so, without a full stop."""
    return SpawnRefused(
        words.nothing_known(unavailable),
        reason="agent-unavailable",
        status=503,
        retry_after=60,
        log_message=f"{unavailable}: {error}",
    )


def placing_failed() -> SpawnRefused:
    """A bug: the spawn cannot be placed. The log has the traceback."""
    return SpawnRefused(words.PLACING_FAILED, reason="error", status=500)
