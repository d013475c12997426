"""Which sharing layer renders a share into its pod."""

from __future__ import annotations

from gpushare_spawner.model.kubernetes import claim_name
from gpushare_spawner.sharing.base import PodSpec, SharingLayer
from gpushare_spawner.sharing.native_claim import NativeClaimLayer
from gpushare_spawner.sharing.native_pod import NativePodLayer
from gpushare_spawner.spawner.kubernetes.pod.foreign import ForeignPodLayer
from gpushare_spawner.spawner.kubernetes.reservations import PodShare


def renderer_of(
    share: PodShare, unit_size: int, since: float, pod: str = "", namespace: str = ""
) -> SharingLayer[PodSpec]:
    """Return the layer that renders a share.

    ``unit_size``: units of 1 % that one device of the agent's plugin stands for; ``since``: when the share was granted,
    in seconds since the epoch; ``pod``: the name of the pod that is made in ``namespace``.
    """
    if share.offer is not None:
        return ForeignPodLayer(share.request.tenant, share.offer, since, observed=share.observed)
    if (claims := claim_layer(share, since, pod, namespace)) is not None:
        return claims
    indices = {gpu.uuid: gpu.index for gpu in share.gpus}
    return NativePodLayer(
        share.request.tenant, share.request.template, share.placement, indices, unit_size=unit_size, since=since
    )


def claim_layer(share: PodShare, since: float, pod: str, namespace: str) -> NativeClaimLayer | None:
    """Return the layer of a share whose node gives GPUs by claims; None for another node. See `renderer_of`."""
    if share.claims is None:
        return None
    return NativeClaimLayer(
        share.request.tenant,
        share.request.template,
        share.placement,
        share.gpus,
        share.claims,
        namespace=namespace,
        claim=claim_name(pod, share.token),
        since=since,
    )
