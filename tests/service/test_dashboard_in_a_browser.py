"""The dashboard in Debian's chromium: it refreshes, fits on a phone, and its policy lets through all it needs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any, cast

import pytest
from selenium.webdriver import Chrome

from tests.service.dashboard_stand_in import DashboardStandIn, chromium, resize, scheme, signed_in
from tests.service.dashboards import afternoon, session

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="needs Debian's packages chromium and chromium-driver",
    ),
]

REFRESH = "return import('/services/gpushare/static/dashboard/view.js').then(view => view.refresh())"


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    driver = chromium()
    yield driver
    driver.quit()


def page_text(browser: Chrome) -> str:
    return str(browser.execute_script("return document.getElementById('dashboard').innerText"))


def errors(browser: Chrome) -> list[str]:
    return [entry["message"] for entry in cast(Any, browser).get_log("browser")]


def test_the_dashboard_on_a_phone_and_over_an_update(browser: Chrome) -> None:
    with signed_in(DashboardStandIn([afternoon()])) as served:
        scheme(browser, "light")
        resize(browser, 390)
        browser.get(served.url)
        assert "bob / thesis" in page_text(browser)
        needed, there = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert needed <= there == 390
        widths = (
            "return [...document.querySelectorAll('.gpu:first-child .part')].map(e => e.getBoundingClientRect().width)"
        )
        ann, bob, dave, carol = browser.execute_script(widths)
        assert ann == pytest.approx(dave, abs=1)  # 0.25 both
        assert bob < ann < carol  # 0.10, 0.25, 0.40

        served.agents[0].now = afternoon(session("zoe", gpus=("GPU-1",)))
        browser.execute_script(REFRESH)
        assert "zoe" in page_text(browser)
        assert served.tokens[0] is None
        assert served.tokens[-1]  # without it the hub's library would not take the cookie
        assert [one for one in errors(browser) if "/events" not in one] == []

        served.disconnect()
        browser.execute_script(REFRESH)
        told = browser.execute_script("return document.getElementById('freshness').innerText")
        assert told.startswith("Not refreshed since")
        ended = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING")
        assert [one for one in errors(browser) if not any(reason in one for reason in ended)] == []


def test_the_page_takes_the_theme_of_the_hub_and_does_without_it(browser: Chrome) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    scheme(browser, "dark")
    with signed_in(DashboardStandIn([afternoon()])) as served:
        browser.get(served.url)
        assert browser.execute_script(background) == "rgb(33, 37, 41)", "the hub's, in its dark theme"
        assert browser.execute_script("return document.querySelector('.logo img').naturalWidth") > 0
        browser.execute_script("document.getElementById('scheme').click()")
        assert browser.execute_script("return localStorage.getItem('jupyterhub-bs-theme')") == "light"
        browser.refresh()
        assert browser.execute_script(background) == "rgb(255, 255, 255)", "chosen, against the system's"
        browser.execute_script("localStorage.clear()")
        assert [one for one in errors(browser) if "/events" not in one] == []
    with signed_in(DashboardStandIn([afternoon()], with_hub=False)) as served:
        browser.get(served.url)
        assert browser.execute_script(background) == "rgb(18, 22, 28)", "ours"
        assert "bob / thesis" in page_text(browser)
