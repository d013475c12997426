"""The hub's API as far as the service asks for it, with faults on demand."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port
from tornado.web import Application, HTTPError, RequestHandler

from gpushare_spawner.model.controls import taken_out
from gpushare_spawner.service.hub.client import Hub, HubUser

TOKEN = "service-token"


class Progress:
    """The events of one spawn. As in JupyterHub a client gets all events so far, and those that come."""

    def __init__(self, *events: Any) -> None:
        self.events: list[Any] = [{"progress": 0, "message": "Server requested"}, *events]
        self.ended = False
        self.clients = 0
        self._more = asyncio.Event()

    def tell(self, *events: Any) -> None:
        self.events += events
        self._notify()

    def end(self) -> None:
        """The spawn has failed."""
        self.ended = True
        self.tell({"progress": 100, "failed": True, "message": "Spawn failed"})

    def _notify(self) -> None:
        more, self._more = self._more, asyncio.Event()
        more.set()

    async def more(self) -> None:
        await self._more.wait()


class FakeHub:
    """``asked``: (method, path, body) of each request. ``faults`` are taken one by one, each instead of an answer:
    a status, (status, headers), "hang", or bytes to answer with."""

    def __init__(self, page_limit: int = 100) -> None:
        self.users: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, str, Any]] = []
        self.faults: list[Any] = []
        self.page_limit = page_limit
        self.in_flight = self.most_in_flight = 0
        self.delay = 0.0
        self.progress: dict[str, Progress] = {}
        """By the path below the API's address, without `/progress`."""
        self.scopes = ["list:users", "read:servers", "delete:servers", "start:servers", "read:users:groups"]
        socket, port = bind_unused_port()
        self.url = f"http://127.0.0.1:{port}/hub/api"
        self._server = HTTPServer(
            Application(
                [
                    (r"/hub/api/", _Version),
                    (r"/hub/api/users", _Users),
                    (r"/hub/api/user", _Self),
                    (r"/hub/api/users/([^/]+)", _User),
                    (r"/hub/api(/users/.+)/progress", _Progress),
                    (r"/hub/api/users/([^/]+)/server", _Server),
                    (r"/hub/api/users/([^/]+)/servers/([^/]+)", _Server),
                ],
                hub=self,
                log_function=lambda handler: None,
            )
        )
        self._server.add_socket(socket)

    def add(self, user: str, server: str | None = "", **changes: Any) -> None:
        """A user with a ready server (None: without); instants are seconds since the epoch."""
        account = self.users.setdefault(user, {"name": user, "kind": "user", "servers": {}})
        if server is None:
            account.update(_iso(changes))
            return
        account["servers"][server] = _iso(
            {"name": server, "ready": True, "pending": None, "url": "/", "started": 0.0, "last_activity": 0.0}
            | {"user_options": {}}
            | changes
        )

    @property
    def deleted(self) -> list[str]:
        return [path for method, path, _ in self.asked if method == "DELETE"]

    @property
    def notes(self) -> dict[str, str]:
        """What the hub's pages say of servers that were stopped, by the path of the server."""
        asked = ((path, taken_out(body)) for method, path, body in self.asked if method == "POST")
        return {path: found[1].text for path, found in asked if found is not None and found[1].stopped}

    async def noted(self) -> dict[str, str]:
        """The same, as soon as there is one."""
        async with asyncio.timeout(10):
            while not self.notes:
                await asyncio.sleep(0.01)
        return self.notes

    async def close(self) -> None:
        self._server.stop()
        await self._server.close_all_connections()


class DirectHub(Hub):
    """A client that takes the list of users from `FakeHub` itself: for hundreds of rounds of a culler."""

    def __init__(self, hub: FakeHub, **settings: Any) -> None:
        super().__init__(hub.url, TOKEN, **settings)
        self._hub = hub

    async def users(self, with_ready_servers: bool = True) -> list[HubUser]:
        return [
            self._user(json.loads(json.dumps(user)))
            for user in self._hub.users.values()
            if not with_ready_servers or any(server["ready"] for server in user["servers"].values())
        ]


