"""One request at a time. It goes on in the background when its caller stops waiting: a slow hub delays no caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class BackgroundRequest:
    """Runs ``ask`` again and again, but never twice at a time."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[None] | None = None

    async def refresh(self, due: bool, patience: float) -> None:
        """Start a request if one is ``due`` and none runs; wait ``patience`` seconds for the one that runs.

        Raises what the request raised. An answer that came after its caller had gone is taken first: it
        may be hours old.
        """
        self._take_answer()
        if self._asking is None and due:
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=patience)
            self._take_answer()

    def close(self) -> None:
        """Cancel a request that runs."""
        if self._asking is not None:
            self._asking.cancel()

    def _take_answer(self) -> None:
        if self._asking is not None and self._asking.done():
            answered, self._asking = self._asking, None
            answered.result()
