"""Functions of the layers that render a share into a pod for a foreign scheduler, by the layer's name."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.sharing import dra, hami, kai, kubeshare, metagpu, mig, nvshare
from gpushare_spawner.sharing.base import LayerCapacity, LayerRequest, PodSpec
from gpushare_spawner.sharing.replicas import MPS, TIME_SLICING

Manifest = dict[str, Any]


def _no_objects(request: LayerRequest) -> tuple[Manifest, ...]:
    return ()


@dataclass(frozen=True)
class PodLayer:
    """Functions of one layer. They are pure and do not change their arguments."""

    render: Callable[[PodSpec, LayerRequest], PodSpec]
    """Function that returns the pod with the share. Raises `LayerCannot`."""
    free: Callable[[LayerRequest], LayerCapacity]
    """Function that returns the free capacity for servers of the request's template. Raises `LayerCannot`."""
    objects: Callable[[LayerRequest], tuple[Manifest, ...]] = _no_objects
    """Function that returns objects that must be in the server's namespace before the pod. Equal requests give equal
    objects with equal names. Raises `LayerCannot`."""
    same: Callable[[Manifest, Manifest], bool] = operator.eq
    """Function that returns whether an existing object of that name, as the API server shows it, equals one of
    `objects`: users can create objects in their own namespace."""


POD_LAYERS: Mapping[LayerName, PodLayer] = {
    LayerName.TIME_SLICING: PodLayer(TIME_SLICING.render, TIME_SLICING.free),
    LayerName.MPS: PodLayer(MPS.render, MPS.free),
    LayerName.MIG: PodLayer(mig.render, mig.free),
    LayerName.HAMI: PodLayer(hami.render, hami.free),
    LayerName.KAI: PodLayer(kai.render, kai.free),
    LayerName.DRA: PodLayer(dra.render, dra.free, dra.objects, dra.same),
    LayerName.METAGPU: PodLayer(metagpu.render, metagpu.free),
    LayerName.NVSHARE: PodLayer(nvshare.render, nvshare.free),
    LayerName.KUBESHARE: PodLayer(kubeshare.render, kubeshare.free),
}
"""All layers but the native layer, which the hub's ledger places."""
