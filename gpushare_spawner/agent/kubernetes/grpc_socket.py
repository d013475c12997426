"""gRPC servers on Unix sockets in shared folders, where they remove only their own sockets, and streams of a list."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

import grpc.aio

from gpushare_spawner.background import set_within

Identity = tuple[int, int, int]


class News:
    """Wakes the streams of a list. Each stream sends the whole list first and after each change."""

    def __init__(self) -> None:
        self._streams: set[asyncio.Event] = set()

    def __bool__(self) -> bool:
        """Return whether a client is connected to the list."""
        return bool(self._streams)

    def notify(self) -> None:
        """Wake all streams."""
        for stream in self._streams:
            stream.set()

    async def changes(self, at_most: float | None = None) -> AsyncGenerator[None]:
        """Yield immediately, then after each change, and `at_most` seconds after the previous yield."""
        changed = asyncio.Event()
        self._streams.add(changed)
        try:
            while True:
                changed.clear()
                yield
                await set_within(changed, at_most)
        finally:
            self._streams.discard(changed)


class GrpcSockets:
    """Servers that run together, each on its own socket."""

    def __init__(self) -> None:
        self._served: list[tuple[Path, grpc.aio.Server, Identity | None]] = []

    def __bool__(self) -> bool:
        """Return whether the servers are running."""
        return bool(self._served)

    @property
    def are_there(self) -> bool:
        """Whether all sockets exist: none was removed or replaced."""
        return bool(self) and all(socket_identity(path) == identity for path, _, identity in self._served)

    async def serve(self, servers: Mapping[Path, grpc.aio.Server]) -> None:
        """Serve on new sockets, replacing existing files and earlier servers.

        After OSError or RuntimeError, no server is running.
        """
        await self.close()
        try:
            for path, server in servers.items():
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                server.add_insecure_port(f"unix://{path}")
                await server.start()
                self._served.append((path, server, socket_identity(path)))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop the servers in reverse order, and remove their sockets unless they were replaced."""
        while self._served:
            path, server, identity = self._served.pop()
            own = socket_identity(path) == identity
            await server.stop(grace=None)
            if own:
                with contextlib.suppress(OSError):
                    os.unlink(path)


def socket_identity(path: Path) -> Identity | None:
    """Return the identity of the file at this path; None if there is no file.

    The identity changes when a socket is recreated.
    """
    with contextlib.suppress(OSError):
        seen = path.stat()
        return seen.st_dev, seen.st_ino, seen.st_ctime_ns
    return None
