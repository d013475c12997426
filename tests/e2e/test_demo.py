"""`gpushare demo`, as `make demo` runs it: what it says, and that nothing of it is left when it ends."""

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

from gpushare_spawner.demo.machine import simulated_state
from tests.e2e.running_demo import RunningDemo
from tests.e2e.visitor import Visitor

pytestmark = pytest.mark.e2e


@pytest.fixture
def demo() -> Iterator[RunningDemo]:
    demo = RunningDemo()
    yield demo
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


def test_any_name_gets_a_share_and_ctrl_c_ends_everything(demo: RunningDemo) -> None:
    demo.start()
    assert "gpushare: sharing two simulated GPUs of 16 GiB (with --simulate)" in demo.said
    assert f"JupyterHub:  {demo.url}\n" in demo.said
    stranger = Visitor(demo.url, "eve", "")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        stranger.log_in()
    start_server(demo, "ada")
    assert (demo.folder / "users" / "ada" / "gpu-sharing.ipynb").is_file()
    running = demo.processes().values()
    for part in (
        "gpushare_spawner.cli agent",
        "jupyterhub -f",
        "configurable-http-proxy",
        "cli service",
        "singleuser",
        "ipykernel",
    ):
        assert any(part in line for line in running), f"{part} should run: {running}"

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
