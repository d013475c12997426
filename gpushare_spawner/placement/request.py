"""Placement requests of spawns, and the expected workload: kinds of requests with their popularity.

Pure data: time is an argument. strategy.py and ledger.py place the requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.share import NO_NEIGHBOUR_RULES, UNITS_PER_GPU, NeighbourRules, Share
from gpushare_spawner.model.template import Template, TemplateGpu


def suits(gpu: TemplateGpu, model: str, memory_bytes: int) -> bool:
    """Return whether an empty GPU suits a template: its model, and its memory (bytes) for the guarantee."""
    guarantee = gpu.memory.guarantee
    return gpu.accepts(model) and (guarantee is None or resolve_bytes(guarantee, memory_bytes) <= memory_bytes)


def suitable_models(gpu: TemplateGpu, kinds: Iterable[tuple[str, int]]) -> frozenset[str]:
    """Return the models that suit a template. ``kinds``: models with their memory in bytes."""
    return frozenset(model for model, memory_bytes in kinds if suits(gpu, model, memory_bytes))


ByLayer = tuple[tuple[LayerName, frozenset[str]], ...]
"""Sharing layers with their GPU models."""


def layer_on(model: str, layer: LayerName, by_layer: ByLayer) -> LayerName:
    """Return the sharing layer on GPUs of a model: from ``by_layer``, or else ``layer``."""
    return next((candidate for candidate, models in by_layer if model in models), layer)


@dataclass(frozen=True)
class Conditions:
    """The conditions of a template for the choice of GPUs, beside their free units."""

    neighbours: NeighbourRules = NO_NEIGHBOUR_RULES
    """The labels and rules of the session itself."""
    near: frozenset[str] = frozenset()
    """Labels: a session with one of them is on each GPU; without effect while none runs anywhere."""
    gpu: str = ""
    """UUID of the only suitable GPU; empty: any."""
    nodes: frozenset[str] = frozenset()
    """The only suitable nodes; empty: any."""

    @classmethod
    def of(cls, template: Template) -> Conditions:
        """Return the conditions of a template's sessions."""
        given = template.placement
        conditions = cls(template.neighbours, frozenset(given.near), given.gpu or "", frozenset(given.nodes))
        return UNCONDITIONAL if conditions == UNCONDITIONAL else conditions

    def name(self, gpu: str, node: str) -> bool:
        """Return whether a GPU is the named one, or any is suitable, and so is its node."""
        return self.gpu in ("", gpu) and (not self.nodes or node in self.nodes)

    @property
    def of_place(self) -> Conditions:
        """The conditions without those on other sessions."""
        return Conditions(gpu=self.gpu, nodes=self.nodes) if self.gpu or self.nodes else UNCONDITIONAL


UNCONDITIONAL = Conditions()


def most_requests(each: Sequence[int], count: int) -> int:
    """Return the number of requests for ``count`` GPUs that fit. ``each``: the number that fits on each GPU."""
    most = sum(each) // count
    # a request has different GPUs, so a GPU counts at most once for each request
    while count > 1 and sum([min(fit, most) for fit in each]) < most * count:
        most -= 1
    return most


