"""Which connections make room for new ones, and which do not."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from tornado.httpclient import AsyncHTTPClient
from tornado.testing import bind_unused_port
from tornado.web import Application, RequestHandler

from gpushare_spawner.http_server import BoundedHTTPServer

MOST = 4
ANSWER_BYTES = 20_000_000
"""More than the kernel keeps for a peer that reads nothing."""


@dataclass
class Served:
    """A server with a page that answers at once, one that answers on command, and one with a long answer."""

    port: int
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    begun: int = 0
    peers: list[asyncio.StreamWriter] = field(default_factory=list)
    """Kept: a connection that nobody knows any more is closed."""

    async def connect(self, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect(("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=peer, limit=1024)
        writer.write(sent)
        self.peers.append(writer)
        return reader, writer

    async def ask(self) -> int:
        answer = await AsyncHTTPClient(force_instance=True).fetch(
            f"http://127.0.0.1:{self.port}/", request_timeout=2, raise_error=False
        )
        return answer.code


class Short(RequestHandler):
    def get(self) -> None:
        self.finish("x")


class Late(RequestHandler):
    async def get(self) -> None:
        served: Served = self.settings["served"]
        served.begun += 1
        await served.go_on.wait()
        self.finish("late")


class Long(RequestHandler):
    def get(self) -> None:
        served: Served = self.settings["served"]
        served.begun += 1
        self.finish(b"x" * ANSWER_BYTES)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    listener, port = bind_unused_port()
    served = Served(port)
    log = logging.getLogger("test")
    server = BoundedHTTPServer(
        Application([("/", Short), ("/late", Late), ("/long", Long)], served=served, log_function=lambda page: None),
        most_connections=MOST,
        title="the test",
        log=log,
    )
    server.add_sockets([listener])
    yield served
    server.close()


def request(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1"])
async def test_the_oldest_without_a_complete_request_makes_room(
    served: Served, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    peers = [await served.connect(sent) for _ in range(MOST)]
    for _ in range(3):
        assert await served.ask() == 200
    async with asyncio.timeout(2):
        for reader, _ in peers[:1]:
            assert await reader.read() == b""
    assert [record.getMessage() for record in caplog.records] == [
        f"Too many connections to the test: closing the oldest without a complete request: {MOST} are open"
    ]


async def test_a_request_that_is_dealt_with_makes_no_room(served: Served) -> None:
    busy = [await served.connect(request("/late")) for _ in range(MOST - 1)]
    await served.connect(b"")
    while served.begun < MOST - 1:
        await asyncio.sleep(0.01)
    for _ in range(10):
        assert await served.ask() == 200
    served.go_on.set()
    for reader, _ in busy:
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"


async def test_a_peer_that_does_not_take_its_answer_makes_room(served: Served) -> None:
    for _ in range(MOST):
        await served.connect(request("/long"))
    while served.begun < MOST:
        await asyncio.sleep(0.01)
    for _ in range(3):
        assert await served.ask() == 200


async def test_where_all_are_dealt_with_a_further_one_is_closed(served: Served) -> None:
    for _ in range(MOST):
        await served.connect(request("/late"))
    while served.begun < MOST:
        await asyncio.sleep(0.01)
    reader, _ = await served.connect(request("/"))
    async with asyncio.timeout(2):
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            assert await reader.readexactly(1)
    served.go_on.set()


async def test_a_connection_serves_more_than_one_request_and_then_makes_room(served: Served) -> None:
    reader, writer = await served.connect(request("/"))
    assert b" 200 " in await reader.readuntil(b"\r\n\r\nx")
    writer.write(request("/"))
    assert b" 200 " in await reader.readuntil(b"\r\n\r\nx")
    for _ in range(MOST):
        assert await served.ask() == 200
    for _ in range(MOST):
        await served.connect(b"")
    async with asyncio.timeout(2):
        assert await reader.read() == b""
