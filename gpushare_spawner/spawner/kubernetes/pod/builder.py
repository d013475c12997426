"""Builds the pod of a server with a share: KubeSpawner's manifest, and what the sharing layer adds to it."""

from __future__ import annotations

import time

from kubernetes_asyncio.client.models import V1Pod

from gpushare_spawner.model.kubernetes import HOSTNAME_LABEL, HUB
from gpushare_spawner.sharing.base import LayerCannot
from gpushare_spawner.spawner.kubernetes.cluster.pods import RESERVATION
from gpushare_spawner.spawner.kubernetes.pod.manifest import fragment, put_back
from gpushare_spawner.spawner.kubernetes.pod.renderer import renderer_of
from gpushare_spawner.spawner.kubernetes.reservations import PodShare
from gpushare_spawner.spawner.spawn_refused import SpawnRefused
from gpushare_spawner.wording.spawn import failures as words

WITHOUT_GPU = {"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": "-1"}
"""A server whose template has no GPU must not see those of its node because its image says "all". (NVIDIA Container
Toolkit, environment variables: void is "as if there were no GPU".)"""


def build_pod(pod: V1Pod, share: PodShare, unit_size: int, hub: str, namespace: str = "") -> V1Pod:
    """Return KubeSpawner's manifest with the share in it. ``hub``: the URL of the API of the hub that makes the pod in
    ``namespace``.

    Raises SpawnRefused for a manifest that is pinned to another node than the share's, and for a share that its sharing
    layer cannot give.
    """
    placed, pinned = share.placement.node, (pod.spec.node_selector or {}).get(HOSTNAME_LABEL)
    if placed and pinned not in (None, placed):
        raise SpawnRefused(
            words.pinned_elsewhere(placed, str(pinned), HOSTNAME_LABEL), reason="bad-template", status=500
        )
    layer = renderer_of(share, unit_size, time.time(), pod.metadata.name, namespace)
    before = fragment(pod)
    try:
        changed = layer.render(before)
    except LayerCannot as error:
        raise SpawnRefused(str(error), reason="bad-template", status=500) from None
    changed["metadata"]["annotations"].update({RESERVATION: share.token, HUB: hub})
    return put_back(pod, before, changed)
