"""Makes the claim of a pod with a share, on nodes where pods get GPUs by claims.

The pod is there first: it owns the claim, so that nothing is left of a start that is cut short. The scheduler waits for
the claims that a pod names.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from aiohttp import ClientError
from kubernetes_asyncio.client import CustomObjectsApi
from kubernetes_asyncio.client.rest import ApiException

from gpushare_spawner.model.kubernetes import CLAIMS_API
from gpushare_spawner.spawner.kubernetes.api_errors import may_pass, worded
from gpushare_spawner.spawner.kubernetes.pod.renderer import claim_layer
from gpushare_spawner.spawner.kubernetes.reservations import PodShare

PAUSES = 0.1, 2.0
"""Seconds between tries: the first, and the longest."""
_GROUP, _VERSION = CLAIMS_API.removeprefix("/apis/").split("/")


class PodClaims:
    """Makes claims. ``api`` is Kubernetes' core API."""

    def __init__(self, api: Any, log: logging.Logger) -> None:
        self._core = api
        self._objects = CustomObjectsApi(api.api_client)
        self._log = log

    async def make(self, share: PodShare, pod: str, namespace: str) -> None:
        """Make the claim of the pod that was just created, where its share is one by claims.

        Tries until it is done or cancelled, while the API fails for a moment. Raises ApiException for what will not
        pass.
        """
        layer = claim_layer(share, time.time(), pod, namespace)
        if layer is None:
            return
        pause, longest = PAUSES
        while True:
            try:
                uid = (await self._core.read_namespaced_pod(pod, namespace)).metadata.uid
                if await self._create(namespace, layer.claim(pod, uid), uid):
                    return
            except (ApiException, ClientError, TimeoutError) as error:
                if isinstance(error, ApiException) and error.status == 404 and _is_pod(error, pod):
                    return  # it was deleted meanwhile, and its start ends by that
                if not may_pass(error):
                    raise
                self._log.warning("The GPU claim of pod %s is not made yet: %s", pod, worded(error))
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def _create(self, namespace: str, claim: dict[str, Any], uid: str) -> bool:
        """Return whether the claim is there, and is this pod's."""
        where = (_GROUP, _VERSION, namespace, "resourceclaims")
        try:
            await self._objects.create_namespaced_custom_object(*where, claim)
        except ApiException as error:
            if error.status != 409:
                raise
        else:
            return True
        # an answer was lost, or an earlier pod of this spawn had it, and the garbage collector has not removed it yet
        name = claim["metadata"]["name"]
        try:
            found = await self._objects.get_namespaced_custom_object(*where, name)
            owners = found["metadata"].get("ownerReferences") or []
            if any(owner["uid"] == uid for owner in owners):
                return True
            await self._objects.delete_namespaced_custom_object(*where, name)
        except ApiException as error:
            if error.status != 404:
                raise
        return False


def _is_pod(error: ApiException, pod: str) -> bool:
    return f'pods \\"{pod}\\"' in str(error.body) or f'pods "{pod}"' in str(error.body)
