"""Whether the API server can resize running pods in place. Does not resize any: see `released_requests`."""

from __future__ import annotations

import logging
from collections.abc import Callable

import aiohttp
from kubernetes_asyncio.client import ApiException, CoreV1Api
from kubernetes_asyncio.config import ConfigException

from gpushare_spawner.service.kubernetes.node import PATCH_TIMEOUT
from gpushare_spawner.wording import pod_requests as words
from gpushare_spawner.wording.errors import http_status, reason

RESIZE = "pods/resize"
ASK_AGAIN_AFTER = 600.0
"""Seconds after which an API server without pods/resize is asked again: it may have been upgraded."""
RETRY_AFTER = 10.0
"""Seconds after which an API server that did not answer is asked again."""


class ResizeApi:
    """Asks once for what the API server has, and again while it has no pods/resize or does not answer."""

    def __init__(self, api: CoreV1Api, clock: Callable[[], float], log: logging.Logger) -> None:
        """``clock``: seconds on a monotonic clock."""
        self._api = api
        self._clock = clock
        self._log = log
        self._known: bool | None = None
        """Whether the API server has pods/resize; None: it has not said so yet."""
        self._ask_at = 0.0
        self._trouble = ""
        """Why the API server did not say so, as it was logged; empty: it did."""

    async def available(self) -> bool:
        """Return whether the API server has pods/resize; False where that is not known."""
        if self._known or self._clock() < self._ask_at:
            return self._known is True
        try:
            resources = await self._api.get_api_resources(_request_timeout=PATCH_TIMEOUT)
        except ApiException as error:
            return self._failed(http_status(error.status, error.reason))
        except (aiohttp.ClientError, ConfigException, OSError) as error:
            return self._failed(reason(error))
        if self._trouble:
            self._log.info("%s", words.DISCOVERY_WORKS)
            self._trouble = ""
        known = any(resource.name == RESIZE for resource in resources.resources)
        if not known and self._known is None:
            self._log.warning("%s", words.resize_unknown())
        self._known, self._ask_at = known, self._clock() + ASK_AGAIN_AFTER
        return known

    def _failed(self, why: str) -> bool:
        if why != self._trouble:
            self._log.warning("%s", words.discovery_failed(why))
        self._trouble, self._ask_at = why, self._clock() + RETRY_AFTER
        return False
