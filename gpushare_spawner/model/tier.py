"""Tiers: how much of its share a session holds now."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """From the full share down to none.

    The service decides on deeper tiers, one at a time. The agent restores ACTIVE by itself, with the next burst.
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
