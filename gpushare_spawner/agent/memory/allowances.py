"""Allowances of device memory: how much each process of a session may have allocated on a GPU. Pure: no clock, no I/O.

The agent grants each process an allowance in pieces, so that most allocations ask nobody. The sum over a session's
processes stays within the session's limit. What a process does not use can be recalled for another one. A process may
have allocated more than its allowance (it ran without the agent, or is of an older version): what counts of it is the
larger of the two.

What a process states takes nothing from other sessions: the arbiter is told what `believed` returns, which all
processes together cannot raise above the limit and the allowances without memory that the driver shows.

Amounts are bytes. An allowance only changes by differences, each counted here when it is surely true: what is granted
when it is sent, what comes back when it has come. So the sum here is never less than what the processes think.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

PIECES = 16
"""A process gets up to this part of the limit beyond what it asked for."""
SMALLEST_PIECE = 2 * 2**20


@dataclass
class ProcessMemory:
    """The memory of one process on one GPU, in bytes."""

    granted: int = 0
    allocated: int = 0
    plain: int = 0
    """The part of `allocated` that cannot leave the GPU."""

    believed: int = 0
    """What the arbiter was last told that it has allocated."""
    shown: int = 0
    """The most that the driver has shown of it while it stated as much."""

    @property
    def counted(self) -> int:
        """Bytes that count towards the limit."""
        return max(self.granted, self.allocated)


class Allowances:
    """The allowances of one session on one GPU."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held: dict[Hashable, ProcessMemory] = {}

    def join(self, process: Hashable) -> None:
        """Add a process without memory."""
        self._held[process] = ProcessMemory()

    def leave(self, process: Hashable) -> None:
        """Remove a process with its memory. An unknown process is no error."""
        self._held.pop(process, None)

    def of(self, process: Hashable) -> ProcessMemory:
        """The memory of the process. Raises KeyError for an unknown process."""
        return self._held[process]

    def processes(self) -> list[tuple[Hashable, ProcessMemory]]:
        """All of them."""
        return list(self._held.items())

    @property
    def counted(self) -> int:
        """Bytes of all processes that count towards the limit."""
        return sum(held.counted for held in self._held.values())

    @property
    def allocated(self) -> int:
        """Bytes that all processes have allocated."""
        return sum(held.allocated for held in self._held.values())

    def counted_of_others(self, process: Hashable) -> int:
        """Bytes of the other processes that count towards the limit."""
        return self.counted - self._held[process].counted

    def allocated_by_others(self, process: Hashable) -> int:
        """Bytes that the other processes have allocated."""
        return self.allocated - self._held[process].allocated

    def states(self, process: Hashable, allocated: int, plain: int | None = None) -> bool:
        """Record what the process says that it has allocated. Return whether that changed anything."""
        held = self._held[process]
        before = (held.allocated, held.plain)
        held.allocated = allocated
        held.plain = min(held.plain if plain is None else plain, allocated)
        return (held.allocated, held.plain) != before

    def believed(self, process: Hashable, stated: int, reserves: bool, spare: int = 0) -> int:
        """Return the part of the stated bytes that counts for the arbiter, which is told so.

        ``reserves``: its memory lies within its allowance. Of the processes that do not reserve, what the limit leaves
        counts. More counts where the driver has shown it. ``spare``: bytes of the session beyond limit and allowances.
        """
        held = self._held[process]
        held.shown = min(held.shown, stated)
        others = [other for other in self._held.values() if other is not held]
        spare = max(0, spare - sum(max(0, other.believed - max(other.granted, other.shown)) for other in others))
        allowed = held.granted
        if not reserves:
            allowed = max(0, self.limit - sum(max(other.believed, other.granted) for other in others))
        held.believed = min(stated, max(allowed + spare, held.shown))
        return held.believed

    def driver_shows(self, process: Hashable, amount: int) -> None:
        """Record what the driver shows of the process. An unknown process is no error."""
        if (held := self._held.get(process)) is not None:
            held.shown = min(max(held.shown, amount), held.allocated)

    def gives_back(self, process: Hashable, amount: int) -> None:
        """Reduce the allowance of the process by this many bytes."""
        held = self._held[process]
        held.granted = max(0, held.granted - amount)

    def left_for(self, process: Hashable) -> int:
        """What the process may have in all, as the others stand; less than 0 where they have more than the limit."""
        return self.limit - self.counted_of_others(process)

    def grant(self, process: Hashable, wanted: int, most: int) -> int:
        """Let the process have `wanted` in all, and a piece more as far as `most` in all allows.

        Returns what its allowance grows by. Where `wanted` is more than `most` it grows up to `most`.
        """
        held = self._held[process]
        added = max(0, min(wanted + self.piece, most) - held.granted)
        held.granted += added
        return added

    @property
    def piece(self) -> int:
        """Bytes that a process is granted in advance."""
        return max(self.limit // PIECES, SMALLEST_PIECE)

    def surplus(self) -> list[tuple[Hashable, int]]:
        """Processes that have two pieces more than they use, and what is beyond one."""
        return [
            (process, held.granted - held.allocated - self.piece)
            for process, held in self._held.items()
            if held.granted - held.allocated > 2 * self.piece
        ]

    def recallable(self, process: Hashable) -> list[Hashable]:
        """The other processes that have an allowance: part of it may be unused, whatever they said last."""
        return [other for other, held in self._held.items() if other != process and held.granted > 0]
