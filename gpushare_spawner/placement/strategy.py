"""How the GPUs for a share are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gpushare_spawner.model.share import UNITS_PER_GPU, Share
from gpushare_spawner.placement.free_capacity import FreeCapacity, GpuCapacity


class Strategy(Protocol):
    """Chooses GPUs; keeps no books. The ledger checks the choice and does the counting."""

    def choose(self, capacity: FreeCapacity, share: Share, models: Sequence[str]) -> tuple[str, ...] | None:
        """UUIDs of ``share.count`` healthy GPUs of one node and of these models, with ``share.units`` free on each.

        None where there is no such GPU. The same capacity and share must give the same answer.
        """
        ...


@dataclass(frozen=True)
class BestFit:
    """Fills the fullest GPU on which the share fits, so that whole ones stay whole.

    Units that nobody owns come first; lent ones are taken only where no GPU has enough of the others, and then as
    few as possible. Ties go to the first GPU by name of node and index.
    """

    def choose(self, capacity: FreeCapacity, share: Share, models: Sequence[str]) -> tuple[str, ...] | None:
        """See `Strategy`."""
        if share.count == 1:
            gpu = capacity.tightest_gpu(share.units, models) or capacity.lent_gpu(share.units, models)
            return (gpu.uuid,) if gpu is not None else None
        node = capacity.tightest_node(share.count, models) or capacity.lent_node(share.count, models)
        if node is None:
            return None
        fewest_lent_first = sorted((gpu for gpu in node.gpus if gpu.free >= UNITS_PER_GPU), key=_fit)
        return tuple(gpu.uuid for gpu in fewest_lent_first[: share.count])


def _fit(gpu: GpuCapacity) -> tuple[int, int, int]:
    return (max(0, UNITS_PER_GPU - gpu.unowned), gpu.unowned, gpu.rank)
