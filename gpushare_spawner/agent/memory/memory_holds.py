"""Holds of free GPU memory: while suspended processes are restored into it, or while a session is being suspended and
can have to be resumed, no other session is granted more memory there.

A restore that finds too little memory can never be repeated on driver 580 (NVIDIA/cuda-checkpoint, issue 44).
"""

from __future__ import annotations

from collections.abc import Callable

HELD_AT_MOST = 20.0
"""Seconds; after that allocations of others go on. 80 GB in 15 s were seen on an H100 (NVIDIA/cuda-checkpoint, issue
29)."""


class MemoryHolds:
    """The holds of free memory, by GPU (UUID) and session."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._since: dict[tuple[str, str], list[float]] = {}
        """By GPU and session. A session can hold it for several steps at once."""
        self.over: Callable[[str], None] = _nothing
        """Told of each GPU of which a hold has ended."""

    def begin(self, gpu: str, session: str) -> None:
        """From now on only this session may be granted memory on the GPU."""
        self._since.setdefault((gpu, session), []).append(self._clock())

    def end(self, gpu: str, session: str) -> None:
        """Undo the last `begin` of the session."""
        since = self._since[gpu, session]
        since.pop()
        if not since:
            del self._since[gpu, session]
        self.over(gpu)

    def against(self, gpu: str, session: str) -> bool:
        """Whether the session has to wait for more memory on the GPU, because another one holds it."""
        now = self._clock()
        return any(
            held == gpu and holder != session and now - since[0] < HELD_AT_MOST
            for (held, holder), since in self._since.items()
        )


def _nothing(gpu: str) -> None:
    pass
