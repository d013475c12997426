"""The GPUs of a machine or a cluster, and what is due on them, at one moment. Who holds what: see the ledger."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import GpuReport, Notice
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.model.template import Gpu, Template
from gpushare_spawner.placement import PlacementRequest, Requested
from gpushare_spawner.spawner.queue.inventory import GpuInventory, GpuKind
from gpushare_spawner.spawner.queue.other_layers import OtherLayers

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
    _suiting: dict[int, tuple[Gpu, tuple[GpuKind, ...], frozenset[str]]] = field(default_factory=dict, repr=False)

    @property
    def gpus(self) -> Mapping[str, GpuReport]:
        """Every GPU by its UUID."""
        return self.inventory.gpus

    @property
    def capacity_units(self) -> int:
        """Units of 1 % of all GPUs, those of other layers too."""
        others = self.layers.gpus if self.layers is not None else 0
        return (len(self.gpus) + others) * UNITS_PER_GPU

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

    def suiting(self, gpu: Gpu) -> tuple[GpuKind, ...]:
        """The kinds that would do for what a template asks for."""
        return self._suits(gpu)[1]

    def models(self, gpu: Gpu) -> frozenset[str]:
        """The models that would do for what a template asks for."""
        return self._suits(gpu)[2]

    def request(self, template: Template) -> PlacementRequest:
        """What a spawn of this template asks of placement. Raises ValueError for a template without a GPU."""
        if template.gpu is None:
            raise ValueError(f"template {template.name} asks for no GPU")
        guaranteed = guaranteed_resources(template)
        return PlacementRequest(
            template.gpu.share,
            cpu=guaranteed.cpu,
            memory=guaranteed.memory,
            models=self.models(template.gpu),
            template=template.name,
            layer=template.gpu.layer or LayerName.NATIVE,
        )

    def _suits(self, gpu: Gpu) -> tuple[Gpu, tuple[GpuKind, ...], frozenset[str]]:
        # by identity, which is cheap; the object is kept beside it so that no other can take its place
        found = self._suiting.get(id(gpu))
        if found is None:
            kinds = tuple(kind for kind in self.kinds if kind.suits(gpu))
            found = (gpu, kinds, frozenset(kind.model for kind in kinds))
            self._suiting[id(gpu)] = found
        return found
