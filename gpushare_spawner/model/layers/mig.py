"""MIG instances of a GPU: how large each is, and the smallest that holds a share. Pure data.

A GPU in MIG mode has 8 memory slices and up to 7 compute slices; the profile "3g.40gb" has 3 of the compute slices and
as many memory slices as 40 GB are. (NVIDIA MIG user guide, "Partitioning".)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.share import UNITS_PER_GPU

MEMORY_SLICES = 8

Memory = int | Fraction | None
"""Bytes, or a part of the GPU's memory slices; None: the same part as the share. A profile lacks some of the memory of
its slices, which programs cannot have on a whole GPU either."""


@dataclass(frozen=True)
class MigProfile:
    """A MIG profile of one GPU model."""

    name: str
    """As in the name of its resource: a "+" of the driver's name is a "." there."""
    slices: int
    """Compute slices."""
    compute_slices: int
    """Compute slices of the whole GPU."""
    memory_slices: int
    memory_bytes: int
    """At least so much."""

    def holds(self, units: int, memory: Memory = None) -> bool:
        """Return whether it is at least the share (units of 1 %) and has the memory."""
        if units > self.units:
            return False
        if isinstance(memory, int):
            return self.memory_bytes >= memory
        part = memory if memory is not None else Fraction(units, UNITS_PER_GPU)
        return Fraction(self.memory_slices, MEMORY_SLICES) >= part

    @property
    def units(self) -> int:
        """The largest share that its compute slices hold, in units of 1 %."""
        return min(UNITS_PER_GPU, self.slices * UNITS_PER_GPU // self.compute_slices)

    @property
    def size(self) -> tuple[Fraction, Fraction, int, str]:
        """What profiles are ordered by: the larger part of the GPU, both parts together, and plain ones first."""
        compute, memory = Fraction(self.slices, self.compute_slices), Fraction(self.memory_slices, MEMORY_SLICES)
        return max(compute, memory), compute + memory, len(self.name), self.name


@dataclass(frozen=True)
class MigInstance:
    """An isolated part of a GPU in MIG mode. One session can have it."""

    gpu: str
    """UUID of the GPU."""
    gpu_model: str
    profile: MigProfile


def gpu_label(index: int, instance: MigInstance | None) -> str:
    """Return how texts name a GPU, or an instance of it: "GPU 0", "GPU 0, MIG 1g.10gb"."""
    return f"GPU {index}" + (f", MIG {instance.profile.name}" if instance is not None else "")


def smallest(profiles: Iterable[MigProfile], units: int, memory: Memory = None) -> MigProfile | None:
    """Return the smallest profile that holds a share; None: there is none. See `MigProfile.holds`."""
    return min((one for one in profiles if one.holds(units, memory)), key=lambda one: one.size, default=None)


def guaranteed_memory(guarantee: str | None) -> Memory:
    """Return what a template guarantees of the GPU's memory."""
    if guarantee is None or not guarantee.endswith("%"):
        return None if guarantee is None else resolve_bytes(guarantee, 0)
    return Fraction(guarantee[:-1].strip()) / 100
