"""A gRPC server on a unix socket in a shared folder: only its own socket is ever removed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import grpc.aio

Identity = tuple[int, int, int]


class GrpcSocket:
    """A running server. `serve` makes it."""

    def __init__(self, path: Path, server: grpc.aio.Server) -> None:
        self._path = path
        self._server = server
        self._identity = socket_identity(path)

    @classmethod
    async def serve(cls, path: Path, server: grpc.aio.Server) -> GrpcSocket:
        """Start the server on a new socket, in place of an existing file. Raises OSError or RuntimeError."""
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        server.add_insecure_port(f"unix://{path}")
        await server.start()
        return cls(path, server)

    @property
    def is_there(self) -> bool:
        """Whether the socket still exists: it was neither removed nor replaced."""
        return socket_identity(self._path) == self._identity

    async def close(self) -> None:
        """Stop the server, and remove its socket unless it was replaced."""
        own = self.is_there
        await self._server.stop(grace=None)
        if own:
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def socket_identity(path: Path) -> Identity | None:
    """Return the identity of the file at this path; None if there is no file.

    The identity changes when a socket is made again.
    """
    with contextlib.suppress(OSError):
        seen = path.stat()
        return seen.st_dev, seen.st_ino, seen.st_ctime_ns
    return None
