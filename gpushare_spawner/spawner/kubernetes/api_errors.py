"""What a failed call of the cluster's API means: try again, or tell the person; and how it is said."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable

from aiohttp import ClientError
from kubernetes_asyncio.client.rest import ApiException

from gpushare_spawner.spawner.spawn_refused import SpawnRefused
from gpushare_spawner.wording.errors import http_status, reason
from gpushare_spawner.wording.spawn import failures as words


def may_pass(error: Exception) -> bool:
    """Whether the API may well do it when it is asked again."""
    status = getattr(error, "status", None)
    return not isinstance(status, int) or status == 429 or status >= 500 or status == 0


def worded(error: Exception) -> str:
    if isinstance(error, ApiException):
        return http_status(error.status, error.reason)
    return reason(error)


def api_refused(error: Exception) -> SpawnRefused:
    if may_pass(error):
        return SpawnRefused(words.api_unavailable(worded(error)), reason="api-failed", status=503, retry_after=60)
    said = getattr(error, "body", "") or ""
    try:
        said = str(json.loads(said)["message"])
    except (ValueError, KeyError, TypeError):
        said = worded(error)
    if "exceeded quota" in said:
        # in the words of kubernetes plugin/pkg/admission/resourcequota; other servers of the namespace may end
        return SpawnRefused(words.quota_exceeded(said), reason="quota-exceeded", status=503, retry_after=60)
    return SpawnRefused(words.api_refused(said), reason="api-refused", status=502)


async def asked_again(request: Awaitable[bool], what: str, log: logging.Logger) -> bool:
    """Return whether a request has succeeded; False also where the API failed for a moment, so that it is asked again.

    ``what`` says to the log what is not done yet. Raises what will not pass.
    """
    try:
        return await request
    except (ApiException, ClientError) as error:
        if not may_pass(error):
            raise
        log.warning("%s: %s", what, worded(error))
        return False
