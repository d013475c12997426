"""Functions of the layers that render a share into a pod for a foreign scheduler, by the layer's name."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.sharing import dra, hami, kai, kubeshare, mig, replicas
from gpushare_spawner.sharing.base import LayerCapacity, LayerRequest, PodChange, PodSpec, ResourceChoice

Manifest = dict[str, Any]


@dataclass(frozen=True)
class PodLayer:
    """Functions of one layer. They are pure and do not change their arguments."""

    render: Callable[[PodSpec, LayerRequest], PodSpec]
    """Function that returns the pod with the share. Raises `LayerCannot`."""
    free: Callable[[LayerRequest], LayerCapacity]
    """Function that returns the free capacity for servers of the request's template. Raises `LayerCannot`."""
    objects: Callable[[LayerRequest], tuple[Manifest, ...]] = lambda request: ()
    """Function that returns objects that must be in the server's namespace before the pod. Equal requests give equal
    objects with equal names. Raises `LayerCannot`."""
    same: Callable[[Manifest, Manifest], bool] = operator.eq
    """Function that returns whether an existing object of that name, as the API server shows it, equals one of
    `objects`: users can create objects in their own namespace."""


def _by_resource(choose: Callable[[LayerRequest], ResourceChoice]) -> PodLayer:
    """Return the functions of a layer with an extended resource. Both raise LayerCannot as ``choose`` does."""

    def render(form: PodSpec, request: LayerRequest) -> PodSpec:
        choice = choose(request)
        labels = {**request.node_labels(), **choice.labels}
        return PodChange(limits={choice.resource: str(choice.amount)}, node_labels=labels).apply(form)

    return PodLayer(render, lambda request: request.resource_capacity(choose(request)))


POD_LAYERS: Mapping[LayerName, PodLayer] = {
    LayerName.TIME_SLICING: _by_resource(
        lambda request: replicas.choose_replica(request, LayerName.TIME_SLICING, memory_divided=False)
    ),
    LayerName.MPS: _by_resource(lambda request: replicas.choose_replica(request, LayerName.MPS, memory_divided=True)),
    LayerName.MIG: _by_resource(mig.choose),
    LayerName.HAMI: PodLayer(hami.render, hami.free),
    LayerName.KAI: PodLayer(kai.render, kai.free),
    LayerName.DRA: PodLayer(dra.render, dra.free, dra.objects, dra.same),
    LayerName.METAGPU: _by_resource(replicas.choose_parts),
    LayerName.NVSHARE: _by_resource(replicas.choose_place),
    LayerName.KUBESHARE: PodLayer(kubeshare.render, kubeshare.free),
}
"""All layers but the native layer, which the hub's ledger places."""
