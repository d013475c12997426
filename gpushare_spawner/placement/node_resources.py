"""CPU, memory and pods: what a node has left of them beside its GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


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
    most_cpu: int | None = field(default=None, compare=False)
    """Millicores that are free while nothing runs there. It changes with a node's machine only, so it is no news."""
    most_memory: int | None = field(default=None, compare=False)
    """Bytes that are free while nothing runs there."""
    session_cpu: int | None = None
    """Millicores that are free while no session runs there, what other pods request taken off."""
    session_memory: int | None = None
    """Bytes that are free while no session runs there."""

    @classmethod
    def of_empty_node(cls, cpu: int | None, memory: int | None, pods: int | None = None) -> NodeResources:
        """Return what is free on a node where nothing runs."""
        return cls(cpu, memory, pods, cpu, memory, cpu, memory)

    def can_ever_have(self, cpu: int, memory: int) -> bool:
        """Whether so much would be free if nothing ran there; true where that is not known."""
        return (self.most_cpu is None or cpu <= self.most_cpu) and (
            self.most_memory is None or memory <= self.most_memory
        )

    def sessions_can_leave(self, cpu: int, memory: int) -> bool:
        """Whether so much would be free if all sessions there ended; true where that is not known.

        When pods that are no sessions end nobody knows: daemons never do.
        """
        return (self.session_cpu is None or cpu <= max(self.session_cpu, 0)) and (
            self.session_memory is None or memory <= max(self.session_memory, 0)
        )

    def lacks_cpu(self, cpu: int) -> bool:
        """Whether less is free than a pod asks for. One that asks for none fits where too much is taken already."""
        return self.cpu is not None and self.cpu < cpu > 0

    def lacks_memory(self, memory: int) -> bool:
        """Whether less is free than a pod asks for."""
        return self.memory is not None and self.memory < memory > 0

    def lacks_pods(self) -> bool:
        """Whether the node takes no more pods."""
        return self.pods is not None and self.pods < 1

    def less(self, requested: Requested, by_others: Requested = NOTHING) -> NodeResources:
        """Return what is left; it can be less than nothing. ``by_others``: the part that no session requests."""
        return NodeResources(
            None if self.cpu is None else self.cpu - requested.cpu,
            None if self.memory is None else self.memory - requested.memory,
            None if self.pods is None else self.pods - requested.pods,
            self.most_cpu,
            self.most_memory,
            None if self.session_cpu is None else self.session_cpu - by_others.cpu,
            None if self.session_memory is None else self.session_memory - by_others.memory,
        )

    def more(self, requested: Requested) -> NodeResources:
        """Return what would be free if so much were not requested."""
        return self.less(Requested(-requested.cpu, -requested.memory, -requested.pods))


UNKNOWN = NodeResources()
