"""Limits of device memory that a session can meet, and the allocations that they refused. Pure data."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class MemoryLimit(IntEnum):
    """What refuses an allocation, as RESERVED says it. 0 stands for a granted one."""

    SESSION = 1
    """`gpu.memory.limit` of the template, over all processes of the session."""
    SESSION_HOST_MEMORY = 2
    """The host memory of the session's server: what could not be paged out is not allocated."""
    NODE_HOST_MEMORY = 3
    """The host memory that the node has for paged-out memory."""

    @property
    def label(self) -> MemoryLimitName:
        """Its name in reports and metrics."""
        return _NAMES[self]


MemoryLimitName = Literal["session", "session_host_memory", "node_host_memory"]
_NAMES: dict[MemoryLimit, MemoryLimitName] = {
    MemoryLimit.SESSION: "session",
    MemoryLimit.SESSION_HOST_MEMORY: "session_host_memory",
    MemoryLimit.NODE_HOST_MEMORY: "node_host_memory",
}


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
