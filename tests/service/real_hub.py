"""A real hub in a process of its own, with the shipped configuration of the service, and the service that it starts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPResponse
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port
from tornado.web import Application, RequestHandler

HERE = Path(__file__).parent
CONFIG_FILE = HERE.parents[1] / "jupyterhub_config.d" / "20-gpushare-service.py"


class _Anything(RequestHandler):
    def get(self) -> None:
        self.finish({"version": "1"})


@dataclass
class Browser:
    """Keeps cookies, and follows no redirect."""

    cookies: dict[str, str] = field(default_factory=dict)

    async def ask(self, url: str, headers: Mapping[str, str] | None = None, **options: Any) -> HTTPResponse:
        sent = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        answer = await AsyncHTTPClient().fetch(
            url, headers={"Cookie": sent, **(headers or {})}, follow_redirects=False, raise_error=False, **options
        )
        for header in answer.headers.get_list("Set-Cookie"):
            self.cookies.update({name: cookie.value for name, cookie in SimpleCookie(header).items()})
        return answer


@dataclass
class RealHub:
    """Where the hub and the service listen, and tokens of an admin (the tester) and of the service."""

    hub_url: str
    dashboard_url: str
    tester: str
    service: str
    log: Path
    process: asyncio.subprocess.Process

    async def ask(self, method: str, path: str, token: str, body: Any = None) -> tuple[int, Any]:
        """(status, JSON) of the hub's API."""
        answer = await fetch(self.hub_url + "/hub/api" + path, method=method, token=token, body=body)
        return answer.code, json.loads(answer.body) if answer.body else None

    async def user(self, name: str) -> str:
        """Make a user with a running server; returns a token of theirs."""
        await self.ask("POST", f"/users/{name}", self.tester)
        status, answer = await self.ask("POST", f"/users/{name}/tokens", self.tester, {"note": "test"})
        assert status == 201, answer
        status, _ = await self.ask("POST", f"/users/{name}/server", self.tester)
        assert status in (201, 202)
        return str(answer["token"])

    async def browser(self, name: str) -> Browser:
        """Log in to the hub as a user."""
        browser = Browser()
        await browser.ask(self.hub_url + "/hub/login")
        xsrf = browser.cookies["_xsrf"]
        form = urlencode({"username": name, "password": "any", "_xsrf": xsrf})
        await browser.ask(f"{self.hub_url}/hub/login?_xsrf={xsrf}", method="POST", body=form)
        return browser

    async def servers(self, name: str) -> dict[str, Any]:
        servers: dict[str, Any] = (await self.ask("GET", f"/users/{name}", self.tester))[1]["servers"]
        return servers


async def fetch(url: str, token: str | None = None, method: str = "GET", body: Any = None) -> HTTPResponse:
    """The answer, whatever its status; redirects are not followed."""
    return await AsyncHTTPClient().fetch(
        url,
        method=method,
        headers={"Authorization": f"token {token}"} if token else {},
        body=None if body is None and method in ("GET", "DELETE") else json.dumps(body or {}),
        allow_nonstandard_methods=True,
        follow_redirects=False,
        raise_error=False,
    )


@contextlib.asynccontextmanager
async def real_hub(
    folder: Path, templates: Path, control_socket: Path, options: str = "", **environment: str
) -> AsyncIterator[RealHub]:
    """Runs while the context lasts; ``options`` go to the service."""
    server_socket, server_port = bind_unused_port()
    server = HTTPServer(Application([(r"/.*", _Anything)], log_function=lambda handler: None))
    server.add_socket(server_socket)
    held = [bind_unused_port() for _ in range(3)]
    proxy_port, hub_port, dashboard_port = (port for _, port in held)
    for socket, _ in held:
        socket.close()
    tester, service = secrets.token_hex(), secrets.token_hex()
    log = folder / "hub.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "jupyterhub", "-f", str(HERE / "hub_config.py"),
            cwd=folder, stdout=output, stderr=output, start_new_session=True,
            env=os.environ | {
                "TEST_FOLDER": str(folder), "TEST_CONFIG_FILE": str(CONFIG_FILE), "TEST_TOKEN": tester,
                "TEST_SERVICE_TOKEN": service, "TEST_SERVER_PORT": str(server_port),
                "TEST_PROXY_PORT": str(proxy_port), "TEST_HUB_PORT": str(hub_port),
                "GPUSHARE_TEMPLATES": str(templates), "GPUSHARE_CONTROL": str(control_socket),
                "GPUSHARE_SERVICE_URL": f"http://127.0.0.1:{dashboard_port}", "GPUSHARE_SERVICE_OPTIONS": options,
            } | environment,
        )  # fmt: skip
    hub = RealHub(
        f"http://127.0.0.1:{hub_port}",
        f"http://127.0.0.1:{dashboard_port}/services/gpushare/",
        tester,
        service,
        log,
        process,
    )
    try:
        await _up(hub, process)
        yield hub
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        server.stop()


async def _up(hub: RealHub, process: asyncio.subprocess.Process) -> None:
    for _ in range(300):
        assert process.returncode is None, f"the hub has ended:\n{hub.log.read_text()}"
        with contextlib.suppress(OSError, HTTPClientError):
            for url in (hub.hub_url + "/hub/api/", hub.dashboard_url + "static/frame.css"):
                if (await fetch(url)).code != 200:
                    break
            else:
                return
        await asyncio.sleep(0.1)
    raise AssertionError(f"the hub does not come up:\n{hub.log.read_text()}")
