"""Which sharing layer renders a share into its pod."""

from __future__ import annotations

from gpushare_spawner.sharing.base import PodSpec, SharingLayer
from gpushare_spawner.sharing.native_pod import NativePodLayer
from gpushare_spawner.spawner.kubernetes.pod.foreign import ForeignPodLayer
from gpushare_spawner.spawner.kubernetes.reservations import PodShare


def renderer_of(share: PodShare, unit_size: int, since: float) -> SharingLayer[PodSpec]:
    """Return the layer that renders a share.

    ``unit_size``: units of 1 % that one device of the agent's plugin stands for; ``since``: when the share was granted,
    in seconds since the epoch.
    """
    if share.offer is not None:
        return ForeignPodLayer(share.request.tenant, share.offer)
    indices = {gpu.uuid: gpu.index for gpu in share.gpus}
    return NativePodLayer(
        share.request.tenant, share.request.template, share.placement, indices, unit_size=unit_size, since=since
    )
