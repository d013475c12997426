"""Objects that a sharing layer needs in the server's namespace before the pod, like a ResourceClaimTemplate."""

from __future__ import annotations

import logging
from typing import Any

from kubernetes_asyncio.client import CustomObjectsApi
from kubernetes_asyncio.client.rest import ApiException

from gpushare_spawner.sharing.pod_layers import POD_LAYERS
from gpushare_spawner.spawner.queue.other_layers import LayerOffer
from gpushare_spawner.spawner.spawn_refused import SpawnRefused
from gpushare_spawner.wording.spawn import layers as words

_PLURALS = {"ResourceClaimTemplate": "resourceclaimtemplates"}
_NOT_FOUND, _CONFLICT = 404, 409
_TRIES = 3
"""Of an object that somebody deletes as soon as it is there."""


async def create_objects(api: CustomObjectsApi, namespace: str, offer: LayerOffer, log: logging.Logger) -> None:
    """Create the objects of an offer that are not there yet.

    Raises SpawnRefused where another object has the name of one of them, ApiException and aiohttp.ClientError, and
    LayerCannot where the layer cannot give the share any more.
    """
    layer = POD_LAYERS[offer.layer]
    for manifest in layer.objects(offer.request):
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        found = await _create(api, namespace, manifest)
        if found is None:
            log.info("Created %s %s in %s", kind, name, namespace)
        elif not layer.same(manifest, found):
            message = words.other_object(kind, name, namespace)
            raise SpawnRefused(message, reason="other-object", status=409)


async def _create(api: CustomObjectsApi, namespace: str, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """Create an object. Return the one that has its name already; None: it was created."""
    group, _, version = manifest["apiVersion"].partition("/")
    where = (group, version, namespace, _PLURALS[manifest["kind"]])
    tries = 0
    while True:
        tries += 1
        try:
            await api.create_namespaced_custom_object(*where, manifest)
        except ApiException as error:
            if error.status != _CONFLICT:
                raise
        else:
            return None
        try:
            found: dict[str, Any] = await api.get_namespaced_custom_object(*where, manifest["metadata"]["name"])
        except ApiException as error:
            if error.status != _NOT_FOUND or tries >= _TRIES:
                raise
        else:
            return found
