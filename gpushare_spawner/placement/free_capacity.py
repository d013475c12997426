"""The GPUs of all nodes and what is left on each: what a strategy looks at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from gpushare_spawner.model.report import Report
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.placement.capacity_index import CapacityIndex


@dataclass
class GpuCapacity:
    """One GPU. Units are of 1 %; `FreeCapacity.update` changes them, nobody else."""

    uuid: str
    node: str
    index: int
    model: str
    healthy: bool
    capacity: int
    """Units that may be guaranteed."""
    rank: int
    """Position among all GPUs, by node and index; the lowest wins a tie."""
    unowned: int
    """Capacity less what sessions own."""
    free: int
    """Capacity less what is guaranteed now: units that nobody owns or that idle owners have lent."""


@dataclass
class NodeCapacity:
    """The GPUs of one model on one node."""

    name: str
    model: str
    rank: int
    gpus: tuple[GpuCapacity, ...]
    unowned: int = 0
    """Whole GPUs that nobody owns a part of."""
    free: int = 0
    """Whole GPUs that are free or lent altogether."""


class FreeCapacity:
    """What is left on the GPUs, with indexes that find the best fit among 10,000 of them in microseconds.

    Unhealthy GPUs are known but offered to nobody. Several whole GPUs are always of one node and one model.
    """

    def __init__(self, reports: Iterable[Report]) -> None:
        newest: dict[str, Report] = {}
        for report in reports:
            known = newest.get(report.node)
            if known is None or report.published_at >= known.published_at:
                newest[report.node] = report
        self.reports: tuple[Report, ...] = tuple(newest[node] for node in sorted(newest))
        """The newest report of each node, by name."""
        self._gpus: dict[str, GpuCapacity] = {}
        self._ranked: list[GpuCapacity] = []
        self._index: dict[str, CapacityIndex] = {}
        self._nodes: list[NodeCapacity] = []
        self._node_of: dict[str, NodeCapacity] = {}
        self._node_index: dict[str, CapacityIndex] = {}
        self._fill()

    def _fill(self) -> None:
        for report in self.reports:
            by_model: dict[str, list[GpuCapacity]] = {}
            for gpu in sorted(report.gpus, key=lambda gpu: (gpu.index, gpu.uuid)):
                if gpu.uuid in self._gpus:
                    continue  # one GPU seen by two nodes is still one GPU
                found = GpuCapacity(
                    gpu.uuid,
                    report.node,
                    gpu.index,
                    gpu.model,
                    gpu.healthy,
                    gpu.capacity_units,
                    rank=len(self._ranked),
                    unowned=gpu.capacity_units,
                    free=gpu.capacity_units,
                )
                self._gpus[gpu.uuid] = found
                self._ranked.append(found)
                if gpu.healthy:
                    by_model.setdefault(gpu.model, []).append(found)
                    self._index.setdefault(gpu.model, CapacityIndex()).put(found.rank, found.unowned, found.free)
            for model, gpus in by_model.items():
                node = NodeCapacity(report.node, model, len(self._nodes), tuple(gpus))
                self._nodes.append(node)
                self._node_of.update((gpu.uuid, node) for gpu in gpus)
                node.unowned, node.free = _whole(gpus)
                self._node_index.setdefault(model, CapacityIndex()).put(node.rank, node.unowned, node.free)

    @property
    def gpus(self) -> Mapping[str, GpuCapacity]:
        """Every GPU by its UUID, unhealthy ones too, in the order of their ranks."""
        return MappingProxyType(self._gpus)

    @property
    def nodes(self) -> Sequence[NodeCapacity]:
        """Healthy GPUs by node and model."""
        return self._nodes

    @property
    def models(self) -> Sequence[str]:
        """Models of the healthy GPUs, sorted."""
        return sorted(self._index)

    def update(self, uuid: str, unowned: int, free: int) -> None:
        """Set what is left on a GPU. Raises KeyError for a GPU that is in no report."""
        gpu = self._gpus[uuid]
        if (gpu.unowned, gpu.free) == (unowned, free):
            return
        if gpu.healthy:
            index = self._index[gpu.model]
            index.take(gpu.rank, gpu.unowned, gpu.free)
            index.put(gpu.rank, unowned, free)
        gpu.unowned, gpu.free = unowned, free
        if gpu.healthy:
            node = self._node_of[uuid]
            before, after = (node.unowned, node.free), _whole(node.gpus)
            if before != after:
                index = self._node_index[node.model]
                index.take(node.rank, *before)
                index.put(node.rank, *after)
                node.unowned, node.free = after

    def tightest_gpu(self, units: int, models: Iterable[str]) -> GpuCapacity | None:
        """The healthy GPU of these models with the fewest units that nobody owns, but at least ``units``."""
        found = [hit for model in models if (hit := self._index[model].tightest(units, units))]
        return self._ranked[min(found).rank] if found else None

    def lent_gpu(self, units: int, models: Iterable[str]) -> GpuCapacity | None:
        """The healthy GPU of these models with ``units`` free only if lent ones count; it needs the fewest of those."""
        found = [hit for model in models if (hit := self._index[model].nearest_below(units, units))]
        return self._ranked[min(found, key=lambda hit: (-hit.first, hit.second, hit.rank)).rank] if found else None

    def tightest_node(self, count: int, models: Iterable[str]) -> NodeCapacity | None:
        """The node with the fewest whole GPUs that nobody owns a part of, but at least ``count``."""
        found = [hit for model in models if (hit := self._node_index[model].tightest(count, count))]
        return self._nodes[min(found).rank] if found else None

    def lent_node(self, count: int, models: Iterable[str]) -> NodeCapacity | None:
        """The node with ``count`` whole GPUs free only if lent ones count; it needs the fewest of those."""
        found = [hit for model in models if (hit := self._node_index[model].nearest_below(count, count))]
        return self._nodes[min(found, key=lambda hit: (-hit.first, hit.second, hit.rank)).rank] if found else None


def _whole(gpus: Sequence[GpuCapacity]) -> tuple[int, int]:
    free = [gpu for gpu in gpus if gpu.free >= UNITS_PER_GPU]
    return sum(gpu.unowned >= UNITS_PER_GPU for gpu in free), len(free)
