"""`gpushare demo`, as `make demo` runs it: a user's way in a browser, and that nothing of it is left when it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By

from gpushare_spawner.demo.machine import simulated_state
from tests.e2e.browser import CHROMEDRIVER, CHROMIUM, MISSING, click, log_in, open_browser, until
from tests.e2e.running_demo import RunningDemo
from tests.e2e.visitor import Visitor

pytestmark = pytest.mark.e2e


@pytest.fixture
def demo() -> Iterator[RunningDemo]:
    demo = RunningDemo()
    yield demo
    demo.close()


@pytest.fixture(scope="module")
def running() -> Iterator[RunningDemo]:
    """Started once, and ended by the last test that uses it."""
    demo = RunningDemo()
    try:
        demo.start()
        yield demo
    finally:
        demo.close()


def start_server(demo: RunningDemo, name: str) -> None:
    visitor = Visitor(demo.url, name, demo.password)
    visitor.log_in()
    visitor.start_server("quarter-gpu")
    visitor.start_kernel()


def gone(demo: RunningDemo, within: float = 10.0) -> dict[int, str]:
    """What is left of its processes after a while."""
    deadline = time.monotonic() + within
    while demo.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    return demo.processes()


@pytest.mark.browser
@pytest.mark.skipif(not (CHROMIUM and CHROMEDRIVER), reason=MISSING)
def test_a_data_scientist_picks_a_quarter_and_works(running: RunningDemo, tmp_path: Path) -> None:
    """Log in, pick 0.25 GPU, see JupyterLab, run cells, see the share, keep it and release it."""
    browser = open_browser(tmp_path / "profile")
    try:
        works_in_the_browser(browser, running)
    finally:
        browser.quit()


def works_in_the_browser(browser: Chrome, demo: RunningDemo) -> None:
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


def test_any_name_gets_a_share_and_ctrl_c_ends_everything(running: RunningDemo) -> None:
    demo = running
    assert "gpushare: sharing two simulated GPUs of 16 GiB (with --simulate)" in demo.said
    assert f"JupyterHub:  {demo.url}\n" in demo.said
    stranger = Visitor(demo.url, "eve", "")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        stranger.log_in()
    if not any("singleuser" in line for line in demo.processes().values()):
        start_server(demo, "ada")  # there was no browser to start one
    assert list(demo.folder.glob("users/*/gpu-sharing.ipynb"))
    lines = demo.processes().values()
    for part in (
        "gpushare_spawner.cli agent",
        "jupyterhub -f",
        "configurable-http-proxy",
        "cli service",
        "singleuser",
        "ipykernel",
    ):
        assert any(part in line for line in lines), f"{part} should run: {lines}"

    second = subprocess.run(demo.command(), capture_output=True, text=True, timeout=30)
    assert second.returncode == 1
    assert second.stderr.startswith(f"gpushare: a demo is already running at {demo.url} (process ")
    assert second.stderr.count("\n") == 1

    demo.type(b"\x03")
    assert demo.wait(40) == 0
    assert gone(demo) == {}
    assert "stopping notebook servers, hub and agent" in demo.said
    assert "the demo has ended; its files stay in" in demo.said
    assert "Traceback" not in demo.said
    assert not simulated_state(demo.folder).exists()


@pytest.mark.slow
def test_a_closed_terminal_ends_everything(demo: RunningDemo) -> None:
    demo.start()
    start_server(demo, "grace")
    demo.close_terminal()
    demo.wait(40)
    assert gone(demo) == {}


@pytest.mark.slow
def test_a_demo_that_is_killed_leaves_nothing_behind(demo: RunningDemo) -> None:
    demo.start()
    start_server(demo, "joan")
    (pid,) = (pid for pid, line in demo.processes().items() if "cli demo" in line and not line.startswith("setsid"))
    os.kill(pid, signal.SIGKILL)
    assert gone(demo, within=40) == {}
    # and the next one starts as if nothing had happened
    lock = demo.folder / "lock"
    assert lock.exists()


def test_an_occupied_port_is_named_with_the_way_out(demo: RunningDemo) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = subprocess.run(demo.command("--port", str(port)), capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    taken = f"gpushare: port {port} of 127.0.0.1 is in use by another program."
    proposed = re.fullmatch(re.escape(taken) + r" Choose another port: make demo PORT=(\d+)\n", done.stderr)
    assert proposed is not None, done.stderr
    assert int(proposed[1]) > port


def test_a_folder_that_cannot_be_written_is_named(demo: RunningDemo, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = subprocess.run(demo.command("--dir", str(tmp_path / "file")), capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr.startswith("gpushare: the demo cannot write its state: ")
    assert "Traceback" not in done.stderr


def test_sigterm_while_it_starts_is_enough(demo: RunningDemo) -> None:
    process = subprocess.Popen(demo.command(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "starting agent" in line:
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(40) == 0
    process.stdout.close()
    assert gone(demo) == {}
