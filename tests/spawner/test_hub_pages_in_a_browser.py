"""The hub's pages of the form and of a spawn that waits, in Debian's chromium: what they say, and what leads where."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from typing import Any
from urllib.parse import quote

import pytest
from selenium.webdriver import Keys

from gpushare_spawner.model.controls import SpawnNote
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import Tier
from gpushare_spawner.spawner.hub import HUB_PAGES
from gpushare_spawner.wording.amounts import clock
from tests.e2e import browser as chromium

from .fake_agent import FakeAgent
from .running_hub import RunningHub
from .test_stopped_servers import AT, stop_as_root, with_our_pages

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (chromium.CHROMIUM and chromium.CHROMEDRIVER), reason=chromium.MISSING),
]


@pytest.fixture(scope="module")
def chromium_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    driver = chromium.open_browser(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture
async def browser(chromium_once: Any) -> AsyncIterator[Any]:
    """With a window as it was opened; it forgets who was logged in, and leaves the hub before that ends."""
    yield chromium_once
    for command in ("Emulation.clearDeviceMetricsOverride", "Network.clearBrowserCookies"):
        await asyncio.to_thread(chromium_once.execute_cdp_cmd, command, {})
    await asyncio.to_thread(chromium_once.get, "about:blank")


async def test_the_page_of_a_waiting_spawn_leads_to_a_template_that_starts_now(
    make_hub: Any, agent: FakeAgent, browser: Any
) -> None:
    hub: RunningHub = await make_hub(
        lambda config: (
            config.JupyterHub.update({"tornado_settings": {"slow_spawn_timeout": 0}, "template_paths": [HUB_PAGES]})
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
    first, gpus = (await page.text("#progress-message")).split("\n")
    ends = datetime.fromisoformat(await page.attribute("#progress-message time", "datetime"))
    assert ends.timestamp() == pytest.approx(time.time() + 2 * 24 * 3600, abs=30)
    assert first == (
        "First in queue. Not enough free capacity: this needs 0.50 GPU, and at most 0.30 GPU is free on any GPU. "
        "Estimated wait: about 4 min. "
        f"If the server cannot start by {clock(ends.timestamp(), time.time())}, the spawn is cancelled."
    )
    assert f"on {ends.astimezone().day} " in first, "the wait ends in two days"
    assert gpus == "Suitable GPUs: 1 of 2 × Simulated GPU 16 GiB."
    assert await page.text("#gpushare-heading") == "Your server (0.50 GPU) is waiting for a GPU."
    assert "UTC" not in await page.text("body")
    zone = await page.run("return new Intl.DateTimeFormat().resolvedOptions().timeZone")
    title = await page.attribute("#progress-message time", "title")
    assert title.startswith(f"{ends.astimezone():%-d %b %Y, %H:%M} ")
    assert zone in title, "the zone is shown on hover"
    assert await page.text("#gpushare-startable") == "CPU only\n0.25 GPU"
    # a link of the page cancels the spawn, and chooses the template on the form
    await page.click("#gpushare-startable li:nth-child(2) a")
    await page.wait("return document.querySelector('#spawn_form [type=submit]')?.textContent === 'Start 0.25 GPU'")
    assert not hub.spawner("ada").active
    assert await page.text("input[value=quarter-gpu] ~ label .gs-now") == "Starts now"
    await page.click("#spawn_form [type=submit]")
    assert (await hub.started("ada"))._attempt.template_name == "quarter-gpu"


async def test_the_page_of_a_waiting_spawn_leads_back_to_the_form(
    make_hub: Any, agent: FakeAgent, browser: Any
) -> None:
    hub: RunningHub = await make_hub(
        lambda config: config.JupyterHub.update(
            {"tornado_settings": {"slow_spawn_timeout": 0}, "template_paths": [HUB_PAGES]}
        )
    )
    agent.occupy("there-0", 100, 0)
    agent.occupy("there-1", 100, 1)
    page = Visitor(browser, hub)
    for user, server in (("ada", ""), ("bob", "lab-2")):
        await page.log_in(user, server)
        await page.start("half-gpu")
        await page.wait("return document.querySelector('#progress-message time')")
        await page.click("#gpushare-back")
        await page.wait("return document.querySelector('#spawn_form')")
        assert not hub.spawner(user, server).active
        assert len(hub.reservations.queue) == 0
        chosen = "document.querySelector('input[name=profile]:checked').value"
        assert await page.run(f"return {chosen}") == "half-gpu", "the form shows what was chosen last"
        await page.open("/hub/logout")


async def test_the_form_shows_four_cards_and_a_card_that_never_starts_is_out_of_reach(
    make_hub: Any, agent: FakeAgent, browser: Any
) -> None:
    hub: RunningHub = await make_hub(
        lambda config: config.JupyterHub.update(
            {"tornado_settings": {"slow_spawn_timeout": 0}, "template_paths": [HUB_PAGES]}
        )
    )
    page = Visitor(browser, hub)
    await page.size(1366, 768)
    await page.log_in("ada")
    await page.click("input[value=quarter-gpu] ~ label")
    seen = (
        "const bar = document.querySelector('.feedback-container').getBoundingClientRect().top;"
        "return [...document.querySelectorAll('.gs-card')]"
        ".filter((card) => { const at = card.getBoundingClientRect(); return at.top >= 0 && at.bottom <= bar; })"
        ".map((card) => card.querySelector('input').value)"
    )
    visible = await page.run(seen)
    assert len(visible) >= 4
    assert "quarter-gpu" in visible, "the chosen card is not under the bar of the Start button"
    names = [card["value"] for card in await page.run(
        "return [...document.querySelectorAll('input[name=profile]')].map(({value, disabled}) => ({value, disabled}))"
    ) if not card["disabled"]]  # fmt: skip
    assert "three-gpus" not in names
    assert "a100" not in names
    reached = []
    for _ in names:
        await page.press(Keys.ARROW_DOWN)
        reached.append(await page.run("return document.querySelector('input[name=profile]:checked').value"))
        assert reached[-1] in await page.run(seen), "the keyboard scrolls to what it chooses"
        title = await page.run("return document.querySelector('input:checked ~ label .gs-title').textContent")
        assert await page.text("#spawn_form [type=submit]") == f"Start {title}"
    assert sorted(reached) == sorted(names)
    await page.click("input[value=three-gpus] ~ label")
    assert await page.run("return document.querySelector('input[name=profile]:checked').value") == reached[-1]
    # a link to a template that can never start chooses nothing else
    await page.run("location.hash = '#three-gpus'")
    assert await page.run("return document.querySelector('input[name=profile]:checked').value") == reached[-1]
    await page.run("location.hash = '#half-gpu'")
    await page.wait("return document.querySelector('#spawn_form [type=submit]').textContent === 'Start 0.50 GPU'")
    # on a phone nothing sticks out, and each card is high enough for a thumb
    await page.size(390, 844)
    assert await page.run("return document.documentElement.scrollWidth") <= 390
    heights = "[...document.querySelectorAll('.gpushare label')].map((card) => card.getBoundingClientRect().height)"
    assert min(height for height in await page.run(f"return {heights}") if height > 0) >= 24
    # the form works with the keyboard alone
    await page.run("document.querySelector('input[name=profile]:checked').focus()")
    await page.press(Keys.ENTER)
    await page.wait("return /\\/(user|spawn-pending)\\//.test(location.pathname)")


async def test_the_heading_of_the_page_follows_the_spawn(make_hub: Any, agent: FakeAgent, browser: Any) -> None:
    hub: RunningHub = await make_hub(
        lambda config: (
            config.JupyterHub.update({"tornado_settings": {"slow_spawn_timeout": 0}, "template_paths": [HUB_PAGES]}),
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
    await page.wait(f"return {heading} === 'Your server (0.50 GPU) is waiting for a GPU.' && {end}")
    await page.wait(f"return {heading} === 'Your server (0.50 GPU) did not start.'")
    assert await page.text("#gpushare-redirect") == ""


@pytest.mark.slow
async def test_the_page_of_a_spawn_that_an_admin_cancels_says_who_did(
    make_hub: Any, agent: FakeAgent, browser: Any
) -> None:
    hub: RunningHub = await make_hub(
        lambda config: config.JupyterHub.update(
            {"tornado_settings": {"slow_spawn_timeout": 0}, "template_paths": [HUB_PAGES]}
        )
    )
    agent.occupy("there-0", 100, 0)
    agent.occupy("there-1", 100, 1)
    page = Visitor(browser, hub)
    await page.log_in("ada")
    await page.start("half-gpu")
    await page.wait("return document.querySelector('#progress-message time')")
    await hub.stop_server("ada")
    note = SpawnNote(text="root cancelled the spawn: An exam begins.", cancelled=True)
    assert (await hub.start_server("ada", note.within({"profile": "half-gpu"}))).code == 409
    await page.wait("return document.body.innerText.includes('root cancelled the spawn: An exam begins.')")
    assert "Redirect loop" not in await page.text("body")


@pytest.mark.slow
async def test_the_pages_of_a_stopped_server_say_when_in_the_readers_time(make_hub: Any, browser: Any) -> None:
    hub: RunningHub = await make_hub(with_our_pages)
    await hub.start_server("ada", {"profile": "cpu-only"})
    await hub.started("ada")
    await stop_as_root(hub, "ada", "An exam begins.")
    page = Visitor(browser, hub)
    await page.log_in("ada")
    said = f"{clock(AT, time.time())}: root stopped the server: An exam begins."
    for path in ("/hub/spawn/ada", "/hub/user/ada"):
        await page.open(path)
        await page.wait("return document.querySelector('.gpushare-stopped time')")
        assert await page.text(".gpushare-stopped") == said, path


class Visitor:
    """Drives the browser in threads, so that the hub in this loop can answer."""

    def __init__(self, browser: Any, hub: RunningHub) -> None:
        self._browser = browser
        self._hub = hub

    async def open(self, path: str) -> None:
        await asyncio.to_thread(self._browser.get, self._hub.url.removesuffix("/hub") + path)

    async def log_in(self, name: str, server: str = "") -> None:
        form = f"/hub/spawn/{name}" + (f"/{quote(server)}" if server else "")
        url = f"{self._hub.url}/login?next={quote(form, safe='')}"
        await asyncio.to_thread(chromium.log_in, self._browser, url, name, "any")

    async def start(self, template: str) -> None:
        await self.click(f"input[value={template}] ~ label")
        await self.click("#spawn_form [type=submit]")

    async def click(self, selector: str) -> None:
        await asyncio.to_thread(chromium.click, self._browser, selector)

    async def run(self, script: str) -> Any:
        return await asyncio.to_thread(self._browser.execute_script, script)

    async def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await asyncio.to_thread(self._browser.execute_cdp_cmd, "Emulation.setDeviceMetricsOverride", metrics)

    async def press(self, key: str) -> None:
        active = await asyncio.to_thread(lambda: self._browser.switch_to.active_element)
        await asyncio.to_thread(active.send_keys, key)

    async def wait(self, so: str) -> None:
        await asyncio.to_thread(chromium.until, self._browser, so, 20)

    async def attribute(self, selector: str, name: str) -> str:
        element = await asyncio.to_thread(self._browser.find_element, "css selector", selector)
        return str(await asyncio.to_thread(element.get_attribute, name))

    async def text(self, selector: str) -> str:
        element = await asyncio.to_thread(self._browser.find_element, "css selector", selector)
        return str(await asyncio.to_thread(lambda: element.text))
