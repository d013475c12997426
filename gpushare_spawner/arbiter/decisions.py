"""What the arbiter decides: orders to clients, which the agent sends."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

ClientId: TypeAlias = Hashable
"""One connected CUDA process on one GPU; several clients may belong to one session."""


class RevokeReason(IntEnum):
    """Why a lease is taken back; the numbers of the wire protocol."""

    IDLE = 0
    """The holder is quiet and another client waits."""
    TIME_SLICE = 1
    """The holder's time slice is over, or the leases held together no longer fit into the GPU's memory."""
    GUARANTEE = 2
    """Another session is entitled to the GPU now, before the holder's time slice is over."""
    RELEASED = 3
    """The session's share was released."""


@dataclass(frozen=True)
class Grant:
    """The client may run bursts."""

    client: ClientId
    lease: int
    """Never 0, never used twice by one arbiter."""
    time_slice: float
    """Seconds that the time slice is planned to last, for the log; 0: until revoked. The arbiter ends it by
    `Revoke`."""
    prefetch: int
    """Bytes to page in before the first launch; 0: none."""
    pace: float = 0.0
    """Seconds of work that the client may queue on the GPU; 0: no bound."""


@dataclass(frozen=True)
class Revoke:
    """The client is to stop launching, to wait until the device is quiet, and to release the lease."""

    client: ClientId
    lease: int
    page_out: int
    """Bytes to page out, after the release; 0: none."""
    reason: RevokeReason


@dataclass(frozen=True)
class PageOut:
    """A client without a lease is to page out."""

    client: ClientId
    amount: int
    """Bytes."""


@dataclass(frozen=True)
class Refuse:
    """The memory that calls of the client wait for does not come: they return the driver's error.

    The client still waits for a lease.
    """

    client: ClientId


@dataclass(frozen=True)
class Pace:
    """A holder is to queue no more than so much work on the GPU from now on. Helps others, and decides nothing."""

    client: ClientId
    lease: int
    seconds: float
    """0: no bound."""


Decision: TypeAlias = Grant | Revoke | PageOut | Refuse
