"""Debian's chromium, driven by selenium."""

from __future__ import annotations

import shutil
from pathlib import Path

from selenium import webdriver

CHROMIUM = shutil.which("chromium")
CHROMEDRIVER = shutil.which("chromedriver")
MISSING = "chromium and chromedriver are not installed (Debian: apt-get install chromium chromium-driver)"


def open_browser(profile: Path, width: int = 1280, height: int = 900) -> webdriver.Chrome:
    """A browser without a window, and with a profile of its own. Raises selenium's WebDriverException."""
    assert CHROMIUM is not None, MISSING
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",  # chromium's own sandbox does not work as root or in most containers
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-quic",
        "--no-first-run",
        "--no-proxy-server",
        f"--user-data-dir={profile}",
        f"--window-size={width},{height}",
    ):
        options.add_argument(argument)
    browser = webdriver.Chrome(options, webdriver.ChromeService(CHROMEDRIVER))
    browser.set_page_load_timeout(60)
    return browser
