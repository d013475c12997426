"""Background tasks, each owned by a part that starts and stops it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")


async def cancel(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel tasks, and wait until all have ended, with or without an error. None: a task that was never started."""
    started = [task for task in tasks if task is not None]
    for task in started:
        task.cancel()
    await asyncio.gather(*started, return_exceptions=True)


def pauses(first: float, longest: float, within: float = math.inf) -> Iterator[float]:
    """Yield the seconds to wait after each failed attempt, doubling.

    Ends ``within`` seconds after the first attempt.
    """
    ends_at, pause = time.monotonic() + within, first
    while time.monotonic() < ends_at:
        yield pause
        pause = min(2 * pause, longest)


async def set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait until the event is set, for at most `seconds` (None: no limit). Return whether it was set."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


class Background(ABC):
    """A part with one task, `_run`, from `start` until `close`."""

    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task."""
        self._task = asyncio.create_task(self._run(), name=type(self).__name__)

    async def close(self) -> None:
        """Stop the task."""
        await cancel(self._task)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run while the context is open."""
        self.start()
        try:
            yield
        finally:
            await self.close()

    @abstractmethod
    async def _run(self) -> None:
        """Run until it is cancelled."""


class Repeated(Background):
    """A check that runs repeatedly. A failure is logged and does not stop later checks."""

    def __init__(
        self, seconds: float, check: Callable[[], Awaitable[None] | None], log: logging.Logger, failure: str
    ) -> None:
        """`seconds`: pause before each check. `failure`: sentence for the log."""
        self._seconds = seconds
        self._check = check
        self._log = log
        self._failure = failure

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            try:
                pending = self._check()
                if pending is not None:
                    await pending
            except Exception:
                self._log.exception("%s; retrying", self._failure)


class Soon:
    """Calls a function once in the next event loop iteration, no matter how many requests arrive before."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._handle: asyncio.Handle | None = None
        self._closed = False

    def request(self) -> None:
        """Call the function soon."""
        if self._handle is None and not self._closed:
            self._handle = asyncio.get_running_loop().call_soon(self._due)

    def close(self) -> None:
        """Cancel a pending call, and ignore later requests."""
        self._closed = True
        if self._handle is not None:
            self._handle.cancel()

    def _due(self) -> None:
        self._handle = None
        self._call()


def in_daemon_thread(work: Callable[[], Result]) -> asyncio.Future[Result]:
    """Run a function in a thread that does not prevent the program from exiting. Return a future for its result."""
    future: concurrent.futures.Future[Result] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # a running function cannot be cancelled

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return asyncio.wrap_future(future)
