"""Removes pods that stand in the way: of an earlier or a failed start, and of servers that the hub has forgotten."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientError
from kubernetes_asyncio.client.rest import ApiException

from gpushare_spawner.spawner.kubernetes.api_errors import worded
from gpushare_spawner.spawner.kubernetes.cluster.pods import holds_share, orphans
from gpushare_spawner.spawner.kubernetes.reservations import PodReservations, PodShare

ORPHANS_EVERY = 60.0
"""Seconds between two looks for pods that nobody owns, at least."""
ORPHAN_AGE = 120.0
"""Seconds for which such a pod is left alone after it was made."""


@dataclass
class LastSearch:
    """When orphans were looked for last (monotonic clock, seconds): one for all spawners of a hub."""

    at: float = -ORPHANS_EVERY


class PodCleanup:
    """Removes pods in the background. ``api`` is Kubernetes' core API."""

    def __init__(self, api: Any, reservations: PodReservations, log: logging.Logger) -> None:
        self._api = api
        self._reservations = reservations
        self._log = log

    def give_back(self, share: PodShare, perhaps_created: bool) -> None:
        """The spawn has failed, or the server is gone: its place is free, once no pod can have it any more."""
        if not perhaps_created:
            self._reservations.give_back(share)
            return
        self._reservations.perhaps_created(share)
        self._reservations.in_background(self._remove_late_pod(share.token))

    async def _remove_late_pod(self, token: str) -> None:
        """Remove the pod of a failed start when it shows: the hub stops only what the reflector has seen by then."""
        async for pod in self._reservations.late_pods(token):
            await self._remove(pod["metadata"], "its start has failed")

    def remove_orphans_soon(self, search: LastSearch, hub: str, runs: Callable[[str, str], bool]) -> None:
        """Remove pods with a share that the hub made and knows nothing of, unless they were looked for just now.

        ``hub``: the URL of its API, as the pods' annotations have it. ``runs`` says whether it runs a user's server.
        """
        now = time.monotonic()
        if now - search.at < ORPHANS_EVERY:
            return
        search.at = now
        for pod in orphans(self._reservations.cluster.pods(), hub, runs, time.time() - ORPHAN_AGE):
            self._reservations.in_background(
                self._remove(pod["metadata"], "it holds a GPU share, and the hub knows no such server")
            )

    async def remove_leftover(self, pod: Mapping[str, Any] | None, stop: Callable[[], Awaitable[None]]) -> None:
        """Remove a server's own pod that an earlier spawn left, with ``stop``.

        KubeSpawner would do it when it creates the new one; until then it would hold what this one waits for.
        """
        if pod is not None and holds_share(pod) and not pod["metadata"].get("deletionTimestamp"):
            self._log.warning("Removing pod %s, which an earlier spawn of this server left", pod["metadata"]["name"])
            await self.remove_own(pod["metadata"]["name"], stop)

    async def remove_own(self, name: str, stop: Callable[[], Awaitable[None]]) -> None:
        """Remove a server's own pod with ``stop``. A failure is logged: whoever creates the next pod tries again."""
        try:
            await stop()
        except Exception as error:
            self._log.warning("Pod %s is not removed yet: %s", name, error)

    async def _remove(self, metadata: Mapping[str, Any], why: str) -> None:
        name, namespace = metadata["name"], metadata["namespace"]
        self._log.warning("Removing pod %s/%s: %s", namespace, name, why)
        try:
            await self._api.delete_namespaced_pod(
                name=name, namespace=namespace, body={"preconditions": {"uid": metadata["uid"]}}
            )
        except (ApiException, ClientError, TimeoutError) as error:
            self._log.warning("Pod %s/%s is not removed yet: %s", namespace, name, worded(error))
