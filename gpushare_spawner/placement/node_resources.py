"""CPU, memory and pods: what a node has left of them beside its GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Requested:
    """CPU, memory and pods that sessions take of a node."""

    cpu: int = 0
    """Millicores."""
    memory: int = 0
    """Bytes of host memory."""
    pods: int = 0

    @classmethod
    def total(cls, parts: Iterable[Requested]) -> Requested:
        """Return the sum."""
        cpu = memory = pods = 0
        for part in parts:
            cpu, memory, pods = cpu + part.cpu, memory + part.memory, pods + part.pods
        return cls(cpu, memory, pods)


NOTHING = Requested()


@dataclass(frozen=True)
class NodeResources:
    """What is free on a node: allocatable less requested, as the cluster's scheduler counts. None: not known.

    What is not known is not looked at: then only the scheduler can say that a pod does not fit.
    """

    cpu: int | None = None
    """Millicores."""
    memory: int | None = None
    """Bytes of host memory."""
    pods: int | None = None
    """Pods that the node can still take."""

    def less(self, requested: Requested) -> NodeResources:
        """Return what is left; it can be less than nothing."""
        return NodeResources(
            None if self.cpu is None else self.cpu - requested.cpu,
            None if self.memory is None else self.memory - requested.memory,
            None if self.pods is None else self.pods - requested.pods,
        )

    def more(self, requested: Requested) -> NodeResources:
        """Return what would be free if so much were not requested."""
        return self.less(Requested(-requested.cpu, -requested.memory, -requested.pods))


UNKNOWN = NodeResources()
