"""A gRPC server on a unix socket in a folder that others use too: only what is our own is taken away from it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import grpc.aio

Identity = tuple[int, int, int]


class GrpcSocket:
    """A server that runs. `serve` makes one."""

    def __init__(self, path: Path, server: grpc.aio.Server) -> None:
        self._path = path
        self._server = server
        self._identity = socket_identity(path)

    @classmethod
    async def serve(cls, path: Path, server: grpc.aio.Server) -> GrpcSocket:
        """Start the server on a new socket; one that lies there is replaced. Raises OSError or RuntimeError."""
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        server.add_insecure_port(f"unix://{path}")
        await server.start()
        return cls(path, server)

    @property
    def is_there(self) -> bool:
        """Whether the socket still lies there: it was not removed, and no other one has its place."""
        return socket_identity(self._path) == self._identity

    async def close(self) -> None:
        """Stop the server, and remove its socket, unless another one has its place by now."""
        own = self.is_there
        await self._server.stop(grace=None)
        if own:
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def socket_identity(path: Path) -> Identity | None:
    """Return which file lies there now: a socket that was made again is another one. None: there is none."""
    with contextlib.suppress(OSError):
        seen = path.stat()
        return seen.st_dev, seen.st_ino, seen.st_ctime_ns
    return None
