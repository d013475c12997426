"""What stands between a test and a real API server: plain HTTP on the loopback interface, with the same faults."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import secrets
import ssl
from collections import Counter

import aiohttp
from aiohttp import web

from .answers import fail, json_answer
from .client import Credentials
from .errors import ApiError
from .faults import Faults
from .own_nodes import kept_to
from .targets import REVIEWS, ask_of, target_of

# of one connection, not of the request
_HOP_HEADERS = {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}


class Front:
    """Start with ``async with``. `admin_token` stands for the backend's own credentials."""

    def __init__(self, backend: Credentials, faults: Faults) -> None:
        self.faults = faults
        self.admin_token = secrets.token_urlsafe(24)
        self.url = ""
        self.calls: Counter[tuple[str, str]] = Counter()
        """How often each (verb, resource) was asked for."""
        self.keep_to = ""
        """The test on whose nodes alone pods may be; empty where there are no other nodes."""
        self._backend = backend
        self._watches: set[asyncio.Task[None]] = set()
        self._stack = contextlib.AsyncExitStack()
        faults.on_cut = self.cut_watches

    async def __aenter__(self) -> Front:
        connectors = [aiohttp.TCPConnector(ssl=context or True, limit=0) for context in self._contexts()]
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        # two sessions: a client certificate would make everybody the admin
        sessions = [
            aiohttp.ClientSession(connector=each, timeout=timeout, auto_decompress=False) for each in connectors
        ]
        self._admin, self._others = [await self._stack.enter_async_context(session) for session in sessions]
        app = web.Application(client_max_size=8 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut_watches()
        await self._stack.aclose()

    def _contexts(self) -> list[ssl.SSLContext | None]:
        own = self._backend
        plain = Credentials(own.url, ca_file=own.ca_file, verify=own.verify)
        return [own.ssl_context(), plain.ssl_context()]

    def cut_watches(self) -> int:
        """End every watch; how many there were."""
        for watch in self._watches:
            watch.cancel()
        return len(self._watches)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        try:
            ask = ask_of(request, target_of(request.path), user=self._user(token))
        except ApiError as error:
            return json_answer(error.status(), error.code)
        if ask.resource != REVIEWS.plural:
            self.calls[ask.verb, ask.resource] += 1
        await self.faults.delay()
        fault = self.faults.draw(ask)
        if fault not in (None, "lost"):
            return fail(request, fault)
        if ask.verb == "watch" and fault == "lost":
            return fail(request, "reset")
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_HEADERS}
        session = self._others
        if token == self.admin_token:
            session = self._admin
            headers.pop("Authorization")
            if self._backend.token:
                headers["Authorization"] = f"Bearer {self._backend.token}"
        url, query = self._backend.url + request.raw_path.partition("?")[0], dict(request.query)
        if ask.verb == "list" and query.get("resourceVersion") == "0" and self.faults.stale_at is not None:
            query |= {"resourceVersion": str(self.faults.stale_at), "resourceVersionMatch": "Exact"}
        body = await request.read()
        if self.keep_to and (ask.verb, ask.resource) == ("create", "pods"):
            # what is wrong with it the API server says
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                body = json.dumps(kept_to(json.loads(body), self.keep_to)).encode()
        async with session.request(request.method, url, params=query, headers=headers, data=body) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_HEADERS}
            if ask.verb == "watch" and answer.status == 200:
                return await self._pass_watch(request, answer, kept)
            said = await answer.read()
            self.faults.on_done(ask)
            if fault == "lost":
                return fail(request, "reset")
            return web.Response(body=said, status=answer.status, headers=kept)

    async def _pass_watch(
        self, request: web.Request, answer: aiohttp.ClientResponse, headers: dict[str, str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)

        async def pass_on() -> None:
            with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)

        watch = asyncio.create_task(pass_on())
        self._watches.add(watch)
        try:
            await asyncio.wait({watch})
        finally:
            watch.cancel()
            self._watches.discard(watch)
        with contextlib.suppress(ConnectionError):
            await response.write_eof()
        return response

    def _user(self, token: str) -> str:
        """A service account's name stands in its token."""
        if token == self.admin_token:
            return "admin"
        with contextlib.suppress(ValueError, IndexError, KeyError):
            claims = token.split(".")[1]
            return str(json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["sub"])
        return ""
