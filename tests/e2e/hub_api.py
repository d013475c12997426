"""The hub's REST API, and the notebook servers behind the proxy, as an administrator's program uses them."""

from __future__ import annotations

import asyncio
import json
import re
import time
from html import unescape
from typing import Any
from urllib.parse import quote

from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest

from tests.e2e.kernel import Kernel


class Hub:
    """One hub, at the address of its proxy."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self.token = token

    async def call(self, method: str, path: str, body: Any = None, timeout: float = 60.0) -> Any:
        """The answer's JSON (None if it has no body). Raises tornado's HTTPClientError for 4xx and 5xx."""
        request = HTTPRequest(
            self.url + path,
            method=method,
            headers={"Authorization": f"token {self.token}", "Content-Type": "application/json"},
            body=None if body is None and method in ("GET", "DELETE") else json.dumps(body or {}),
            request_timeout=timeout,
            allow_nonstandard_methods=True,
        )
        answer = await AsyncHTTPClient().fetch(request)
        return json.loads(answer.body) if answer.body else None

    async def dashboard(self, method: str, path: str, body: Any = None) -> Any:
        """The answer of the service's REST API. Raises as `call` does."""
        return await self.call(method, f"/services/gpushare/api/v1/{path}", body)

    async def dashboard_text(self) -> str:
        """The text of the dashboard's page, on one line."""
        request = HTTPRequest(f"{self.url}/services/gpushare/", headers={"Authorization": f"token {self.token}"})
        page = (await AsyncHTTPClient().fetch(request)).body.decode()
        return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", page)))

    async def add_user(self, name: str) -> None:
        """Make the user, if it is not there yet."""
        try:
            await self.call("POST", f"/hub/api/users/{quote(name)}")
        except HTTPClientError as error:
            if error.code != 409:
                raise

    async def request_start(self, user: str, profile: str, server: str = "", timeout: float = 60.0) -> None:
        """Ask for the user's server, with the template; returns as soon as the hub has taken the request."""
        path = f"/hub/api/users/{quote(user)}/" + (f"servers/{quote(server)}" if server else "server")
        await self.call("POST", path, {"profile": profile}, timeout)

    async def start(self, user: str, profile: str, server: str = "", within: float = 60.0) -> None:
        """Start the user's server with the template and wait until it is ready."""
        await self.add_user(user)
        await self.request_start(user, profile, server)
        await self.until_ready(user, server, within)

    async def server(self, user: str, server: str = "") -> dict[str, Any] | None:
        """What the hub says of a server; None where there is none."""
        model = await self.call("GET", f"/hub/api/users/{quote(user)}?include_stopped_servers")
        found: dict[str, Any] | None = (model.get("servers") or {}).get(server)
        return found if found and not found.get("stopped") else None

    async def until_ready(self, user: str, server: str = "", within: float = 60.0) -> None:
        """Wait until the server is ready. Raises AssertionError with what the hub says if it is not in time."""
        deadline = time.monotonic() + within
        while True:
            found = await self.server(user, server)
            assert found, f"{user}'s server did not start; the hub's log says why"
            if found["ready"]:
                return
            assert time.monotonic() < deadline, f"{user}'s server is not ready after {within:.0f} s: {found}"
            await asyncio.sleep(0.2)

    async def stop(self, user: str, server: str = "", within: float = 40.0) -> None:
        """Stop the server and wait until it is gone."""
        path = f"/hub/api/users/{quote(user)}/" + (f"servers/{quote(server)}" if server else "server")
        await self.call("DELETE", path)
        deadline = time.monotonic() + within
        while await self.server(user, server):
            assert time.monotonic() < deadline, f"{user}'s server still runs {within:.0f} s after it was stopped"
            await asyncio.sleep(0.2)

    async def kernel(self, user: str) -> Kernel:
        """A new kernel in the user's server, connected through the proxy."""
        base = f"/user/{quote(user)}/api/kernels"
        started = await self.call("POST", base, {"name": "python3"})
        return await Kernel.connect(self.url, f"{base}/{started['id']}", self.token)
