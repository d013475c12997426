"""Tiers: how much of its share a session holds now, and how much GPU work restores the full share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Tier(StrEnum):
    """From the full share down to none.

    The service decides on deeper tiers, one at a time. The agent restores ACTIVE by itself, as soon as GPU work counts
    as use of the share, see `UseRule`.
    """

    ACTIVE = "active"
    """The full share."""
    DOWNGRADED = "downgraded"
    """The template's smaller share; the other units are lent."""
    RELEASED = "released"
    """No units: all are lent. The session's memory can be paged out; its kernels keep running."""
    STOPPED = "stopped"
    """The notebook server is stopped."""

    @property
    def depth(self) -> int:
        """0 for ACTIVE to 3 for STOPPED; also the number that stands for the tier in the wire protocol."""
        return _DEPTH[self]

    @classmethod
    def from_depth(cls, depth: int) -> Tier:
        """Return the tier of this depth. Raises ValueError for a number that stands for no tier."""
        tiers = list(cls)
        if not 0 <= depth < len(tiers):
            raise ValueError(f"{depth} stands for no tier; tiers are 0 ({tiers[0]}) to {len(tiers) - 1} ({tiers[-1]})")
        return tiers[depth]


# the culler asks for it several times for each session
_DEPTH = {tier: depth for depth, tier in enumerate(Tier)}


@dataclass(frozen=True)
class UseRule:
    """How much GPU work counts as use of a share.

    GPU time adds up, at most to `min_use`, and is forgotten evenly over `window`. Work counts as use when the sum
    reaches `min_use`: one piece of work of that length, or shorter work that takes more than `min_use` in each window.
    A dataclass, since a notebook's cell imports this module without pydantic. Raises ValueError.
    """

    min_use: float = 0.0
    """GPU seconds, 0 or more; 0: all GPU work counts."""
    window: float = 300.0
    """Seconds, more than 0."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_use < math.inf:
            raise ValueError(f"min_use is {self.min_use}; it is a finite number of seconds, 0 or more")
        if not 0 < self.window < math.inf:
            raise ValueError(f"window is {self.window}; it is a finite number of seconds, more than 0")


def voids_idle_action(
    busy: bool,
    last_gpu_activity: float | None,
    gpu_seconds: float,
    if_idle_since: float | None,
    if_gpu_seconds: float | None,
) -> bool:
    """Return whether a session has worked since the service decided on an idle action.

    The first three are the session's now: whether a burst runs or waits, the end of the last one (seconds since the
    epoch) and its GPU seconds. `if_gpu_seconds`: GPU seconds from which its work counts as use; None: all work after
    `if_idle_since` does, and nothing where that is None too.
    """
    if if_gpu_seconds is not None:
        return gpu_seconds > if_gpu_seconds
    return if_idle_since is not None and (busy or (last_gpu_activity or 0.0) > if_idle_since)
