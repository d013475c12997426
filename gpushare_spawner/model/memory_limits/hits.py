"""Allocations of device memory that a limit refused. Pure data."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from gpushare_spawner.model.memory_limits import MemoryLimitName


class MemoryLimitHit(BaseModel):
    """One allocation that was refused."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    limit: MemoryLimitName
    at: Annotated[float, Field(ge=0)]
    """Seconds since the epoch (UTC)."""
    requested_bytes: Annotated[int, Field(ge=0)]
    allocated_bytes: Annotated[int, Field(ge=0)] = 0
    """What the session's processes had allocated on that GPU at that time."""
    pid: int = 0
    """The process that asked, as it numbers itself."""


class MemoryLimitHits(BaseModel):
    """How often a session's allocations were refused since it was opened, and the last time."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    count: Annotated[int, Field(ge=0)] = 0
    last: MemoryLimitHit | None = None

    def with_hit(self, hit: MemoryLimitHit) -> MemoryLimitHits:
        """One more."""
        return MemoryLimitHits(count=self.count + 1, last=hit)


NO_HITS = MemoryLimitHits()
