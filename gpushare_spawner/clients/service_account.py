"""A connection to the API server as the service account of this pod.

kubernetes_asyncio imports all of its models with any part of it: 37 MiB on each node (measured with version 36.1.0).

The lines of the answer to a watch. Each line is an event.
"""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import StreamReader

FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet puts a service account's token and the API server's CA (Kubernetes docs, accessing the API from a
pod)."""


READ_TOKEN_EVERY = 60.0
"""Seconds. The kubelet renews a token when 80 % of its life, at least 10 min, is over."""


class NoCluster(RuntimeError):
    """No cluster is configured; the message says which settings are missing."""


class ServiceAccountConnection:
    """Requests with the pod's token. ``host``: the API server's URL. The caller closes it."""

    def __init__(self, host: str, folder: Path) -> None:
        self._host = host
        self._folder = folder
        self._token = ""
        self._token_read_at = -READ_TOKEN_EVERY
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def of_this_pod(cls, folder: Path | None = None) -> ServiceAccountConnection | None:
        """Return the connection of the pod that this runs in; None outside of a cluster.

        ``folder``: where token and CA are, `FOLDER` by default.
        """
        folder = folder or FOLDER
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
        if not host or not port or not (folder / "token").is_file():
            return None
        return cls(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}", folder)

    async def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        content: str,
        body: Any,
        timeout: aiohttp.ClientTimeout | None,
    ) -> aiohttp.ClientResponse:
        """Ask; ``content`` is the type of the JSON ``body``. Raises aiohttp.ClientError, OSError and ValueError."""
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self._context()))
        headers = {"Accept": "application/json", "Content-Type": content, "Authorization": f"Bearer {self._bearer()}"}
        return await self._session.request(
            method,
            f"{self._host}{path}",
            params=query,
            headers=headers,
            data=None if body is None else json.dumps(body),
            timeout=timeout or aiohttp.ClientTimeout(),
        )

    async def close(self) -> None:
        """End the connection."""
        if self._session is not None:
            await self._session.close()

    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=(self._folder / "ca.crt").read_text())
        # from Python 3.13 on it is set, and CAs of older clusters lack the key identifier that it demands
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context

    def _bearer(self) -> str:
        now = time.monotonic()
        if now - self._token_read_at >= READ_TOKEN_EVERY:
            token = (self._folder / "token").read_text().strip()
            if not token:
                raise ValueError(f"{self._folder / 'token'} is empty: the kubelet is writing it")
            self._token, self._token_read_at = token, now
        return self._token


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
