"""Amounts of GPU time, and who used them. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, fields

HOUR = 3600
"""Seconds: amounts are kept by the hour (UTC)."""
DAY = 86400
"""Seconds: older amounts are kept by the day (UTC)."""


@dataclass(frozen=True)
class Subject:
    """Who used which GPU."""

    user: str
    server: str
    """Empty for the default server."""
    template: str
    group: str
    """The group that the time counts for; empty: none."""
    node: str
    gpu: str
    """The GPU's UUID."""
    model: str


@dataclass(frozen=True)
class Amounts:
    """GPU time in GPU-seconds: one second of a whole GPU, or four of a quarter of it."""

    reserved: float = 0.0
    """What the share came to: its units, for as long as the session was open."""
    idle: float = 0.0
    """The part of it in which the session did nothing on the GPU."""
    recovered: float = 0.0
    """The part of it that idle actions took from the session, for others to use."""
    borrowed: float = 0.0
    """The part of it that consists of borrowed units."""
    used: float = 0.0
    """Time with a burst of the session on the GPU; sessions that compute at the same time count each."""
    entitled: float = 0.0
    """What the session was entitled to while others competed."""
    delivered: float = 0.0
    """What it received in that time."""
    waits: float = 0.0
    """How often its GPU work waited for a lease."""

    def plus(self, other: Amounts) -> Amounts:
        """Return the sums of both."""
        return Amounts(**{name: getattr(self, name) + getattr(other, name) for name in AMOUNTS})

    def times(self, factor: float) -> Amounts:
        """Return each amount multiplied by the factor."""
        return Amounts(**{name: getattr(self, name) * factor for name in AMOUNTS})


AMOUNTS = tuple(field.name for field in fields(Amounts))
"""The names of the amounts."""


@dataclass(frozen=True)
class Counters:
    """What a session's counters showed when its report was read last: the next amounts are what they grew by."""

    node: str
    session: str
    opened_at: float
    """Seconds since the epoch. A server that is started again has the same session id, and counts from 0."""
    seen_at: float
    """Seconds since the epoch, by the agent's clock."""
    effective_units: int
    gpu_seconds: float = 0.0
    entitled: float = 0.0
    delivered: float = 0.0
    waits: int = 0
