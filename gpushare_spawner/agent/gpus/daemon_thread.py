"""Runs calls that can hang for ever in a driver, such as those of NVML."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


def in_daemon_thread(work: Callable[[], Result]) -> asyncio.Future[Result]:
    """Run a function in a thread that does not keep the agent from ending. Return a future of its result."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def hand_over(finish: Callable[[Any], None], outcome: object) -> None:
        if not future.done():
            finish(outcome)

    def run() -> None:
        finish: Callable[[Any], None] = future.set_result
        outcome: object
        try:
            outcome = work()
        except Exception as error:
            finish, outcome = future.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(hand_over, finish, outcome)

    threading.Thread(target=run, name="nvml", daemon=True).start()
    return future
