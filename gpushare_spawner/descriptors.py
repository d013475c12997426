"""File descriptors: a higher limit, a reserve, an acceptor that survives a shortage, files that are replaced whole."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
from collections.abc import Callable
from pathlib import Path

from gpushare_spawner.log_once import LogOnce

RESERVED = 128
"""Descriptors reserved for the rest of the process: records, NVML, database, requests to the hub."""
MOST = 1024 * 1024
TRY_AGAIN = 0.2
"""Seconds before a socket accepts connections again after descriptors ran out."""
_NONE_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


def replace_private(path: Path, content: bytes) -> None:
    """Replace a file that only its owner can read, so that a reader finds the old or the new one. Raises OSError."""
    fresh = path.with_name(f".{path.name}.new")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    fresh.replace(path)


def allow_many() -> None:
    """Raise the soft limit to the hard limit. A connection needs one or two, and the usual 1,024 are too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft_limit = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < soft_limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard))


def for_connections() -> int:
    """Return the number of descriptors that all connections together may use."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (MOST if soft == resource.RLIM_INFINITY else soft) - RESERVED


def is_reserved(descriptor: int) -> bool:
    """Return whether a descriptor is in the reserve. The kernel always assigns the lowest free number."""
    return descriptor >= for_connections()


class Acceptor:
    """Accepts a socket's connections on the event loop, a few in each iteration."""

    def __init__(
        self, listener: socket.socket, accepted: Callable[[socket.socket], None], trouble: LogOnce, at_once: int = 16
    ) -> None:
        """Start accepting.

        `listener` is non-blocking; `accepted` gets each connection; `trouble` logs a lack of descriptors.
        """
        self._listener = listener
        self._accepted = accepted
        self._trouble = trouble
        self._at_once = at_once
        self._loop = asyncio.get_running_loop()
        self._spare: int | None = _spare()
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(listener, self._readable)

    def close(self) -> None:
        """Stop accepting, and close the listening socket."""
        self._loop.remove_reader(self._listener)
        if self._timer is not None:
            self._timer.cancel()
        self._listener.close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def pause(self, seconds: float) -> None:
        """Accept no connections for some seconds."""
        if self._listener.fileno() < 0 or self._timer is not None:
            return
        self._loop.remove_reader(self._listener)
        self._timer = self._loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self._timer = None
        self._loop.add_reader(self._listener, self._readable)

    def _readable(self) -> None:
        for _ in range(self._at_once):
            if self._timer is not None or self._listener.fileno() < 0:
                return
            try:
                connection, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NONE_LEFT:
                    raise
                self._trouble.about(error.strerror)
                self._reject_connection()
                self.pause(TRY_AGAIN)
                return
            self._trouble.resolved()
            if self._spare is None:
                self._spare = _spare()
            self._accepted(connection)

    def _reject_connection(self) -> None:
        """Accept a waiting connection and close it, so that its client does not wait for nothing."""
        if self._spare is None:
            return
        os.close(self._spare)
        self._spare = None
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        self._spare = _spare()


def _spare() -> int | None:
    try:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
