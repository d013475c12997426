"""Limits of device memory that a session can meet. Light: notebooks import it."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal


class MemoryLimit(IntEnum):
    """The limit that refuses an allocation, as RESERVED has it. 0 stands for a granted allocation."""

    SESSION = 1
    """`gpu.memory.limit` of the template, over all processes of the session."""
    SESSION_HOST_MEMORY = 2
    """The host memory of the session's server: memory that could not be paged out is not allocated."""
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
