"""A real JupyterHub in the test's process and event loop, on a free port, without a proxy."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import sqlite3
import sys
import time
from collections.abc import Callable
from http.cookies import SimpleCookie
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlencode

import jupyterhub.traitlets
import sqlalchemy
from jinja2.bccache import Bucket, BytecodeCache
from jupyterhub import orm
from jupyterhub.app import JupyterHub
from jupyterhub.proxy import Proxy
from sqlalchemy import event
from sqlalchemy.engine import Engine
from tornado.httpclient import AsyncHTTPClient, HTTPRequest, HTTPResponse
from traitlets.config import Config

from gpushare_spawner.spawner.local.process import GPUShareSimpleSpawner
from gpushare_spawner.spawner.queue.reservations import Reservations
from tests.ports import free_port

HERE = Path(__file__).parent
TOKEN = "token-of-the-test"

# The hubs of a process share what takes most of a hub's start and of its first requests: what SQLAlchemy compiles of
# statements and jinja2 of pages, the metadata of all installed packages, and the database without a user.
jupyterhub.traitlets.entry_points = functools.cache(entry_points)
_ENGINES: list[Engine] = []
_EMPTY_DATABASES: list[bytes] = []
_check_db_revision = orm.check_db_revision


def _create_engine(url: str, **options: Any) -> Engine:
    engine = sqlalchemy.create_engine(url, **options)
    if engine.dialect.name == "sqlite":
        _ENGINES[:] = _ENGINES or [engine]
        engine.dialect, engine._compiled_cache = _ENGINES[0].dialect, _ENGINES[0]._compiled_cache
    return engine


def _check_new_database(engine: Engine) -> None:
    """Give a new database its revision; one that is there was made by the same JupyterHub."""
    if not sqlalchemy.inspect(engine).has_table("alembic_version"):
        _check_db_revision(engine)


orm.create_engine, orm.check_db_revision = _create_engine, _check_new_database
# the token of the tests is hashed for each request
orm.Hashed.rounds = 1


class CompiledPages(BytecodeCache):
    """The pages of all hubs."""

    _code: ClassVar[dict[str, bytes]] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        """Take what was compiled, if there is something."""
        if code := self._code.get(bucket.key):
            bucket.bytecode_from_string(code)

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Keep what was compiled."""
        self._code[bucket.key] = bucket.bytecode_to_string()


# tests wait for free capacity often
Reservations.place_every = 0.1


