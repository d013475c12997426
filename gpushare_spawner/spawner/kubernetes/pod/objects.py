"""Objects that a sharing layer needs in the server's namespace before the pod, like a ResourceClaimTemplate."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from kubernetes_asyncio.client import CustomObjectsApi
from kubernetes_asyncio.client.rest import ApiException

from gpushare_spawner.sharing.pod_layers import POD_LAYERS
from gpushare_spawner.spawner.queue.other_layers import LayerOffer

_PLURALS = {"ResourceClaimTemplate": "resourceclaimtemplates"}
_CONFLICT = 409


async def create_objects(api: CustomObjectsApi, namespace: str, offer: LayerOffer, log: logging.Logger) -> None:
    """Create the objects of an offer that are not there yet.

    An object's name says what is in it, so one that is there is the right one. Raises ApiException and
    aiohttp.ClientError, and LayerCannot where the layer cannot give the share any more.
    """
    manifests: Iterable[dict[str, Any]] = POD_LAYERS[offer.layer].objects(offer.request)
    for manifest in manifests:
        group, _, version = manifest["apiVersion"].partition("/")
        plural, name = _PLURALS[manifest["kind"]], manifest["metadata"]["name"]
        try:
            await api.create_namespaced_custom_object(group, version, namespace, plural, manifest)
        except ApiException as error:
            if error.status != _CONFLICT:
                raise
        else:
            log.info("Created %s %s in %s", manifest["kind"], name, namespace)
