"""The GPUs of a machine or a cluster, and what is due on them, at one moment. Who holds what: see the ledger."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from gpushare_spawner.model.layers import LayerName, LayersFile, machine_layer
from gpushare_spawner.model.report import GpuReport, Notice
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement import ByLayer, PlacementRequest, Requested
from gpushare_spawner.spawner.queue.inventory import GpuInventory, GpuKind
from gpushare_spawner.spawner.queue.other_layers import OtherLayers

NO_RULES = LayersFile()
MILLICORES = 1000
"""In a CPU core."""


def guaranteed_resources(template: Template) -> Requested:
    """Return the CPU and memory that a template guarantees to a server."""
    cpu, memory = template.resources.cpu.guarantee, template.resources.memory.guarantee
    return Requested(cpu=math.ceil((cpu or 0.0) * MILLICORES), memory=memory or 0)


@dataclass(frozen=True)
class GpuSnapshot:
    """What is known now beside the ledger.

    A thousand GPUs are of few kinds: what a template could use is found among those.
    """

    inventory: GpuInventory
    awaited: str = ""
    """Why GPUs that exist are missing here for the moment, in a sentence; empty where none are."""
    announced: tuple[tuple[str, Notice], ...] = ()
    """Idle actions that are due, each with its session's name in the ledger."""
    layers: OtherLayers | None = None
    """GPUs that other layers share; None: there are none."""
    rules: LayersFile = NO_RULES
    """The layers of these GPUs by their models, where the hub places by all layers: on one machine."""
    _suiting: dict[int, _Suiting] = field(default_factory=dict, repr=False)

    @property
    def gpus(self) -> Mapping[str, GpuReport]:
        """Every GPU by its UUID."""
        return self.inventory.gpus

    @property
    def capacity_units(self) -> int:
        """Units of 1 % of all GPUs, those of other layers too."""
        others = self.layers.gpus if self.layers is not None else 0
        here = sum(UNITS_PER_GPU if gpu.mig is None else gpu.capacity_units for gpu in self.gpus.values())
        return here + others * UNITS_PER_GPU

    def native(self, template: Template) -> bool:
        """Return whether GPUs with an agent can serve a template."""
        return self.layers is None or self.layers.native(template)

    def other_layers(self, template: Template) -> OtherLayers | None:
        """Return the other layers if one of them can serve a template, else None."""
        return self.layers if self.layers is not None and self.layers.names(template) else None

    @cached_property
    def kinds(self) -> tuple[GpuKind, ...]:
        """The kinds of GPUs there are, in the order in which they were reported."""
        return self.inventory.kinds

    def suiting(self, template: Template) -> tuple[GpuKind, ...]:
        """The kinds that would do for what a template asks for; none for a template without a GPU."""
        return self._suits(template).kinds

    def models(self, template: Template) -> frozenset[str]:
        """The models that would do for what a template asks for; none for a template without a GPU."""
        return self._suits(template).models

    def request(self, template: Template) -> PlacementRequest:
        """What a spawn of this template asks of placement. Raises ValueError for a template without a GPU."""
        return self._suits(template).request

    def _suits(self, template: Template) -> _Suiting:
        # by identity, which is cheap; the object is kept beside it so that no other can take its place
        found = self._suiting.get(id(template))
        if found is None:
            kinds: list[GpuKind] = []
            by_layer: dict[LayerName, set[str]] = {}
            for kind in self.kinds:
                layer = self._layer_on(kind, template)
                if layer is not None and template.gpu is not None and kind.suits(template.gpu):
                    kinds.append(kind)
                    by_layer.setdefault(layer, set()).add(kind.model)
            found = self._suiting[id(template)] = _Suiting(template, tuple(kinds), self._in_order(by_layer))
        return found

    def _layer_on(self, kind: GpuKind, template: Template) -> LayerName | None:
        """The layer by which a template's sessions can have such GPUs; None: they cannot."""
        if template.gpu is None:
            return None
        named = template.gpu.layer
        if named is not None:
            return named if (named is LayerName.MIG) is (kind.mig is not None) else None
        layer = machine_layer(self.rules, kind.gpu_model, mig=kind.mig is not None)
        if layer is None or layer is LayerName.NATIVE:
            return layer
        # a template that promises what a layer cannot keep is not offered there
        return None if template.gpu.share.count > 1 or template.broken_promises(layer) else layer

    def _in_order(self, by_layer: Mapping[LayerName, set[str]]) -> ByLayer:
        """As the rules name the layers; the native one comes last, as on a cluster."""
        named = [rule.layer for rule in self.rules.rules]
        order = sorted(by_layer, key=lambda layer: (layer is LayerName.NATIVE, layer in named and named.index(layer)))
        return tuple((layer, frozenset(by_layer[layer])) for layer in order)


@dataclass(frozen=True)
class _Suiting:
    """What would do for a template."""

    template: Template
    kinds: tuple[GpuKind, ...]
    by_layer: ByLayer
    """Their models, by the layer that a session would have there."""

    @cached_property
    def models(self) -> frozenset[str]:
        return frozenset(kind.model for kind in self.kinds)

    @cached_property
    def request(self) -> PlacementRequest:
        """Raises ValueError for a template without a GPU."""
        gpu = self.template.gpu
        if gpu is None:
            raise ValueError(f"template {self.template.name} asks for no GPU")
        guaranteed = guaranteed_resources(self.template)
        return PlacementRequest(
            gpu.share,
            cpu=guaranteed.cpu,
            memory=guaranteed.memory,
            models=self.models,
            template=self.template.name,
            layer=self.by_layer[0][0] if self.by_layer else gpu.layer or LayerName.NATIVE,
            by_layer=self.by_layer if len(self.by_layer) > 1 else (),
        )
