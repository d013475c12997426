"""The lines of the answer to a watch. Each line is an event."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiohttp import StreamReader


async def watch_lines(content: StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length, without empty ones.

    An object may have 1.5 MiB (etcd's limit for a request); the reader's own lines end with an error at 128 KiB.
    """
    rest = b""
    async for chunk in content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if line.strip():
                yield line
