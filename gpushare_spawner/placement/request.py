"""What a spawn asks of placement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.share import Share
from gpushare_spawner.model.template import Gpu


def suits(gpu: Gpu, model: str, memory_bytes: int) -> bool:
    """Whether an empty GPU would do for what a template asks for: its model, and memory (bytes) for the guarantee."""
    guarantee = gpu.memory.guarantee
    return gpu.accepts(model) and (guarantee is None or resolve_bytes(guarantee, memory_bytes) <= memory_bytes)


def suitable_models(gpu: Gpu, kinds: Iterable[tuple[str, int]]) -> frozenset[str]:
    """Return the models that would do for what a template asks for. ``kinds``: models with their memory in bytes."""
    return frozenset(model for model, memory_bytes in kinds if suits(gpu, model, memory_bytes))


ByLayer = tuple[tuple[LayerName, frozenset[str]], ...]
"""Sharing layers, and the GPU models that each is for."""


def layer_on(model: str, layer: LayerName, by_layer: ByLayer) -> LayerName:
    """Return the sharing layer on GPUs of a model: that of ``by_layer``, else ``layer``."""
    return next((one for one, models in by_layer if model in models), layer)


@dataclass(frozen=True)
class Demand:
    """What a node must have for a pod or process. Requests with equal demands are placed by one index."""

    units: int
    """Units of 1 % on each of the GPUs; 0 with ``count`` 0: no GPU."""
    count: int
    """GPUs, of one node and one model."""
    cpu: int = 0
    """Millicores."""
    memory: int = 0
    """Bytes of host memory."""
    models: frozenset[str] | None = None
    """The GPU models that will do; None: any."""
    ineligible: frozenset[str] = frozenset()
    """Nodes that cannot take the pod whatever is free: taints, labels. The same set for every request of a template."""
    layer: LayerName = LayerName.NATIVE
    """The sharing layer: a GPU that sessions of another one have does not do."""
    by_layer: ByLayer = ()
    """Several layers will do, each on GPUs of its own models. The first that has a place counts."""
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # asked for at each look at an index; the sets can be large
        of_layer = (self.layer, self.by_layer)
        known = (self.units, self.count, self.cpu, self.memory, self.models, self.ineligible, of_layer)
        object.__setattr__(self, "_hash", hash(known))

    def __hash__(self) -> int:
        return self._hash

    def accepts(self, model: str) -> bool:
        """Whether a GPU of this model will do."""
        return self.models is None or model in self.models

    def layer_on(self, model: str) -> LayerName:
        """The sharing layer on GPUs of this model."""
        return layer_on(model, self.layer, self.by_layer)


@dataclass(frozen=True)
class PlacementRequest:
    """One spawn's request. A strategy sees all of it."""

    share: Share
    cpu: int = 0
    """Millicores that the pod requests; 0: none."""
    memory: int = 0
    """Bytes of host memory that the pod requests; 0: none."""
    models: frozenset[str] | None = None
    """The GPU models that will do; None: any."""
    user: str = ""
    groups: tuple[str, ...] = ()
    template: str = ""
    ineligible: frozenset[str] = frozenset()
    """Nodes that cannot take pods of the template, because of taints or labels."""
    left_out: frozenset[str] = frozenset()
    """Nodes that this request avoids for a time, because one of its pods was not admitted there."""
    node: str = ""
    """The only node that will do; empty: any."""
    layer: LayerName = LayerName.NATIVE
    """The sharing layer of the GPUs."""
    by_layer: ByLayer = ()
    """See `Demand.by_layer`."""

    @cached_property
    def demand(self) -> Demand:
        """What a node must have for this request."""
        share = self.share
        return Demand(
            share.units, share.count, self.cpu, self.memory, self.models, self.ineligible, self.layer, self.by_layer
        )

    def of_each_layer(self) -> Iterator[PlacementRequest]:
        """Yield the request for each of its layers alone, in the order in which they are tried."""
        if not self.by_layer:
            yield self
        for layer, models in self.by_layer:
            yield replace(self, layer=layer, models=models, by_layer=())