def _iso(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: datetime.fromtimestamp(value, UTC).isoformat().replace("+00:00", "Z")
        if isinstance(value, float)
        else value
        for key, value in values.items()
    }


class _Handler(RequestHandler):
    @property
    def hub(self) -> FakeHub:
        hub: FakeHub = self.settings["hub"]
        return hub

    async def prepare(self) -> None:
        hub = self.hub
        hub.asked.append((self.request.method, self.request.uri.removeprefix("/hub/api"), _body(self.request.body)))
        hub.in_flight += 1
        hub.most_in_flight = max(hub.most_in_flight, hub.in_flight)
        if hub.delay:
            await asyncio.sleep(hub.delay)
        if self.request.headers.get("Authorization") != f"token {TOKEN}":
            raise HTTPError(403)
        fault = hub.faults.pop(0) if hub.faults else None
        if fault == "hang":
            await asyncio.sleep(5)
        elif isinstance(fault, bytes):
            self.finish(fault)
        elif fault is not None:
            status, headers = fault if isinstance(fault, tuple) else (fault, {})
            self.set_status(status)
            for name, value in headers.items():
                self.set_header(name, value)
            self.finish({"status": status, "message": f"no, {status}"})

    def on_finish(self) -> None:
        self.hub.in_flight -= 1


def _body(data: bytes) -> Any:
    return json.loads(data) if data else None


class _Self(_Handler):
    def get(self) -> None:
        self.finish({"kind": "service", "name": "gpushare", "scopes": self.hub.scopes})


class _Version(_Handler):
    def get(self) -> None:
        self.finish(json.dumps({"version": "5.5.0"}))


class _Users(_Handler):
    def get(self) -> None:
        assert self.request.headers["Accept"] == "application/jupyterhub-pagination+json"
        offset = int(self.get_argument("offset", "0"))
        limit = min(int(self.get_argument("limit", "50")), self.hub.page_limit)
        users = list(self.hub.users.values())
        if self.get_argument("state", "") == "ready":
            users = [user for user in users if any(server["ready"] for server in user["servers"].values())]
        following = None
        if offset + limit < len(users):
            url = f"https://elsewhere.example/hub/api/users?offset={offset + limit}&limit={limit}"
            following = {"offset": offset + limit, "limit": limit, "url": url}
        pagination = {"offset": offset, "limit": limit, "total": len(users), "next": following}
        self.finish({"items": users[offset : offset + limit], "_pagination": pagination})


class _User(_Handler):
    def get(self, user: str) -> None:
        if user not in self.hub.users:
            raise HTTPError(404)
        self.finish(self.hub.users[user])

    def delete(self, user: str) -> None:
        self.hub.users.pop(user)
        self.set_status(204)


class _Progress(_Handler):
    async def get(self, path: str) -> None:
        progress = self.hub.progress.get(path)
        if progress is None:
            raise HTTPError(400, "is not starting")
        progress.clients += 1
        self.write("\n\n")
        told = 0
        while not progress.ended or told < len(progress.events):
            while told < len(progress.events):
                event = progress.events[told]
                self.write(event if isinstance(event, bytes) else f"data: {json.dumps(event)}\n\n")
                await self.flush()
                told += 1
            if not progress.ended:
                await progress.more()


class _Server(_Handler):
    def post(self, user: str, server: str = "") -> None:
        if user not in self.hub.users:
            raise HTTPError(404)
        servers = self.hub.users[user]["servers"]
        if server in servers:
            raise HTTPError(400, "already running")
        options = _body(self.request.body) or {}
        _, note = taken_out(options) or (options, None)
        if note is not None and (note.cancelled or note.stopped):
            raise HTTPError(409, note.text)  # as our spawner does: nothing is started
        self.hub.add(user, server, ready=False, pending="spawn", user_options=options)
        self.set_status(202)

    def delete(self, user: str, server: str = "") -> None:
        servers = self.hub.users.get(user, {"servers": {}})["servers"]
        if server not in servers:
            raise HTTPError(404)
        del servers[server]
        self.set_status(204)