@dataclass(frozen=True)
class Demand:
    """Resources that a node must have for a pod or process. Requests with equal demands share an index."""

    units: int
    """Units of 1 % on each of the GPUs; 0 with ``count`` 0: no GPU."""
    count: int
    """GPUs, of one node and one model."""
    cpu: int = 0
    """Millicores."""
    memory: int = 0
    """Bytes of host memory."""
    models: frozenset[str] | None = None
    """The GPU models that will do; None if any model will do."""
    ineligible: frozenset[str] = frozenset()
    """Nodes that taints or labels exclude. The same set for all requests of a template."""
    layer: LayerName = LayerName.NATIVE
    """Sharing layer. A GPU with sessions of another layer is not suitable."""
    by_layer: ByLayer = ()
    """Alternative layers, each on GPUs of its own models. The first with a place counts."""
    conditions: Conditions = UNCONDITIONAL
    last_units: int = 0
    """Units on the last GPU if these are fewer, see `Share`: then all other GPUs are whole."""
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # needed for each query of an index; the sets can be large
        of_layer = (self.layer, self.by_layer)
        units = (self.units, self.count, self.last_units)
        key = (units, self.cpu, self.memory, self.models, self.ineligible, of_layer, self.conditions)
        object.__setattr__(self, "_hash", hash(key))

    def __hash__(self) -> int:
        return self._hash

    @property
    def each(self) -> tuple[int, ...]:
        """The units on each GPU, see `Share.each`."""
        return (*(self.units,) * (self.count - 1), self.least_units)[: self.count]

    @property
    def least_units(self) -> int:
        """The units on the last GPU, which has no more than each of the others."""
        return self.last_units or self.units

    @property
    def total_units(self) -> int:
        """The units on all GPUs."""
        return self.units * (self.count - 1) + self.least_units

    @property
    def is_part_of_several(self) -> bool:
        """Whether it is for several GPUs that are not all whole."""
        return self.count > 1 and self.least_units < UNITS_PER_GPU

    def most_requests(self, free: Sequence[int]) -> int:
        """Return how many such requests fit on GPUs of one node and model. ``free``: the units of each."""
        count, least = self.count, self.least_units
        if count == 1:
            return sum([units // least for units in free])
        if self.last_units:  # each request takes whole GPUs, and a part of the rest
            parts, of_whole = sum([units // least for units in free]), UNITS_PER_GPU // least
            return min(free.count(UNITS_PER_GPU) // (count - 1), parts // ((count - 1) * of_whole + 1))
        return most_requests([units // least for units in free], count)

    def accepts(self, model: str) -> bool:
        """Return whether a GPU of this model is suitable."""
        return self.models is None or model in self.models

    def layer_on(self, model: str) -> LayerName:
        """Return the sharing layer on GPUs of this model."""
        return layer_on(model, self.layer, self.by_layer)

    def under(self, conditions: Conditions) -> Demand:
        """Return the demand under other conditions; itself if they are the same."""
        return self if conditions == self.conditions else replace(self, conditions=conditions)


@dataclass(frozen=True)
class PlacementRequest:
    """Placement request of one spawn. A strategy sees all of it."""

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
    """Nodes that this request avoids for a time, because they rejected one of its pods."""
    node: str = ""
    """The only suitable node; empty: any."""
    layer: LayerName = LayerName.NATIVE
    """The sharing layer of the GPUs."""
    by_layer: ByLayer = ()
    """See `Demand.by_layer`."""
    conditions: Conditions = UNCONDITIONAL

    @cached_property
    def demand(self) -> Demand:
        """Resources that a node must have for this request."""
        share = self.share
        return Demand(
            share.units,
            share.count,
            self.cpu,
            self.memory,
            self.models,
            self.ineligible,
            self.layer,
            self.by_layer,
            self.conditions,
            share.last_units,
        )

    def of_each_layer(self) -> Iterator[PlacementRequest]:
        """Yield the request for each of its layers alone, in the order of attempts."""
        if not self.by_layer:
            yield self
        for layer, models in self.by_layer:
            yield replace(self, layer=layer, models=models, by_layer=())


HALF_LIFE_SECONDS = 7 * 86400.0
"""Half-life of a spawn's count. A week: notebook use follows the days of a week, and courses change by terms."""
PRIOR = 1.0
"""Recent spawns that are added for each template: before the first spawn all templates count the same."""
MOST_DIFFERENCE = 0.05
"""Part of the requests that may be of other kinds before a strategy takes over a workload: then all nodes are rated
again, and a difference of a twentieth seldom changes a choice."""


@dataclass(frozen=True)
class Popular:
    """Kind of request with its part of the workload."""

    demand: Demand
    popularity: float
    """In any unit; `Workload` divides by the sum."""


@dataclass(frozen=True)
class Workload:
    """Expected requests. Memory is ignored."""

    kinds: tuple[Popular, ...] = ()

    @property
    def cpu_per_gpu(self) -> float:
        """Requested millicores for each GPU, on average over the workload; 0 if nothing is requested."""
        gpus = sum(kind.popularity * kind.demand.total_units for kind in self.kinds) / UNITS_PER_GPU
        cpu = sum(kind.popularity * kind.demand.cpu for kind in self.kinds)
        return cpu / gpus if gpus else 0.0

    def resembles(self, other: Workload) -> bool:
        """Return whether the same kinds are requested, in parts that differ by at most `MOST_DIFFERENCE` in sum."""
        mine, others = self._parts, other._parts
        return mine.keys() == others.keys() and (
            sum(abs(part - others[demand]) for demand, part in mine.items()) <= 2 * MOST_DIFFERENCE
        )

    @cached_property
    def _parts(self) -> dict[Demand, float]:
        """Part of each kind in all requests."""
        total = sum(kind.popularity for kind in self.kinds) or 1.0
        return {kind.demand: kind.popularity / total for kind in self.kinds}


NO_WORKLOAD = Workload()


class RecentSpawns:
    """Recent spawns of each template. Older spawns count less."""

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
        """Return the workload of these templates. Others are ignored."""
        popularity: dict[Demand, float] = {}
        for name in sorted(templates):
            popularity[templates[name]] = popularity.get(templates[name], 0.0) + self.count(name, now) + PRIOR
        return workload_of(popularity.items())


def workload_of(popularity: Iterable[tuple[Demand, float]]) -> Workload:
    """Return the workload of these demands with their popularities. Demands of popularity 0 are left out."""
    return Workload(tuple(Popular(demand, value) for demand, value in popularity if value > 0))
