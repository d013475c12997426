"""Why no GPU can take a share: data. The sentences are in `wording.refusals`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpushare_spawner.model.share import UNITS_PER_GPU, Share
from gpushare_spawner.placement.free_capacity import FreeCapacity, GpuCapacity


class Reason(StrEnum):
    """What stands in the way."""

    NO_GPUS = "no-gpus"
    """No agent reports any GPU."""
    NO_MODEL = "no-model"
    """There are GPUs, but none of the models that the template asks for."""
    UNHEALTHY = "unhealthy"
    """The share would fit if all GPUs were healthy."""
    TOO_BIG = "too-big"
    """More than any node could ever give, even if it were empty."""
    FULL = "full"
    """It would fit, but other sessions have the units now."""


@dataclass(frozen=True)
class Refusal:
    """No GPU can take a share."""

    reason: Reason
    share: Share
    best_units: int = 0
    """FULL: most units (of 1 %) that are free on one suitable GPU."""
    best_count: int = 0
    """FULL: most whole GPUs that are free on one node."""
    most_units: int = 0
    """TOO_BIG: most units that one suitable GPU can give."""
    most_count: int = 0
    """TOO_BIG: most suitable healthy GPUs of one model on one node."""
    suitable: int = 0
    """GPUs of the models that the template asks for."""
    models: tuple[str, ...] = ()
    """NO_MODEL: the models that there are, sorted."""

    @property
    def may_pass(self) -> bool:
        """Whether waiting can help: a session has to leave, or a GPU to become healthy. The rest needs an admin."""
        return self.reason in (Reason.FULL, Reason.UNHEALTHY)


def explain(capacity: FreeCapacity, share: Share, accepts: Callable[[str], bool]) -> Refusal:
    """Return why no GPU can take this share; meant for a share that was not placed."""
    if not capacity.gpus:
        return Refusal(Reason.NO_GPUS, share)
    wanted = [gpu for gpu in capacity.gpus.values() if accepts(gpu.model)]
    if not wanted:
        return Refusal(Reason.NO_MODEL, share, models=tuple(sorted({gpu.model for gpu in capacity.gpus.values()})))
    suitable = len(wanted)
    nodes = [
        [gpu for gpu in node.gpus if gpu.capacity >= share.units] for node in capacity.nodes if accepts(node.model)
    ]
    if not nodes:
        return Refusal(Reason.UNHEALTHY, share, suitable=suitable)
    possible = max(len(gpus) for gpus in nodes)
    if possible < share.count:
        if _if_all_were_healthy(wanted, share) >= share.count:
            return Refusal(Reason.UNHEALTHY, share, suitable=suitable)
        most_units = max(gpu.capacity for gpu in wanted)
        return Refusal(Reason.TOO_BIG, share, most_units=most_units, most_count=possible, suitable=suitable)
    free = max(gpu.free for gpus in nodes for gpu in gpus)
    whole = max(sum(gpu.free >= UNITS_PER_GPU for gpu in gpus) for gpus in nodes)
    return Refusal(Reason.FULL, share, best_units=max(free, 0), best_count=whole, suitable=suitable)


def _if_all_were_healthy(wanted: Sequence[GpuCapacity], share: Share) -> int:
    """Return how many GPUs of one node and model could take the share if all of them were healthy."""
    counts = Counter((gpu.node, gpu.model) for gpu in wanted if gpu.capacity >= share.units)
    return max(counts.values(), default=0)
