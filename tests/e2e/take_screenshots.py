"""Takes pictures of docs/images from a running demo: ``.venv/bin/python -m tests.e2e.take_screenshots [FOLDER]``.

Needs chromium and chromedriver. With a folder, each page is also taken in both colour schemes and at a phone's width,
to check it; those pictures go only there. The dashboard's pictures in docs/images: tests/service/dashboard_pictures.py.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By

from tests.e2e.browser import click, log_in, open_browser, until
from tests.e2e.running_demo import RunningDemo
from tests.e2e.visitor import Visitor

IMAGES = Path(__file__).resolve().parent.parent.parent / "docs" / "images"
BOTTOM = "#jp-bottom-panel"
WINDOW = (860, 720)


def submit(browser: Chrome, profile: str) -> None:
    """Choose a template on the form and start."""
    chosen = browser.find_element(By.CSS_SELECTOR, f"input[name=profile][value={profile}]")
    browser.execute_script("arguments[0].click()", chosen)
    click(browser, "form#spawn_form [type=submit]")


def start_without_a_browser(demo: RunningDemo, **profiles: str) -> None:
    """Start the servers of these users, each with its template."""
    for name, profile in profiles.items():
        other = Visitor(demo.url, name, demo.password)
        other.log_in()
        other.start_server(profile)


def start(browser: Chrome, profile: str) -> None:
    """From the form to JupyterLab with the demo's notebook."""
    submit(browser, profile)
    until(browser, "return document.querySelector('.jp-NotebookPanel .jp-Cell')", 90)
    until(browser, f"return /GPU ·/.test(document.querySelector('{BOTTOM}')?.innerText)")
    time.sleep(3)
    # the file browser takes the place of the notebook in so small a window
    browser.find_element(By.TAG_NAME, "body").send_keys(Keys.CONTROL, "b")


def run_cells(browser: Chrome, count: int) -> None:
    """Run so many cells from the first one with code on; the last of them may still be at work."""
    click(browser, ".jp-NotebookPanel .jp-CodeCell .jp-Editor")
    for _ in range(count):
        browser.switch_to.active_element.send_keys(Keys.SHIFT, Keys.ENTER)
        time.sleep(0.5)


def shoot(browser: Chrome, path: Path, width: int, height: int | None, dark: bool, scale: float = 1) -> None:
    """One picture of what the browser shows; without a height, of the whole page."""
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    metrics = {"width": width, "height": height or 400, "deviceScaleFactor": scale, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    time.sleep(1)
    if height is None:
        metrics["height"] = browser.execute_script("return document.body.scrollHeight")
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        time.sleep(0.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    browser.save_screenshot(str(path))
    print(path)


def shoot_the_dialog(browser: Chrome, path: Path) -> None:
    """JupyterLab with the dialog of the share, its reasons for slowness open."""
    browser.execute_script("document.querySelector('.gpushare-Item button').click()")
    until(browser, "return document.querySelector('.gpushare-Dialog tr')")
    browser.execute_script("document.querySelector('.gpushare-Dialog details').open = true")
    shoot(browser, path, 1000, 900, dark=False)
    browser.execute_script("document.querySelector('.jp-Dialog .jp-mod-accept').click()")


def all_variants(browser: Chrome, folder: Path | None, name: str) -> None:
    """The page in both colour schemes, wide and narrow, to check it."""
    if folder is None:
        return
    for dark in (False, True):
        for width in (1280, 390):
            scheme = "dark" if dark else "light"
            shoot(browser, folder / f"{name}-{scheme}-{width}.png", width, None, dark)


def side_by_side(browser: Chrome, left: Path, right: Path, into: Path) -> None:
    """Two pictures next to each other, as one."""
    style = "body{margin:0;display:flex;gap:8px;background:#888} img{width:calc(50% - 4px)}"
    page = into.with_suffix(".html")
    page.write_text(f"<style>{style}</style><img src='{left.as_uri()}'><img src='{right.as_uri()}'>")
    browser.get(page.as_uri())
    shoot(browser, into, 2 * WINDOW[0] + 8, WINDOW[1], dark=False)
    page.unlink()


def take(demo: RunningDemo, folder: Path | None, scratch: Path) -> None:
    """All pictures: bob is idle and released, ada works, others start, dave on lent units, frank waits."""
    ada, bob, admin, frank = (open_browser(scratch / name, *WINDOW) for name in ("ada", "bob", "admin", "frank"))
    try:
        log_in(bob, demo.url, "bob", demo.password)
        start(bob, "quarter-gpu")
        run_cells(bob, 9)  # a minute of work, then idle
        log_in(ada, demo.url, "ada", demo.password)
        all_variants(ada, folder, "form")
        shoot(ada, IMAGES / "form.png", 1000, 800, dark=False)
        start(ada, "quarter-gpu")
        until(bob, f"return /downgraded/.test(document.querySelector('{BOTTOM}').innerText)", 180)
        until(bob, f"return /released/.test(document.querySelector('{BOTTOM}').innerText)", 120)
        run_cells(ada, 7)
        shoot_the_dialog(ada, IMAGES / "share-dialog.png")
        start_without_a_browser(demo, carol="half-gpu", eve="whole-gpu")
        log_in(frank, demo.url, "frank", demo.password)
        all_variants(frank, folder, "form-lent")
        start_without_a_browser(demo, dave="quarter-gpu")
        submit(frank, "whole-gpu")
        until(frank, "return /waiting/.test(document.querySelector('#gpushare-heading')?.innerText)")
        all_variants(frank, folder, "waiting")
        log_in(admin, demo.url, "admin", demo.password)
        admin.get(f"{demo.url}/services/gpushare/")
        until(admin, "return /frank/.test(document.body.innerText)")
        for name, browser in (("ada", ada), ("bob", bob)):
            shoot(browser, scratch / f"{name}.png", *WINDOW, dark=False)
        all_variants(admin, folder, "dashboard")
        side_by_side(admin, scratch / "ada.png", scratch / "bob.png", IMAGES / "shared-gpu.png")
    finally:
        for browser in (ada, bob, admin, frank):
            browser.quit()


def main() -> int:
    """The command."""
    demo = RunningDemo()
    try:
        demo.start()
        with tempfile.TemporaryDirectory() as scratch:
            take(demo, Path(sys.argv[1]) if len(sys.argv) > 1 else None, Path(scratch))
    finally:
        demo.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
