"""Why there is no room for a share, for people and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpushare_spawner.model.share import UNITS_PER_GPU, Share
from gpushare_spawner.placement.room import GpuRoom, Room


class Reason(StrEnum):
    """What stands in the way."""

    NO_GPUS = "no-gpus"
    """No agent reports any GPU."""
    NO_MODEL = "no-model"
    """There are GPUs, but none of the wanted models."""
    UNHEALTHY = "unhealthy"
    """All GPUs that would do are out of order."""
    TOO_BIG = "too-big"
    """More than any node could ever give, even if it were empty."""
    FULL = "full"
    """It would fit, but others are there now."""


@dataclass(frozen=True)
class Refusal:
    """There is no room. ``str()`` gives the sentence."""

    reason: Reason
    message: str
    best_units: int = 0
    """Most units (of 1 %) that are free on one GPU that would do."""
    best_count: int = 0
    """Most whole GPUs that are free on one node that would do."""

    @property
    def may_pass(self) -> bool:
        """Whether waiting can help: somebody has to leave, or a GPU to get well. The rest needs an admin."""
        return self.reason in (Reason.FULL, Reason.UNHEALTHY)

    def __str__(self) -> str:
        return self.message


def explain(room: Room, share: Share, accepts: Callable[[str], bool]) -> Refusal:
    """Why no GPU can take this share; meant for a share that was not placed."""
    if not room.gpus:
        return Refusal(Reason.NO_GPUS, "No GPU is known: no agent has reported one. Is the agent running?")
    wanted = [gpu for gpu in room.gpus.values() if accepts(gpu.model)]
    if not wanted:
        there = ", ".join(sorted({gpu.model for gpu in room.gpus.values()}))
        return Refusal(Reason.NO_MODEL, f"No GPU is of a model that the template asks for. There is: {there}.")
    nodes = [[gpu for gpu in node.gpus if gpu.capacity >= share.units] for node in room.nodes if accepts(node.model)]
    if not nodes:
        return Refusal(
            Reason.UNHEALTHY,
            f"All GPUs that would do ({len(wanted)}) are out of order. The agent's log says more.",
        )
    possible = max(len(gpus) for gpus in nodes)
    if possible < share.count:
        if _mended(wanted, share) >= share.count:
            return Refusal(
                Reason.UNHEALTHY, f"GPUs that would do for {share} are out of order. The agent's log says more."
            )
        return _too_big(share, possible, max(gpu.capacity for gpu in wanted))
    free = max(gpu.free for gpus in nodes for gpu in gpus)
    whole = max(sum(gpu.free >= UNITS_PER_GPU for gpu in gpus) for gpus in nodes)
    if share.count == 1:
        message = (
            f"All GPUs are full: {share} is wanted, and at most {max(free, 0) / UNITS_PER_GPU:.2f} is free on one GPU."
        )
    else:
        message = (
            f"All GPUs are full: {share} of one node are wanted, and at most {whole} {_are(whole)} free on one node."
        )
    return Refusal(Reason.FULL, message, best_units=max(free, 0), best_count=whole)


def _mended(wanted: Sequence[GpuRoom], share: Share) -> int:
    """Most GPUs of one node and model that could take the share if all of them were in order."""
    counts = Counter((gpu.node, gpu.model) for gpu in wanted if gpu.capacity >= share.units)
    return max(counts.values(), default=0)


def _too_big(share: Share, possible: int, capacity: int) -> Refusal:
    if share.count == 1:
        message = f"{share} is more than any GPU may give: at most {capacity / UNITS_PER_GPU:.2f} of one."
    else:
        message = f"{share} are more than any node has: at most {possible} of one model."
    return Refusal(Reason.TOO_BIG, message)


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