@event.listens_for(Engine, "connect")
def _never_sync(connection: Any, record: object) -> None:
    """Let SQLite not wait for the disk: a hub that is killed loses nothing by that, and no test cuts the power."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous=OFF")


class RoutesInMemory(Proxy):  # type: ignore[misc]
    """A proxy that only remembers."""

    should_start = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.routes: dict[str, Any] = {}

    async def get_all_routes(self) -> dict[str, Any]:
        return self.routes

    async def add_route(self, routespec: str, target: str, data: Any) -> None:
        self.routes[routespec] = {"routespec": routespec, "target": target, "data": data}

    async def delete_route(self, routespec: str) -> None:
        self.routes.pop(routespec, None)


class InProcessHub(JupyterHub):  # type: ignore[misc]
    """No config file, no signal handlers, logs go to pytest."""

    def load_config_file(self, *args: Any, **kwargs: Any) -> None:
        pass

    def init_signal(self) -> None:
        pass

    def init_db(self) -> None:
        database = Path(self.db_url.removeprefix("sqlite:///"))
        new = database.is_absolute() and not database.exists()
        if new and _EMPTY_DATABASES:
            database.write_bytes(_EMPTY_DATABASES[0])
        super().init_db()
        if new and not _EMPTY_DATABASES:
            _EMPTY_DATABASES.append(database.read_bytes())

    def init_logging(self) -> None:
        super().init_logging()
        self.log.propagate = True
        self.log.handlers.clear()


class RunningHub:
    """Start with ``async with``. ``folder`` holds database and homes; a second hub on the same folder is a restart."""

    def __init__(self, folder: Path, templates: Path, agent_socket: Path, configure: Callable[[Config], None]) -> None:
        self.folder = folder
        config = Config()
        config.JupyterHub.hub_port = free_port()
        config.JupyterHub.spawner_class = GPUShareSimpleSpawner
        config.JupyterHub.authenticator_class = "dummy"
        config.JupyterHub.proxy_class = RoutesInMemory
        config.JupyterHub.db_url = f"sqlite:///{folder}/hub.sqlite"
        config.JupyterHub.cookie_secret_file = f"{folder}/cookie_secret"
        config.JupyterHub.log_level = "WARN"
        config.JupyterHub.jinja_environment_options = {"bytecode_cache": CompiledPages()}
        config.JupyterHub.allow_named_servers = True
        config.JupyterHub.load_groups = {"ml-course": {"users": ["mia"]}}
        config.JupyterHub.services = [{"name": "tester", "api_token": TOKEN}]
        config.JupyterHub.load_roles = [
            {
                "name": "tester",
                "services": ["tester"],
                "scopes": ["admin:users", "admin:servers", "admin:server_state", "admin:groups"],
            }
        ]
        config.JupyterHub.tornado_settings = {"slow_spawn_timeout": 60}
        config.Authenticator.allow_all = True
        config.GPUShareMixin.templates_dir = str(templates)
        config.GPUShareMixin.agent_socket = str(agent_socket)
        config.GPUShareMixin.quota_usage_file = str(folder / "quota-usage.json")
        config.Spawner.cmd = [sys.executable, "-I", "-S", str(HERE / "small_server.py")]
        config.SimpleLocalProcessSpawner.home_dir_template = f"{folder}/home/{{username}}"
        config.Spawner.poll_interval = 1
        config.Spawner.start_timeout = 20
        configure(config)
        self.config = config
        self.app: InProcessHub | None = None

    async def __aenter__(self) -> RunningHub:
        # the one application of the process, as JupyterHub's own start makes it: otherwise its Alembic sets up logging
        # anew (jupyterhub/alembic/env.py), and pytest's handler is gone
        InProcessHub.clear_instance()
        self.app = InProcessHub.instance(config=self.config)
        await self.app.initialize([])
        await self.app.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    async def end(self, cleanup_servers: bool = True) -> None:
        """The hub ends; with its servers, or leaving them behind as when it is killed."""
        if self.app is None:
            return
        app, self.app = self.app, None
        app.cleanup_servers = cleanup_servers
        if not cleanup_servers:
            for user in app.users.values():
                for spawner in user.spawners.values():
                    spawner.stop_polling()
        await app.cleanup()
        app.http_server.stop()
        for callback in app._periodic_callbacks.values():
            callback.stop()
        app.metrics_collector.stop()
        app.db.close()
        app.db.get_bind().dispose()
        if InProcessHub._instance is app:
            InProcessHub.clear_instance()

    def answer_at_once(self) -> None:
        """Let the hub answer requests for servers at once, for tests in which a spawn has to wait."""
        assert self.app is not None
        self.app.tornado_application.settings["slow_spawn_timeout"] = 0

    @property
    def url(self) -> str:
        assert self.app is not None
        return str(self.app.hub.url).rstrip("/")

    def user(self, name: str) -> Any:
        assert self.app is not None
        return self.app.users[name]

    def spawner(self, name: str, server: str = "") -> Any:
        return self.user(name).spawners[server]

    @property
    def reservations(self) -> Any:
        """What the hub's spawners share."""
        assert self.app is not None
        return self.spawner(next(user.name for user in self.app.users.values())).reservations

    async def api(self, method: str, path: str, body: Any = None, timeout: float = 90) -> HTTPResponse:
        return await AsyncHTTPClient(force_instance=True).fetch(
            HTTPRequest(
                f"{self.url}/api/{path}",
                method=method,
                headers={"Authorization": f"token {TOKEN}"},
                body=json.dumps(body) if body is not None else ("" if method == "POST" else None),
                allow_nonstandard_methods=True,
                request_timeout=timeout,
            ),
            raise_error=False,
        )

    async def add_user(self, name: str) -> None:
        await self.api("POST", f"users/{name}")

    async def start_server(self, name: str, options: Any = None, server: str | None = None) -> HTTPResponse:
        """POST /users/N/server, for a user who is made if need be."""
        await self.add_user(name)
        path = f"users/{name}/servers/{server}" if server else f"users/{name}/server"
        return await self.api("POST", path, options)

    async def stop_server(self, name: str, server: str | None = None) -> HTTPResponse:
        return await self.api("DELETE", f"users/{name}/servers/{server}" if server else f"users/{name}/server")

    async def started(self, name: str, server: str = "", timeout: float = 20) -> Any:
        """Wait until a server is ready; its spawner."""
        user = self.user(name)
        await until(lambda: user.spawners[server].ready, timeout)
        return user.spawners[server]


class Browser:
    """Enough of a browser for the hub's forms: cookies, XSRF token, redirects."""

    def __init__(self, hub: RunningHub) -> None:
        self.hub = hub
        self.cookies: dict[str, str] = {}

    async def open(self, path: str, form: list[tuple[str, str]] | None = None) -> HTTPResponse:
        base = self.hub.url.removesuffix("/hub")
        url = path if path.startswith("http") else base + path
        body = None
        if form is not None:
            body = urlencode([*form, ("_xsrf", self.cookies.get("_xsrf", ""))])
        for _ in range(6):
            response = await AsyncHTTPClient(force_instance=True).fetch(
                HTTPRequest(
                    url,
                    method="GET" if body is None else "POST",
                    body=body,
                    headers={"Cookie": "; ".join(f"{n}={v}" for n, v in self.cookies.items())},
                    follow_redirects=False,
                    request_timeout=40,
                ),
                raise_error=False,
            )
            for line in response.headers.get_list("Set-Cookie"):
                for name, morsel in SimpleCookie(line).items():
                    self.cookies[name] = morsel.value
            if response.code not in (301, 302, 303):
                return response
            target = response.headers["Location"]
            if "/hub/" not in target or "/hub/user/" in target:
                # the server's own pages, which only a proxy would lead to
                return response
            url, body = (target if target.startswith("http") else base + target), None
        raise AssertionError(f"too many redirects from {path}")

    async def log_in(self, name: str) -> None:
        await self.open("/hub/login")
        await self.open("/hub/login?next=/hub/home", [("username", name), ("password", "")])


async def until(condition: Callable[[], Any], timeout: float = 10.0) -> None:
    """Wait for something to come true."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"did not come true within {timeout} s")
        await asyncio.sleep(0.02)


logging.getLogger("asyncio").setLevel(logging.INFO)
