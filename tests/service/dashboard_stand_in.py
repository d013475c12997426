"""The service's pages beside the hub's own stylesheet and logo, with reports of ours, for a browser.

In a thread of its own, so that tests and scripts drive a browser in plain, blocking code.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from selenium import webdriver
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler, StaticFileHandler

from gpushare_spawner.idle.keep import KeepRule
from gpushare_spawner.model.control import QueueProgress
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.service import reports
from gpushare_spawner.service.actions.context import ActionContext
from gpushare_spawner.service.command import service_application
from gpushare_spawner.service.history.recorder import History
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.service.reports import KnownReport, RecentReports
from gpushare_spawner.service.sources import DashboardSources
from gpushare_spawner.service.web.app import Page
from tests.present import present
from tests.service.api.conftest import StandInAgent
from tests.service.conftest import deciding, with_keeps
from tests.service.dashboards import NOW, TEMPLATES

PREFIX = "/services/gpushare/"
HUB_FILES = Path(sys.prefix) / "share" / "jupyterhub" / "static"


class SignedIn:
    """Stands for the hub's login: it is always `user`."""

    access_scopes = ()
    base_url = PREFIX
    login_url = "/hub/login"

    def __init__(self, user: str = "ann", admin: bool = True) -> None:
        self.user = {"kind": "user", "name": user, "admin": admin, "scopes": []}

    def get_user(self, handler: RequestHandler, *, sync: bool = True) -> Any:
        return self.user if sync else asyncio.sleep(0, self.user)

    def _persist_url_token_if_set(self, handler: RequestHandler) -> None:
        pass


class Logo(RequestHandler):
    def get(self) -> None:
        self.set_header("Content-Type", "image/png")
        self.finish((HUB_FILES / "images" / "jupyterhub-80.png").read_bytes())


class DashboardStandIn:
    """`login`: who looks at the page. `agents`: one for each report; a test changes their `now`."""

    def __init__(self, shown: Sequence[KnownReport], with_hub: bool = True, max_age: float = 0.0) -> None:
        self._max_age = max_age
        self.pending: Sequence[HubServer] | None = ()
        self.quotas: Quotas | None = None
        self.history: History | None = None
        self.told: Mapping[tuple[str, str], QueueProgress] = {}
        self.login = SignedIn()
        self.agents = [StandInAgent(report) for report in shown]
        self.requests: list[tuple[str, str, Any]] = []
        self.tokens: list[str | None] = []
        self._with_hub = with_hub
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: HTTPServer | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{PREFIX}"

    def run(self, what: Any) -> Any:
        """Run a coroutine in the server's thread; return its result."""
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(10)

    def start(self) -> None:
        self._thread.start()
        self.run(self._serve())

    def stop(self) -> None:
        self.disconnect()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def reconnect(self) -> None:
        """Answer again, at the same port."""
        self.run(self._serve())

    def disconnect(self) -> None:
        """Stop answering."""
        if self._server is not None:
            self.run(self._close(self._server))
            self._server = None

    def set_reports(self, shown: Sequence[KnownReport]) -> None:
        """Report something else."""
        for agent, report in zip(self.agents, shown, strict=True):
            agent.now = report

    async def _waiting(self) -> Sequence[HubServer] | None:
        return self.pending

    async def _progress(self, waiting: Sequence[HubServer]) -> Mapping[tuple[str, str], QueueProgress]:
        return self.told

    def _application(self) -> Application:
        agents = [cast(reports.Agent, agent) for agent in self.agents]
        no_hub: Any = None
        rule = KeepRule(longest=8 * 3600, per_day=3, at_once=2)
        context = ActionContext(
            agents,
            no_hub,
            lambda: with_keeps(TEMPLATES, rule),
            clock=lambda: NOW,
            quotas=lambda: self.quotas,
            pending=self._waiting,
        )
        reports_of_agents = RecentReports(agents, max_age=0)
        sources = DashboardSources(context, reports_of_agents, deciding(), progress=self._progress)
        application = service_application(sources, PREFIX, history=self.history, max_age=self._max_age)
        if self._with_hub:
            application.add_handlers(
                r".*", [(r"/hub/logo", Logo), (r"/hub/static/(.*)", StaticFileHandler, {"path": str(HUB_FILES)})]
            )
        return application

    async def _serve(self) -> None:
        sockets = bind_sockets(self.port, "127.0.0.1")  # port 0: any
        self.port = sockets[0].getsockname()[1]
        self._server = HTTPServer(self._application())
        self._server.add_sockets(sockets)

    async def _close(self, server: HTTPServer) -> None:
        server.stop()
        await server.close_all_connections()


@contextmanager
def signed_in(stand_in: DashboardStandIn) -> Iterator[DashboardStandIn]:
    """Serve, with the login of the stand-in in place of the hub's."""
    before = {name: Page.__dict__.get(name) for name in ("_hub_auth", "prepare")}
    prepare = Page.prepare

    async def noting(page: Page) -> None:
        request = page.request
        stand_in.tokens.append(request.headers.get("X-XSRFToken"))
        if request.method != "GET":
            stand_in.requests.append((request.method or "", request.uri or "", json.loads(request.body or b"null")))
        await prepare(page)

    for name, value in {"_hub_auth": stand_in.login, "prepare": noting}.items():
        setattr(Page, name, value)
    try:
        stand_in.start()
        yield stand_in
    finally:
        stand_in.stop()
        for name, value in before.items():
            if value is None:
                delattr(Page, name)
            else:
                setattr(Page, name, value)


def chromium() -> webdriver.Chrome:
    """Return Debian's chromium, without a window."""
    options = webdriver.ChromeOptions()
    options.binary_location = present(shutil.which("chromium"))
    options.add_argument("--window-size=1280,1100")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def resize(browser: webdriver.Chrome, width: int, height: int = 844) -> None:
    """Give the page a size in CSS pixels; below 600 as on a phone."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def scheme(browser: webdriver.Chrome, name: str) -> None:
    """Set the system's colour scheme: light or dark."""
    feature = {"name": "prefers-color-scheme", "value": name}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
