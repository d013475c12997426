"""The GPUs of a machine or a cluster, and who holds what on them, at one moment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.report import GpuReport, Notice, Report
from gpushare_spawner.model.template import Gpu, Template
from gpushare_spawner.placement import Allocation, NodeResources, PlacementRequest

MILLICORES = 1000
"""In a CPU core."""


@dataclass(frozen=True)
class GpuKind:
    """GPUs of one model with the same memory."""

    model: str
    memory_bytes: int
    count: int

    def suits(self, gpu: Gpu) -> bool:
        """Whether one of them would do if it were empty: its model, and memory for the guarantee."""
        guarantee = gpu.memory.guarantee
        enough = guarantee is None or resolve_bytes(guarantee, self.memory_bytes) <= self.memory_bytes
        return enough and gpu.accepts(self.model)


@dataclass(frozen=True)
class GpuSnapshot:
    """What is known now. A thousand GPUs are of few kinds: what a template could use is found among those."""

    reports: tuple[Report, ...]
    allocations: tuple[Allocation, ...] = ()
    """Sessions that are known from elsewhere than the reports."""
    awaited: str = ""
    """Why GPUs that exist are missing here for the moment, in a sentence; empty where none are."""
    announced: tuple[tuple[str, Notice], ...] = ()
    """Idle actions that are due, each with its session's name in the ledger."""
    resources: Mapping[str, NodeResources] = field(default_factory=dict)
    """Free CPU, memory and pods of nodes, as far as they are known."""
    _suiting: dict[int, tuple[Gpu, tuple[GpuKind, ...], frozenset[str]]] = field(default_factory=dict, repr=False)

    @cached_property
    def gpus(self) -> dict[str, GpuReport]:
        """Every GPU by its UUID."""
        return {gpu.uuid: gpu for report in self.reports for gpu in report.gpus}

    @cached_property
    def kinds(self) -> tuple[GpuKind, ...]:
        """The kinds of GPUs there are, in the order in which they were reported."""
        counted: dict[tuple[str, int], int] = {}
        for gpu in self.gpus.values():
            counted[gpu.model, gpu.memory_bytes] = counted.get((gpu.model, gpu.memory_bytes), 0) + 1
        return tuple(GpuKind(model, memory, count) for (model, memory), count in counted.items())

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
        cpu, memory = template.resources.cpu.guarantee, template.resources.memory.guarantee
        return PlacementRequest(
            template.gpu.share,
            cpu=math.ceil((cpu or 0.0) * MILLICORES),
            memory=memory or 0,
            models=self.models(template.gpu),
            template=template.name,
        )

    def node_of(self, gpus: Iterable[str]) -> str:
        """The node that reports these GPUs; empty where none does."""
        wanted = set(gpus)
        return next((report.node for report in self.reports if wanted & {gpu.uuid for gpu in report.gpus}), "")

    def _suits(self, gpu: Gpu) -> tuple[Gpu, tuple[GpuKind, ...], frozenset[str]]:
        # by identity, which is cheap; the object is kept beside it so that no other can take its place
        found = self._suiting.get(id(gpu))
        if found is None:
            kinds = tuple(kind for kind in self.kinds if kind.suits(gpu))
            found = (gpu, kinds, frozenset(kind.model for kind in kinds))
            self._suiting[id(gpu)] = found
        return found
