"""The beginning of the main job in a real browser: log in, pick 0.25 GPU, see JupyterLab, run cells, see the share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By

from tests.e2e.browser import CHROMEDRIVER, CHROMIUM, MISSING, click, log_in, open_browser, until
from tests.e2e.running_demo import RunningDemo

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.browser,
    pytest.mark.skipif(not (CHROMIUM and CHROMEDRIVER), reason=MISSING),
]


@pytest.fixture(scope="module")
def demo() -> Iterator[RunningDemo]:
    demo = RunningDemo()
    try:
        demo.start()
        yield demo
    finally:
        demo.close()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chrome]:
    browser = open_browser(tmp_path / "profile")
    yield browser
    browser.quit()


def test_a_data_scientist_picks_a_quarter_and_works(browser: Chrome, demo: RunningDemo) -> None:
    log_in(browser, demo.url, "marie", demo.password)
    cards = {card.get_attribute("value"): card for card in browser.find_elements(By.NAME, "profile")}
    assert {"cpu-only", "tenth-gpu", "quarter-gpu", "half-gpu", "whole-gpu"} <= set(cards)
    label = f"label[for='{cards['quarter-gpu'].get_attribute('id')}']"
    quarter = browser.find_element(By.CSS_SELECTOR, label)
    assert "0.25 GPU" in quarter.text
    assert "starts now" in quarter.text.lower()
    click(browser, label)
    assert cards["quarter-gpu"].is_selected()
    click(browser, "form#spawn_form [type=submit]")

    # JupyterLab, with the demo's notebook open and its kernel there
    until(browser, "return document.querySelector('.jp-NotebookPanel .jp-Cell')", 90)
    until(browser, "return /\\/user\\/marie\\/lab/.test(location.pathname)")
    until(browser, "return /0\\.25\\sGPU · active/.test(document.querySelector('#jp-bottom-panel')?.innerText)")

    # run the first two code cells: what the share is, and that CUDA is there
    until(browser, "return /Idle/.test(document.querySelector('.jp-Notebook-ExecutionIndicator')?.title || '') || "
          "/idle/i.test(document.querySelector('#jp-bottom-panel')?.innerText)")  # fmt: skip
    browser.find_element(By.CSS_SELECTOR, ".jp-NotebookPanel .jp-CodeCell .jp-Editor").click()
    for _ in range(3):
        browser.switch_to.active_element.send_keys(Keys.SHIFT, Keys.ENTER)
    until(browser, "return /guaranteed now +0\\.25 GPU/.test(document.querySelector('.jp-OutputArea')?.innerText)")
    until(
        browser, "return /with 16 GiB: CUDA shows the whole GPU/.test(document.querySelector('.jp-Notebook').innerText)"
    )

    # keep the share, and release it: from JupyterLab through agent and service, and back
    browser.execute_script("document.querySelector('.gpushare-Item button').click()")
    for label, answer, line in (
        ("Keep 1 h", "The GPU share is kept for 1 h.", "kept"),
        ("End the keep", "The GPU share is no longer kept.", "active"),
        ("Release now", "The GPU share is released.", "released"),
    ):
        spoken = answer.replace("1 h", "1\u00a0h")
        press = (
            "Array.from(document.querySelectorAll('.gpushare-Dialog button'))"
            ".find(button => button.textContent === arguments[0]).click()"
        )
        browser.execute_script(press, label.replace("1 h", "1\u00a0h"))
        until(browser, f"return document.querySelector('.gpushare-Answer').textContent.startsWith({spoken!r})", 30)
        until(browser, f"return / {line} /.test(document.querySelector('.gpushare-Item').innerText)", 30)


def test_the_form_works_with_the_keyboard_alone(browser: Chrome, demo: RunningDemo) -> None:
    log_in(browser, demo.url, "louis", demo.password)
    first = browser.find_element(By.CSS_SELECTOR, "input[name=profile]:checked")
    browser.execute_script("arguments[0].focus()", first)
    browser.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
    chosen = browser.find_element(By.CSS_SELECTOR, "input[name=profile]:checked")
    assert chosen != first
    browser.execute_script("arguments[0].focus()", chosen)
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    until(browser, "return /\\/(user|spawn-pending)\\//.test(location.pathname)")


def test_the_form_fits_a_phone(tmp_path: Path, demo: RunningDemo) -> None:
    phone = open_browser(tmp_path / "profile", width=390, height=844)
    try:
        # chromium's windows are at least 500 wide; the page is told of the phone's width
        phone.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True},
        )
        log_in(phone, demo.url, "pierre", demo.password)
        assert phone.execute_script("return document.documentElement.scrollWidth") <= 390, "nothing sticks out"
        for card in phone.find_elements(By.CSS_SELECTOR, ".gpushare label"):
            if card.is_displayed():
                assert card.size["height"] >= 24, "big enough for a thumb"
    finally:
        phone.quit()
