"""Connection to the API server with the service account of this pod, and the lines of a watch.

It replaces kubernetes_asyncio on nodes: any import of that package loads all of its models, 37 MiB on each node
(measured with version 36.1.0). For use outside a cluster, see api.py.
"""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import StreamReader

FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder in which the kubelet puts a service account's token and the API server's CA (Kubernetes docs, accessing the
API from a pod)."""


READ_TOKEN_EVERY = 60.0
"""Seconds. The kubelet renews a token after 80 % of its lifetime, which is at least 10 min."""


ANSWER_WITHIN = aiohttp.ClientTimeout(total=15.0)
"""Time limit for a request other than a list or a watch."""


class NoCluster(RuntimeError):
    """Error for missing cluster configuration. The message names the missing settings."""


@dataclass(frozen=True)
class ApiRequest:
    """A request to the API server."""

    method: str
    path: str
    query: Mapping[str, str]
    body: Any = None
    """Body, sent as JSON; None: no body."""
    content: str = "application/json"
    """Content type of the body."""
    timeout: aiohttp.ClientTimeout = ANSWER_WITHIN


class ServiceAccountConnection:
    """Connection that authenticates with the pod's token. ``host``: the API server's URL. The caller closes it."""

    def __init__(self, host: str, folder: Path) -> None:
        self._host = host
        self._folder = folder
        self._token = ""
        self._token_read_at = -READ_TOKEN_EVERY
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def of_this_pod(cls, folder: Path | None = None) -> ServiceAccountConnection | None:
        """Return this pod's connection; None outside a cluster.

        ``folder``: folder with the token and the CA, `FOLDER` by default.
        """
        folder = folder or FOLDER
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
        if not host or not port or not (folder / "token").is_file():
            return None
        return cls(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}", folder)

    async def send(self, request: ApiRequest) -> aiohttp.ClientResponse:
        """Send a request. Raises aiohttp.ClientError, OSError, ValueError."""
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self._context()))
        headers = {"Accept": "application/json", "Content-Type": request.content}
        headers["Authorization"] = f"Bearer {self._bearer()}"
        return await self._session.request(
            request.method,
            f"{self._host}{request.path}",
            params=request.query,
            headers=headers,
            data=None if request.body is None else json.dumps(request.body),
            timeout=request.timeout,
        )

    async def close(self) -> None:
        """Close the connection."""
        if self._session is not None:
            await self._session.close()

    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=(self._folder / "ca.crt").read_text())
        # Python 3.13 sets this flag by default, and older clusters' CAs lack the key identifier that it requires
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
    """Yield lines of any length, omitting empty lines.

    An object can have 1.5 MiB (etcd's limit for a request); the reader's own line iteration fails at 128 KiB.
    """
    rest = b""
    async for chunk in content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if line.strip():
                yield line
