"""What a spawn asks of placement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
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
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # asked for at each look at an index; the sets can be large
        known = (self.units, self.count, self.cpu, self.memory, self.models, self.ineligible, self.layer)
        object.__setattr__(self, "_hash", hash(known))

    def __hash__(self) -> int:
        return self._hash

    def accepts(self, model: str) -> bool:
        """Whether a GPU of this model will do."""
        return self.models is None or model in self.models


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

    @cached_property
    def demand(self) -> Demand:
        """What a node must have for this request."""
        return Demand(
            self.share.units, self.share.count, self.cpu, self.memory, self.models, self.ineligible, self.layer
        )
