"""The hub's page of a spawn that waits, in Debian's chromium: what it says, and the way to another template."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.spawner.hub_pages import FOLDER
from gpushare_spawner.wording.amounts import clock
from tests.e2e import browser as chromium

from .fake_agent import FakeAgent
from .running_hub import RunningHub, until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (chromium.CHROMIUM and chromium.CHROMEDRIVER), reason=chromium.MISSING),
]


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Any]:
    driver = await asyncio.to_thread(chromium.open_browser, tmp_path / "profile")
    yield driver
    await asyncio.to_thread(driver.quit)


async def test_the_page_of_a_waiting_spawn_leads_to_a_template_that_starts_now(
    make_hub: Any, agent: FakeAgent, browser: Any
) -> None:
    hub: RunningHub = await make_hub(
        lambda config: (
            config.JupyterHub.update({"tornado_settings": {"slow_spawn_timeout": 0}, "template_paths": [FOLDER]})
            or config.GPUShareMixin.update({"queue_timeout": 2 * 24 * 3600})
        )
    )
    due = Notice(tier=Tier.RELEASED, at=time.time() + 230, reason="idle")
    agent.occupy("there-0", 70, 0, notice=due)
    agent.occupy("there-1", 100, 1)
    page = Visitor(browser, hub)
    await page.log_in("ada")
    await page.start("half-gpu")
    await page.wait("return document.querySelector('#progress-message br')")
    first, second = (await page.text("#progress-message")).split("\n")
    ends = datetime.fromisoformat(await page.attribute("#progress-message time", "datetime"))
    assert ends.timestamp() == pytest.approx(time.time() + 2 * 24 * 3600, abs=30)
    assert first == (
        "First in queue. Not enough free capacity: this needs 0.50 GPU, and at most 0.30 GPU is free on any GPU. "
        "Estimated wait: about 4 min. "
        f"If the server cannot start by {clock(ends.timestamp(), time.time())}, the spawn is cancelled."
    )
    assert f"on {ends.astimezone().day} " in first, "the wait ends in two days"
    assert await page.text("#gpushare-heading") == "Waiting for a GPU"
    assert "UTC" not in await page.text("body")
    assert second == (
        "These templates would start now: CPU only, 0.25 GPU. "
        "To start one of them instead, stop this server on the hub's home page and choose again."
    )
    # the page's own button, and the form after it
    await page.click("#stop-server-btn")
    await until(lambda: not hub.spawner("ada").active)
    await page.open("/hub/spawn/ada")
    assert await page.text("input[value=quarter-gpu] ~ label .gs-now") == "Starts now"
    await page.start("quarter-gpu")
    assert (await hub.started("ada"))._attempt.template_name == "quarter-gpu"


async def test_the_heading_of_the_page_follows_the_spawn(make_hub: Any, agent: FakeAgent, browser: Any) -> None:
    hub: RunningHub = await make_hub(
        lambda config: (
            config.JupyterHub.update({"tornado_settings": {"slow_spawn_timeout": 0}, "template_paths": [FOLDER]}),
            config.GPUShareMixin.update({"queue_timeout": 3}),
        )
    )
    agent.occupy("there-0", 100, 0)
    agent.occupy("there-1", 100, 1)
    page = Visitor(browser, hub)
    await page.log_in("ada")
    await page.start("half-gpu")
    heading = "document.querySelector('#gpushare-heading')?.textContent"
    end = "/^\\d\\d:\\d\\d$/.test(document.querySelector('#progress-message time').textContent)"
    await page.wait(f"return {heading} === 'Waiting for a GPU' && {end}")
    await page.wait(f"return {heading} === 'Your server did not start.'")
    assert await page.text("#gpushare-redirect") == ""


class Visitor:
    """Drives the browser in threads, so that the hub in this loop can answer."""

    def __init__(self, browser: Any, hub: RunningHub) -> None:
        self._browser = browser
        self._hub = hub

    async def open(self, path: str) -> None:
        await asyncio.to_thread(self._browser.get, self._hub.url.removesuffix("/hub") + path)

    async def log_in(self, name: str) -> None:
        url = f"{self._hub.url}/login?next=%2Fhub%2Fspawn%2F{name}"
        await asyncio.to_thread(chromium.log_in, self._browser, url, name, "any")

    async def start(self, template: str) -> None:
        await self.click(f"input[value={template}] ~ label")
        await self.click("#spawn_form [type=submit]")

    async def click(self, selector: str) -> None:
        await asyncio.to_thread(chromium.click, self._browser, selector)

    async def wait(self, so: str) -> None:
        await asyncio.to_thread(chromium.until, self._browser, so, 20)

    async def attribute(self, selector: str, name: str) -> str:
        element = await asyncio.to_thread(self._browser.find_element, "css selector", selector)
        return str(await asyncio.to_thread(element.get_attribute, name))

    async def text(self, selector: str) -> str:
        element = await asyncio.to_thread(self._browser.find_element, "css selector", selector)
        return str(await asyncio.to_thread(lambda: element.text))
