"""What a spawn asks of placement.

What a cluster is asked for: kinds of requests and how often each comes. Pure data; time comes in as an argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.share import Share
from gpushare_spawner.model.template import TemplateGpu


def suits(gpu: TemplateGpu, model: str, memory_bytes: int) -> bool:
    """Whether an empty GPU would do for what a template asks for: its model, and memory (bytes) for the guarantee."""
    guarantee = gpu.memory.guarantee
    return gpu.accepts(model) and (guarantee is None or resolve_bytes(guarantee, memory_bytes) <= memory_bytes)


def suitable_models(gpu: TemplateGpu, kinds: Iterable[tuple[str, int]]) -> frozenset[str]:
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


HALF_LIFE_SECONDS = 7 * 86400.0
"""After so long a spawn counts half. A week: notebooks follow the days of a week, and courses change by terms."""
PRIOR = 1.0
"""Every template counts as if it had been spawned so often just now: before there is any spawn all count the same."""
STEPS = 20
"""Popularities are rounded to 1/20 of the most popular one's, so that one more spawn seldom changes the workload, and
what strategies have computed stays valid."""


@dataclass(frozen=True)
class Popular:
    """A kind of request and how much of the workload it is."""

    demand: Demand
    popularity: float
    """In any unit; `Workload` divides by the sum."""


@dataclass(frozen=True)
class Workload:
    """The requests that are expected. Memory is not looked at."""

    kinds: tuple[Popular, ...] = ()

    @property
    def cpu_per_gpu(self) -> float:
        """Millicores that are requested for each GPU, on average over the workload; 0 where nothing is requested."""
        gpus = sum(kind.popularity * kind.demand.units * kind.demand.count for kind in self.kinds) / 100
        cpu = sum(kind.popularity * kind.demand.cpu for kind in self.kinds)
        return cpu / gpus if gpus else 0.0


NO_WORKLOAD = Workload()


class RecentSpawns:
    """How often each template was spawned recently; older spawns count less."""

    def __init__(self, half_life: float = HALF_LIFE_SECONDS) -> None:
        self._half_life = half_life
        self._counts: dict[str, tuple[float, float]] = {}

    def spawned(self, template: str, now: float) -> None:
        """Count a spawn; ``now`` in seconds on any clock that all calls share."""
        self._counts[template] = (self.count(template, now) + 1.0, now)

    def count(self, template: str, now: float) -> float:
        """Return the spawns of a template, each halved once for every half-life that has passed since."""
        count, at = self._counts.get(template, (0.0, now))
        return count * math.pow(0.5, max(0.0, now - at) / self._half_life)

    def workload(self, templates: Mapping[str, Demand], now: float) -> Workload:
        """Return the workload of these templates; others count nothing."""
        counts = {name: self.count(name, now) + PRIOR for name in templates}
        most = max(counts.values(), default=PRIOR)
        popularity: dict[Demand, float] = {}
        for name in sorted(templates):
            steps = max(1, round(counts[name] / most * STEPS))
            popularity[templates[name]] = popularity.get(templates[name], 0.0) + steps
        return workload_of(popularity.items())


def workload_of(popularity: Iterable[tuple[Demand, float]]) -> Workload:
    """Return the workload of these demands with their popularities; what is not popular at all is left out."""
    return Workload(tuple(Popular(demand, value) for demand, value in popularity if value > 0))
