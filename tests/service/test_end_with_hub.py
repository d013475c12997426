"""A hub that is killed leaves no service behind that would keep the next hub's from its port."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

STARTER = """
import os, signal, subprocess, sys, time
options = [option.replace("HUB", str(os.getpid())) for option in sys.argv[1:]]
print(subprocess.Popen([sys.executable, "-m", "gpushare_spawner.cli", "service", *options]).pid, flush=True)
time.sleep(100)
"""


def start(tmp_path: Path, *more: str) -> tuple[subprocess.Popen[str], int]:
    """A process that plays the hub and starts the service; it, and the service's pid."""
    environment = {**os.environ, "JUPYTERHUB_API_URL": "http://127.0.0.1:9/hub/api", "JUPYTERHUB_API_TOKEN": "x"}
    environment.pop("JUPYTERHUB_SERVICE_URL", None)
    options = [f"--templates-dir={tmp_path}", f"--control-socket={tmp_path}/none.sock", *more]
    command = [sys.executable, "-c", STARTER, *options]
    with (tmp_path / "service.log").open("w") as log:
        hub = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, cwd=tmp_path)
    assert hub.stdout is not None
    return hub, int(hub.stdout.readline())


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def loaded(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def running(tmp_path: Path) -> bool:
    return "Idle culler and dashboard" in (tmp_path / "service.log").read_text()


def test_it_ends_when_the_hub_that_started_it_was_killed(tmp_path: Path) -> None:
    hub, service = start(tmp_path, "--end-with-hub")
    assert wait_for(lambda: running(tmp_path)), (tmp_path / "service.log").read_text()
    hub.send_signal(signal.SIGKILL)
    hub.wait()
    assert wait_for(lambda: not alive(service))


@pytest.mark.parametrize("stage", ["", "python", "_ctypes", "pydantic_core", "_sqlite3"])
def test_it_ends_when_the_hub_is_killed_while_it_starts(tmp_path: Path, stage: str) -> None:
    """``stage``: a library that the process has loaded; empty: none, not even Python."""
    hub, service = start(tmp_path, "--end-with-hub=HUB")
    try:
        assert wait_for(lambda: stage in loaded(service))
        hub.kill()
        hub.wait()
        assert wait_for(lambda: not alive(service)), (tmp_path / "service.log").read_text()
    finally:
        if alive(service):
            os.kill(service, signal.SIGKILL)


def test_a_hub_that_had_ended_before_the_first_line_is_known_by_its_process_id(tmp_path: Path) -> None:
    hub, service = start(tmp_path, "--end-with-hub=1073741824")  # no process can have this id
    try:
        assert wait_for(lambda: not alive(service))
        assert "hub that started this service has ended" in (tmp_path / "service.log").read_text()
    finally:
        hub.kill()
        hub.wait()


def test_without_the_option_it_goes_on(tmp_path: Path) -> None:
    hub, service = start(tmp_path)
    try:
        assert wait_for(lambda: running(tmp_path)), (tmp_path / "service.log").read_text()
        hub.kill()
        hub.wait()
        time.sleep(2)  # more than the second between two checks
        assert alive(service)
    finally:
        os.kill(service, signal.SIGTERM)
        assert wait_for(lambda: not alive(service))
