"""Idempotency keys: a request that a client repeats because it saw no answer is carried out once.

The answers are kept in memory. After a restart of the service a repeated request is carried out again; all actions are
such that this changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

KEPT_SECONDS = 600.0
"""Ours: longer than any client repeats a request."""
MOST = 10_000
"""Answers that are kept; the oldest are dropped first. Each is under 1 KiB."""
MOST_LETTERS = 200
"""Of a key."""

A = TypeVar("A")


class KeyReused(Exception):
    """The key came with another request before."""


@dataclass
class _Entry(Generic[A]):
    request: Hashable
    began: float
    answer: asyncio.Future[A]


class Idempotency(Generic[A]):
    """The answers of the last requests with keys."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: OrderedDict[tuple[str, str], _Entry[A]] = OrderedDict()

    async def once(self, caller: str, key: str, request: Hashable, act: Callable[[], Awaitable[A]]) -> A:
        """Return the answer of ``act``, or that of the same request of this caller before; a request that runs is
        waited for. A request that raises an error is forgotten. Raises KeyReused.
        """
        self._forget()
        known = self._entries.get((caller, key))
        if known is not None:
            if known.request != request:
                raise KeyReused
            return await asyncio.shield(known.answer)
        entry = self._entries[caller, key] = _Entry(request, self._clock(), asyncio.get_running_loop().create_future())
        try:
            answer = await act()
        except BaseException as error:
            if self._entries.get((caller, key)) is entry:  # others can have pushed it out
                del self._entries[caller, key]
            entry.answer.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
            entry.answer.exception()  # taken: nobody may wait for it
            raise
        entry.answer.set_result(answer)
        return answer

    def _forget(self) -> None:
        oldest = self._clock() - KEPT_SECONDS
        while self._entries:
            entry = next(iter(self._entries.values()))
            if len(self._entries) < MOST and entry.began >= oldest:
                return
            self._entries.popitem(last=False)
