"""Tiers: how much of its share a session holds at the moment."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """From what a working session has, down to none.

    The service decides the way down, one step at a time; the agent goes back up to ACTIVE by itself, on the next burst.
    """

    ACTIVE = "active"
    """The whole share."""
    DOWNGRADED = "downgraded"
    """The smaller share that the template names; the rest of its units is lent."""
    RELEASED = "released"
    """No units: the session's pages may go to host memory, the kernel lives on."""
    STOPPED = "stopped"
    """The notebook server is gone."""

    @property
    def depth(self) -> int:
        """0 for ACTIVE to 3 for STOPPED; also the number that stands for the tier in the wire protocol."""
        return list(Tier).index(self)

    @classmethod
    def from_depth(cls, depth: int) -> Tier:
        """The inverse of `depth`. Raises ValueError for a number that stands for no tier."""
        tiers = list(cls)
        if not 0 <= depth < len(tiers):
            raise ValueError(f"{depth} stands for no tier; tiers are 0 ({tiers[0]}) to {len(tiers) - 1} ({tiers[-1]})")
        return tiers[depth]
