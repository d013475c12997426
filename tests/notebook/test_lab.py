"""JupyterLab in a real browser: the status bar item and the notifications."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome

from gpushare_spawner.model.tier import Tier
from gpushare_spawner.wording.amounts import clock, unbroken
from tests.notebook.jupyter import TOKEN, Jupyter, running
from tests.notebook.scripted_agent import ScriptedAgent
from tests.present import present

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="needs a browser: Debian's packages chromium and chromium-driver"
    ),
]


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedAgent]:
    with ScriptedAgent(tmp_path_factory.mktemp("agent") / "s.sock") as agent:
        yield agent


@pytest.fixture(scope="module")
def lab(agent: ScriptedAgent, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jupyter]:
    folder = tmp_path_factory.mktemp("lab")
    settings = folder / "config" / "labconfig"
    settings.mkdir(parents=True)
    # Jupyter's question about news would lie over our notifications
    quiet = '{"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": true}}'
    (settings / "page_config.json").write_text(quiet)
    with running(folder, "jupyterlab", GPUSHARE_SOCKET=str(agent.path), JUPYTERHUB_BASE_URL="/") as jupyter:
        yield jupyter


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = present(CHROMIUM)
    profile = tmp_path_factory.mktemp("profile")
    switches = ["headless=new", "no-sandbox", "disable-gpu", "disable-background-networking", "window-size=1200,800"]
    for switch in [*switches, "disable-dev-shm-usage", f"user-data-dir={profile}"]:
        options.add_argument(f"--{switch}")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def test_the_share_stands_in_the_status_bar_and_changes_are_told(
    lab: Jupyter, browser: Chrome, agent: ScriptedAgent, tmp_path: Path
) -> None:
    from selenium.webdriver.common.by import By

    def texts(selector: str) -> list[str]:
        found: list[str] = browser.execute_script(
            "return Array.from(document.querySelectorAll(arguments[0]), node => node.textContent)", selector
        )
        return found

    def wait_for(selector: str, part: str, there: bool = True) -> None:
        deadline = time.monotonic() + 60
        while any(unbroken(part) in text for text in texts(selector)) != there:
            if time.monotonic() > deadline:
                browser.save_screenshot(str(tmp_path / "lab.png"))
                wanted = "no" if there else "still"
                raise AssertionError(f"{wanted} {part!r} in {texts(selector)}; see {tmp_path}/lab.png")
            time.sleep(0.2)

    item, toast = "#jp-bottom-panel .gpushare-item button", ".Toastify__toast"
    script = agent.script
    browser.get(f"{lab.url}lab?token={TOKEN}")
    wait_for(item, "0.25 GPU · active · 3.1 of 16 GiB")

    script.quiet = 10**9
    due = time.time() + 300
    script.step = (Tier.DOWNGRADED, due, 10)
    # by the minute, on 24 hours, as everywhere
    wait_for(
        toast,
        f"Your GPU share will be downgraded to 0.10 GPU at {clock(due, time.time())}: it is idle",
    )
    assert len(texts(toast)) == 1

    script.step, script.tier, script.effective = None, Tier.DOWNGRADED, 10
    wait_for(item, "downgraded to 0.10 GPU")
    wait_for(toast, "Your GPU share was downgraded to 0.10 GPU: it was idle.")
    wait_for(toast, "The next GPU cell restores the share.")  # not cut off
    wait_for(toast, "will be downgraded", there=False)  # what was announced has come
    assert len(texts(toast)) == 1, "the notification was updated"

    later = time.time() + 48 * 3600
    script.step = (Tier.RELEASED, later, 0)
    assert " on " in clock(later, time.time())
    wait_for(toast, f"Your GPU share will be released at {clock(later, time.time())}: it is idle")
    wait_for(toast, "was downgraded", there=False)
    script.step, script.tier, script.effective = None, Tier.RELEASED, 0
    wait_for(toast, "Your GPU share was released: it was idle.")
    assert len(texts(toast)) == 1, "and again"
    close = "document.querySelector('.jp-Notification-Toast-Close').click()"
    browser.execute_script(close)
    wait_for(toast, "released", there=False)

    script.tier, script.effective = Tier.ACTIVE, 25
    wait_for(toast, "Your GPU share is restored: 0.25 GPU.")
    wait_for(toast, "was downgraded", there=False)
    wait_for(item, "0.25 GPU · active")

    button = browser.find_element(By.CSS_SELECTOR, item)
    assert "guaranteed while others work" in present(button.get_attribute("title"))
    browser.execute_script("arguments[0].focus()", button)
    button.send_keys("\n")
    wait_for(".jp-Dialog", "1 other session shares the GPU.")
    browser.execute_script("document.querySelector('.jp-Dialog-button.jp-mod-accept').click()")
    wait_for(".jp-Dialog", "other session", there=False)

    script.borrowed, script.guaranteed = 15, 10
    wait_for(toast, "0.10 GPU of your 0.25 GPU is guaranteed now: others reclaimed the rest.")
    browser.execute_script("window.open = address => { window.opened = address; }")
    offered = browser.find_element(By.XPATH, "//*[contains(@class, 'Toastify__toast')]//button[.='Dashboard']")
    browser.execute_script("arguments[0].click()", offered)
    assert browser.execute_script("return window.opened") == "/services/gpushare/"
    script.borrowed, script.guaranteed = 0, 25
    wait_for(toast, "others reclaimed the rest", there=False)

    script.refused = 1
    wait_for(toast, "Out of GPU memory: 2 GiB more would exceed the 16 GiB that this session may allocate.")
    # by a script, because the notification still moves into the page
    details = browser.find_element(By.XPATH, "//*[contains(@class, 'Toastify__toast')]//button[.='Details']")
    browser.execute_script("arguments[0].click()", details)
    wait_for(".jp-Dialog", "An allocation of 2 GiB failed 1 s ago (CUDA out of memory): this session may allocate")

    messages = [entry["message"] for entry in browser.get_log("browser") if "gpushare" in entry["message"]]  # type: ignore[no-untyped-call]
    # JupyterLab warns of each plugin that takes long to activate, as it does on a busy machine
    errors = [message for message in messages if "to activate" not in message]
    assert errors == []
