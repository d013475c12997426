"""Debian's chromium, driven by selenium."""

from __future__ import annotations

import shutil
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

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


def until(browser: webdriver.Chrome, so: str, seconds: float = 60.0) -> None:
    """Wait until a piece of JavaScript returns something true. Raises selenium's TimeoutException, with what it was."""
    WebDriverWait(browser, seconds, poll_frequency=0.2).until(lambda _: browser.execute_script(so), so)


def click(browser: webdriver.Chrome, selector: str) -> None:
    """Click what the CSS selector finds, after scrolling there at once."""
    element = browser.find_element(By.CSS_SELECTOR, selector)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
    element.click()


def log_in(browser: webdriver.Chrome, url: str, name: str, password: str) -> None:
    """Log in with the name and the password, as far as the form."""
    browser.get(url)
    browser.find_element(By.NAME, "username").send_keys(name)
    browser.find_element(By.NAME, "password").send_keys(password)
    click(browser, "#login_submit")
    until(browser, "return document.querySelector('input[name=profile]')")
