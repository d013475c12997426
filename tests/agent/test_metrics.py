"""Prometheus metrics over HTTP: names for those who know the token, and bounds for everybody."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpushare_spawner.agent import metrics
from gpushare_spawner.agent.metrics import serve_metrics
from tests.agent.conftest import Agent
from tests.agent.peers import FIRST


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("secret\n")
    return path


@pytest.fixture
async def served(agent: Agent, port: int, token: Path) -> Iterator[int]:  # type: ignore[misc]
    stop = serve_metrics(port, agent.node.report, token_file=token)
    yield port
    stop()


async def scrape(port: int, authorization: str | None = None, path: str = "/metrics") -> tuple[int, str]:
    """Status and text."""
    headers = {"Authorization": authorization} if authorization is not None else {}

    def ask() -> tuple[int, str]:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await asyncio.to_thread(ask)


async def test_metrics_follow_the_report(agent: Agent, served: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MADE_EVERY", 0.0)
    agent.open("ada")
    _, text = await scrape(served, "Bearer secret")
    gpu = f'{{gpu="{FIRST.index}",model="{FIRST.model}",uuid="{FIRST.uuid}"}}'
    assert f"gpushare_gpu_capacity_units{gpu} 100.0" in text
    assert f"gpushare_gpu_healthy{gpu} 1.0" in text
    assert 'gpushare_session_guaranteed_units{session="ada",template="quarter-gpu",user="ada"} 25.0' in text
    agent.node.registry.end("ada", "closed")
    assert "ada" not in (await scrape(served, "Bearer secret"))[1]


async def test_without_the_token_nobody_is_named(agent: Agent, served: int) -> None:
    agent.open("ada")
    status, text = await scrape(served)
    assert status == 200
    assert f'gpushare_gpu_sessions{{gpu="{FIRST.index}",model="{FIRST.model}",uuid="{FIRST.uuid}"}} 1.0' in text
    assert "ada" not in text
    assert "quarter-gpu" not in text


@pytest.mark.parametrize("said", ["Bearer wrong", "secret", "Basic c2VjcmV0", "Bearer ", "Bearer \xe4"])
async def test_wrong_token_is_refused(served: int, said: str) -> None:
    status, text = await scrape(served, said)
    assert status == 401
    assert "gpushare" not in text


async def test_token_is_read_again_when_it_changes(agent: Agent, served: int, token: Path) -> None:
    agent.open("ada")
    token.write_text("other")
    assert (await scrape(served, "Bearer secret"))[0] == 401
    assert "ada" in (await scrape(served, "Bearer other"))[1]
    token.unlink()
    assert (await scrape(served, "Bearer other"))[0] == 401


async def test_without_a_token_file_no_token_is_right(agent: Agent, port: int) -> None:
    stop = serve_metrics(port, agent.node.report)
    assert (await scrape(port, "Bearer None"))[0] == 401
    assert (await scrape(port))[0] == 200
    stop()


async def test_token_file_without_a_token_is_an_error(agent: Agent, port: int, token: Path) -> None:
    token.write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        serve_metrics(port, agent.node.report, token_file=token)
    with pytest.raises(FileNotFoundError):
        serve_metrics(port, agent.node.report, token_file=token.parent / "none")


async def test_connections_that_say_nothing_are_bounded_and_closed(
    served: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def connect() -> list[socket.socket]:
        return [socket.create_connection(("127.0.0.1", served)) for _ in range(metrics.MAX_CONNECTIONS + 10)]

    idle = await asyncio.to_thread(connect)
    for one in idle:
        one.setblocking(False)
    await asyncio.sleep(0.3)
    closed = 0
    for one in idle:
        with contextlib.suppress(BlockingIOError):
            closed += one.recv(100) == b""
    assert closed >= 1
    for one in idle:
        one.close()
    await asyncio.sleep(0.1)
    assert (await scrape(served))[0] == 200
    assert len(caplog.text) < 1000


@pytest.mark.parametrize(
    "data",
    [
        b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 100_000,
        b"\x16\x03\x01" * 1000 + b"\r\n\r\n",
        b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n",
    ],
)
async def test_large_or_senseless_requests_are_refused(
    served: int, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reader, writer = await asyncio.open_connection("127.0.0.1", served)
    writer.write(data)
    try:
        said = await asyncio.wait_for(reader.read(1000), 3)
        assert not said.startswith(b"HTTP/1.1 200")
    except ConnectionResetError:
        pass
    writer.close()
    assert (await scrape(served))[0] == 200
    assert len(caplog.text) < 2000


async def test_report_is_made_once_a_second_however_often_it_is_asked_for(
    agent: Agent, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0

    def report() -> object:
        nonlocal made
        made += 1
        return agent.node.report()

    stop = serve_metrics(port, report)  # type: ignore[arg-type]
    begun = time.monotonic()
    for _ in range(10):
        assert (await scrape(port))[0] == 200
    assert made <= 1 + (time.monotonic() - begun) / metrics.MADE_EVERY
    stop()
