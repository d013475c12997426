"""The GPUs that are reported, and of which kinds they are, kept up to date by what changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from gpushare_spawner.model.layers.mig import MigInstance, guaranteed_memory
from gpushare_spawner.model.report import GpuReport, in_order_of_claim
from gpushare_spawner.model.template import Gpu
from gpushare_spawner.placement import suits


@dataclass(frozen=True)
class GpuKind:
    """GPUs of one model with the same memory, or MIG instances of one profile."""

    model: str
    memory_bytes: int
    count: int
    mig: MigInstance | None = None
    """One of the instances, without the GPU that it is a part of; None: they are whole GPUs."""

    @property
    def gpu_model(self) -> str:
        """The model of the GPU, whose instances have a model name of their own."""
        return self.mig.gpu_model if self.mig is not None else self.model

    def suits(self, gpu: Gpu) -> bool:
        """Whether one of them would do if it were empty: its model, and memory for the guarantee."""
        if self.mig is None:
            return suits(gpu, self.model, self.memory_bytes)
        memory = guaranteed_memory(gpu.memory.guarantee)
        # CUDA uses one MIG device only
        one = gpu.share.count == 1 and gpu.accepts(self.gpu_model)
        return one and self.mig.profile.holds(gpu.share.units, memory)


class GpuInventory:
    """The GPUs of all nodes. A change costs what the node has."""

    def __init__(self) -> None:
        self._nodes: dict[str, tuple[GpuReport, ...]] = {}
        self._told: dict[str, dict[str, GpuReport]] = {}
        self._gpus: dict[str, GpuReport] = {}
        self._doubled: dict[str, tuple[str, ...]] = {}
        self._counted: Counter[tuple[str, int, MigInstance | None]] = Counter()

    def __len__(self) -> int:
        """How many nodes report, those without a GPU too."""
        return len(self._nodes)

    @property
    def gpus(self) -> Mapping[str, GpuReport]:
        """Every GPU by its UUID. Of one that two nodes report the report of the node that has it counts."""
        return MappingProxyType(self._gpus)

    @property
    def doubled(self) -> Mapping[str, tuple[str, ...]]:
        """The UUIDs that several nodes report, each with these nodes: the first has the GPU."""
        return dict(self._doubled)

    @property
    def kinds(self) -> tuple[GpuKind, ...]:
        """The kinds of GPUs there are, in the order in which they were reported first."""
        return tuple(GpuKind(model, memory, count, mig) for (model, memory, mig), count in self._counted.items())

    def put(self, node: str, gpus: Iterable[GpuReport]) -> None:
        """Set the GPUs of a node."""
        now = tuple(gpus)
        if self._nodes.get(node) == now:
            return
        self._change(node, now)
        self._nodes[node] = now

    def drop(self, node: str) -> None:
        """Forget a node; nothing happens where it is unknown."""
        self._change(node, ())
        self._nodes.pop(node, None)

    def _change(self, node: str, gpus: tuple[GpuReport, ...]) -> None:
        changed = dict.fromkeys([*(gpu.uuid for gpu in self._nodes.get(node, ())), *(gpu.uuid for gpu in gpus)])
        told = {gpu.uuid: gpu for gpu in gpus}
        for uuid in changed:
            of_nodes = self._told.setdefault(uuid, {})
            of_nodes.pop(node, None)
            if uuid in told:
                of_nodes[node] = told[uuid]
            before = self._gpus.pop(uuid, None)
            if before is not None:
                self._count(before, -1)
            claims = in_order_of_claim(of_nodes)
            if claims:
                now = self._gpus[uuid] = of_nodes[claims[0]]
                self._count(now, 1)
            else:
                del self._told[uuid]
            if len(claims) > 1:
                self._doubled[uuid] = claims
            else:
                self._doubled.pop(uuid, None)

    def _count(self, gpu: GpuReport, number: int) -> None:
        kind = (gpu.model, gpu.memory_bytes, None if gpu.mig is None else replace(gpu.mig, gpu=""))
        self._counted[kind] += number
        if not self._counted[kind]:
            del self._counted[kind]
