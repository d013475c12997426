"""The GPU time of cells: a real agent, a simulated GPU, real kernels, and JupyterLab in a browser."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By

from tests.agent.agent_process import AgentProcess
from tests.agent.conftest import request_for
from tests.e2e.browser import CHROMEDRIVER, CHROMIUM, MISSING, open_browser, until
from tests.e2e.gpu_cells import SETUP
from tests.notebook.jupyter import ROOT, TOKEN, Jupyter, running

pytestmark = [pytest.mark.browser, pytest.mark.skipif(not (CHROMIUM and CHROMEDRIVER), reason=MISSING)]
CELLS = [SETUP, "spin(0.4)", "1 + 1", "buffer = check(cuda.cuMemAlloc(2**28)); add(buffer, 2**26, 1)"]
LINES = "return Array.from(document.querySelectorAll('.jp-Notebook .jp-CodeCell'), cell => " \
        "cell.querySelector('.gpushare-CellCost:not(.lm-mod-hidden)')?.textContent || '')"  # fmt: skip


@dataclass
class Place:
    """A running JupyterLab with a share of a simulated GPU."""

    lab: Jupyter
    work: Path
    environment: dict[str, str]

    def notebook(self, name: str) -> None:
        cells: list[dict[str, Any]] = [
            {
                "cell_type": "code",
                "id": f"c{at}",
                "source": code,
                "metadata": {},
                "outputs": [],
                "execution_count": None,
            }
            for at, code in enumerate(CELLS)
        ]
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        written = {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
        (self.work / name).write_text(json.dumps(written))

    def choose(self, **choices: bool) -> None:
        """Change the extension's settings."""
        request = urllib.request.Request(
            f"{self.lab.url}lab/api/settings/@gpushare/lab:plugin", json.dumps({"raw": json.dumps(choices)}).encode(),
            {"Authorization": f"token {TOKEN}", "Content-Type": "application/json"}, method="PUT",
        )  # fmt: skip
        urllib.request.urlopen(request, timeout=20).close()

    def status(self, *options: str) -> str:
        command = [sys.executable, "-m", "gpushare_spawner.cli", "status", "--cells", *options]
        done = subprocess.run(command, env=os.environ | self.environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    # the path of a socket has at most 107 bytes
    folder = tempfile.TemporaryDirectory(prefix="gpushare-")
    agent = AgentProcess(Path(folder.name), gpus=1)
    await agent.start()
    gpu = (await agent.client.report()).gpus[0].uuid
    opened = await agent.client.open(request_for("ada", gpus=(gpu,), share_units=50))
    await agent.client.confirm("ada", os.getpid())
    environment = {**opened.environment, "LD_LIBRARY_PATH": agent.environment["LD_LIBRARY_PATH"]}
    simgpu = ROOT / "packages/gpushare-simgpu"
    try:
        with running(tmp_path, "jupyterlab", **environment, PYTHONPATH=f"{ROOT}:{simgpu}") as lab:
            yield Place(lab, tmp_path / "work", environment)
    finally:
        agent.end(signal.SIGTERM)
        folder.cleanup()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chrome]:
    driver = open_browser(tmp_path / "profile")
    yield driver
    driver.quit()


@contextmanager
def picture(browser: Chrome, folder: Path) -> Iterator[None]:
    """Take a screenshot in the end."""
    try:
        yield
    finally:
        browser.save_screenshot(str(folder / "page.png"))


def opened(browser: Chrome, place: Place, name: str) -> None:
    browser.get(f"{place.lab.url}lab/tree/{name}?token={TOKEN}&reset")
    until(browser, f"return document.querySelectorAll('.jp-Notebook .jp-CodeCell').length >= {len(CELLS)}", 60)
    until(browser, "return /Idle/.test(document.querySelector('.jp-Notebook-ExecutionIndicator')?.title || '') || "
          "/idle/i.test(document.querySelector('#jp-bottom-panel')?.innerText)", 60)  # fmt: skip


def run_all(browser: Chrome) -> None:
    browser.find_element(By.CSS_SELECTOR, ".jp-Notebook .jp-CodeCell .jp-Editor").click()
    for _ in CELLS:
        browser.switch_to.active_element.send_keys(Keys.SHIFT, Keys.ENTER)
        time.sleep(0.2)


def lines(browser: Chrome, shown: str, within: float = 30) -> list[str]:
    """The line of each cell, once they match; a letter for each cell: G with GPU time, - without a line."""
    deadline = time.monotonic() + within
    while True:
        found: list[str] = browser.execute_script(LINES)[: len(CELLS)]  # the last Shift+Enter added an empty cell
        if "".join("G" if line.startswith("GPU time") else "-" for line in found) == shown:
            return found
        assert time.monotonic() < deadline, f"{found} instead of {shown}"
        time.sleep(0.2)


def seconds_of(line: str) -> float:
    number, unit = re.match(r"GPU time ([\d.]+)\s(ms|s)", line).groups()  # type: ignore[union-attr]
    return float(number) / (1000 if unit == "ms" else 1)


@pytest.mark.timeout(400)
async def test_cells_have_their_gpu_time_in_jupyterlab_in_the_terminal_and_if_wished_in_the_notebook(
    place: Place, browser: Chrome, tmp_path: Path
) -> None:
    with picture(browser, tmp_path):
        place.notebook("a.ipynb")
        opened(browser, place, "a.ipynb")
        run_all(browser)
        spin = lines(browser, "-G-G")[1]
        assert seconds_of(spin) == pytest.approx(0.4, abs=0.1)
        until(browser, "return /256\\sMiB on the GPU/.test(arguments[0])".replace("arguments[0]", LINES[7:] + "[3]"))

        terminal = place.status()
        assert re.search(r"the kernel of a\.ipynb \[2\] took \d+ ms: GPU time \d+ ms", terminal), terminal
        assert re.search(r"\[3\] took \d+ ms: (no GPU work|GPU time below 5 ms)\n", terminal), terminal
        assert re.search(r"^GPU time .*: .* in 4 cells, .* outside of cells\.$", terminal, re.MULTILINE), terminal
        status: dict[str, Any] = json.loads(place.status("--json"))
        listed = sum(cell["gpu_seconds"] for cell in status["cells"])
        assert listed + status["outside_seconds"] == pytest.approx(status["gpu_seconds"], rel=0.01)
        assert seconds_of(spin) == pytest.approx(status["cells"][1]["gpu_seconds"], abs=0.01)

        # the lines are there again after the page was loaded again, and nothing is in the notebook
        opened(browser, place, "a.ipynb")
        lines(browser, "-G-G")
        assert '"gpushare":' not in (place.work / "a.ipynb").read_text()

        place.choose(cellCosts=False, cellCostsInMetadata=True)
        opened(browser, place, "a.ipynb")
        run_all(browser)
        until(browser, "return document.querySelectorAll('.jp-Notebook .jp-InputPrompt')[3].innerText === '[8]:'", 30)
        time.sleep(4)
        lines(browser, "----")
        browser.switch_to.active_element.send_keys(Keys.CONTROL, "s")
        deadline = time.monotonic() + 20
        while '"gpushare":' not in (text := (place.work / "a.ipynb").read_text()):
            assert time.monotonic() < deadline, text
            time.sleep(0.2)
        metadata = [cell["metadata"].get("gpushare", {}) for cell in json.loads(text)["cells"][: len(CELLS)]]
        assert [bool(figures) for figures in metadata] == [False, True, False, True]
        assert metadata[1]["gpu_seconds"] == pytest.approx(0.4, abs=0.1)
        assert not {"line", "cell_id", "pid"} & set(metadata[1])
