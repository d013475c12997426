"""The layers whose share is rendered into a pod and placed by a scheduler: each one's functions, by its name."""

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
    """The functions of one layer. They are pure, and change nothing that they are given."""

    render: Callable[[PodSpec, LayerRequest], PodSpec]
    """Return the pod with the share. Raises `LayerCannot`."""
    free: Callable[[LayerRequest], LayerCapacity]
    """Return what is free for servers of the request's template. Raises `LayerCannot`."""
    objects: Callable[[LayerRequest], tuple[Manifest, ...]] = _no_objects
    """Return objects that must be in the server's namespace before the pod. Equal requests have equal objects with
    equal names. Raises `LayerCannot`."""
    same: Callable[[Manifest, Manifest], bool] = operator.eq
    """Return whether an object that has the name already, as the API server shows it, says what one of `objects` does:
    in a namespace of their own users can make objects, too."""


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
"""All but the native layer, which the hub's ledger places."""
