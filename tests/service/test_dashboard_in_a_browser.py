"""The dashboard in Debian's chromium: it refreshes, fits on a phone, and its policy lets through all it needs."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from typing import Any, cast

import pytest
from selenium.webdriver import Chrome
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port

from gpushare_spawner.model.report import Report
from gpushare_spawner.service import reports
from gpushare_spawner.service.counters import Counters
from gpushare_spawner.service.reports import RecentReports
from gpushare_spawner.service.web import dashboard
from gpushare_spawner.service.web.page import Page
from tests.present import present
from tests.service.dashboards import NOW, TEMPLATES, afternoon, session

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="needs Debian's packages chromium and chromium-driver",
    ),
]


class SignedIn:
    """Stands for the hub's login: it is always ann, an admin."""

    access_scopes = ()
    base_url = "/services/gpushare/"

    def get_user(self, handler: dashboard.DashboardPage, *, sync: bool = True) -> Any:
        ann = {"kind": "user", "name": "ann", "admin": True, "scopes": []}
        return ann if sync else asyncio.sleep(0, ann)

    def _persist_url_token_if_set(self, handler: dashboard.DashboardPage) -> None:
        pass


class Agent:
    def __init__(self) -> None:
        self.now = afternoon()

    def report_age(self) -> float:
        return 0.0

    async def report(self) -> Report:
        return self.now


@pytest.fixture
def browser() -> Iterator[object]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = present(shutil.which("chromium"))
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


async def test_the_board_in_a_browser(browser: Chrome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Page, "_hub_auth", SignedIn())
    tokens = []
    prepare = Page.prepare

    async def noting(page: dashboard.DashboardPage) -> None:
        tokens.append(page.request.headers.get("X-XSRFToken"))
        await prepare(page)

    monkeypatch.setattr(Page, "prepare", noting)
    agent = Agent()
    sources = dashboard.DashboardSources(
        RecentReports([cast(reports.Agent, agent)], max_age=0),
        lambda: TEMPLATES,
        lambda: None,
        Counters(),
        clock=lambda: NOW,
    )
    socket, port = bind_unused_port()
    server = HTTPServer(dashboard.dashboard_application(sources, "/services/gpushare/"))
    server.add_socket(socket)
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}

    def page_text() -> str:
        return str(browser.execute_script("return document.getElementById('dashboard').innerText"))

    await asyncio.to_thread(browser.execute_cdp_cmd, "Emulation.setDeviceMetricsOverride", size)
    await asyncio.to_thread(browser.get, f"http://127.0.0.1:{port}/services/gpushare/")
    assert "bob / thesis" in await asyncio.to_thread(page_text)
    width = "return [document.documentElement.scrollWidth, window.innerWidth]"
    needed, there = await asyncio.to_thread(browser.execute_script, width)
    assert needed <= there == 390
    widths = "return [...document.querySelectorAll('.gpu:first-child .part')].map(e => e.getBoundingClientRect().width)"
    ann, bob, dave, carol = await asyncio.to_thread(browser.execute_script, widths)
    assert ann == pytest.approx(dave, abs=1)  # 0.25 both
    assert bob < ann < carol  # 0.10, 0.25, 0.40

    agent.now = afternoon(session("zoe", gpus=("GPU-1",)))
    await asyncio.to_thread(browser.execute_script, "return refresh()")
    assert "zoe" in await asyncio.to_thread(page_text)
    assert tokens[0] is None
    assert tokens[-1]  # without it the hub's library would not take the cookie

    server.stop()
    await server.close_all_connections()
    await asyncio.to_thread(browser.execute_script, "return refresh()")
    told = await asyncio.to_thread(browser.execute_script, "return document.getElementById('freshness').innerText")
    assert told.startswith("Not refreshed since")
    errors = await asyncio.to_thread(browser.get_log, "browser")
    assert [entry["message"] for entry in errors if "ERR_CONNECTION_REFUSED" not in entry["message"]] == []
