"""Configuration of a real hub for the tests: no proxy, and servers that are one web server of the test."""

import os
from pathlib import Path
from typing import Any

from jupyterhub.proxy import Proxy
from jupyterhub.spawner import Spawner


class NoProxy(Proxy):  # type: ignore[misc]
    """Remembers routes; the tests talk to the hub and to the service directly."""

    should_start = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.routes: dict[str, Any] = {}

    async def add_route(self, routespec: str, target: str, data: Any) -> None:
        self.routes[routespec] = {"routespec": routespec, "target": target, "data": data}

    async def delete_route(self, routespec: str) -> None:
        self.routes.pop(routespec, None)

    async def get_all_routes(self) -> dict[str, Any]:
        return self.routes


class TestServer(Spawner):  # type: ignore[misc]
    """A server that runs as soon as it is asked to, and until it is stopped."""

    running = False

    async def start(self) -> tuple[str, int]:
        self.running = True
        return "127.0.0.1", int(os.environ["TEST_SERVER_PORT"])

    async def stop(self, now: bool = False) -> None:
        self.running = False

    async def poll(self) -> int | None:
        return None if self.running else 0


c = get_config()  # type: ignore[name-defined]  # noqa: F821
folder = Path(os.environ["TEST_FOLDER"])
c.JupyterHub.bind_url = f"http://127.0.0.1:{os.environ['TEST_PROXY_PORT']}"
c.JupyterHub.hub_bind_url = f"http://127.0.0.1:{os.environ['TEST_HUB_PORT']}"
c.JupyterHub.db_url = f"sqlite:///{folder}/hub.sqlite"
c.JupyterHub.cookie_secret_file = str(folder / "cookie_secret")
c.JupyterHub.proxy_class = NoProxy
c.JupyterHub.spawner_class = TestServer
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allow_all = True
c.Authenticator.admin_users = {"boss"}
c.JupyterHub.allow_named_servers = True
c.JupyterHub.services.append({"name": "tester", "api_token": os.environ["TEST_TOKEN"]})
TESTER_SCOPES = [
    "admin:users", "admin:servers", "tokens", "access:services", "custom:gpushare:read", "custom:gpushare:metrics",
]  # fmt: skip
c.JupyterHub.load_roles.append({"name": "tester", "services": ["tester"], "scopes": TESTER_SCOPES})
if os.environ.get("TEST_OWN_USER_ROLE"):
    c.JupyterHub.load_roles.append({"name": "user", "description": "ours", "scopes": ["self", "read:hub"]})

# as zero-to-jupyterhub does it: executed in the main file's own namespace, twice to see that it bears it
config_file = Path(os.environ["TEST_CONFIG_FILE"]).read_text()
for _ in range(2):
    exec(compile(config_file, "20-gpushare-service.py", "exec"))

for service in c.JupyterHub.services.to_dict()["extend"]:
    if service["name"] == "gpushare":
        service["api_token"] = os.environ["TEST_SERVICE_TOKEN"]  # so that the tests can try what it may do
