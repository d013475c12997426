"""The probe of the agent's pod."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpushare_spawner.agent import probe

from .agent_process import AgentProcess


async def asked(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", probe.__name__, str(path)]
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=30)


async def test_an_agent_is_alive_while_all_connections_for_metrics_are_taken_and_not_after_its_end(
    short_folder: Path,
) -> None:
    agent = AgentProcess(short_folder, gpus=1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    await agent.start("--metrics-port", str(port))
    taken = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    try:
        done = await asked(agent.client.socket)
        assert (done.returncode, done.stderr) == (0, "")
    finally:
        for connection in taken:
            connection.close()
        agent.end(signal.SIGKILL)
    done = await asked(agent.client.socket)
    assert done.returncode == 1
    assert "does not answer" in done.stderr


def test_an_agent_that_hangs_is_not_alive(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "ANSWER_WITHIN", 0.1)
    path = short_folder / "control.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(1)
        began = time.monotonic()
        assert probe.main([str(path)]) == 1
        assert time.monotonic() - began < 5
    assert "does not answer" in capsys.readouterr().err


def test_without_a_path_the_probe_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert probe.main([]) == 2
    assert "usage" in capsys.readouterr().err
