"""The client, where no agent answers or nonsense comes back."""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from gpushare_spawner.clients.agent import AgentClient, default_control_socket
from gpushare_spawner.model.control import AgentUnreachable, ControlRefused

Serve = Callable[[bytes | None], Awaitable[AgentClient]]


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="gs"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def serve(folder: Path) -> AsyncIterator[Serve]:
    """An agent that answers everything with the same bytes; None: never."""
    servers = []

    async def start(answer: bytes | None) -> AgentClient:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            if answer is None:
                await asyncio.sleep(1)
            else:
                writer.write(answer)
            writer.close()

        servers.append(await asyncio.start_unix_server(connected, folder / "control.sock"))
        return AgentClient(folder / "control.sock", timeout=0.2)

    yield start
    for server in servers:
        server.close()


async def test_no_agent(folder: Path) -> None:
    with pytest.raises(AgentUnreachable, match="no agent runs here"):
        await AgentClient(folder / "none.sock").report()
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(folder / "left.sock"))
    left.close()
    with pytest.raises(AgentUnreachable, match="no agent listens"):
        await AgentClient(folder / "left.sock").report()
    with pytest.raises(AgentUnreachable, match="cannot be asked"):
        await AgentClient(folder / ("x" * 200)).report()


async def test_an_agent_that_hangs(serve: Serve) -> None:
    client = await serve(None)
    with pytest.raises(AgentUnreachable, match=r"did not answer within 0\.2 s"):
        await client.close("ada")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "without an answer"),
        (b"hello\n", "cannot be read"),
        (b'{"version": 2, "result": {}}\n', "cannot be read"),
        (b'{"version": 1, "result": {"node": ""}}\n', "a report that cannot be read"),
        (b'{"version": 1, "result": {"node": "a"', "cannot be read"),
    ],
)
async def test_answers_that_make_no_sense(serve: Serve, answer: bytes, words: str) -> None:
    client = await serve(answer)
    with pytest.raises(AgentUnreachable, match=words):
        await client.report()


async def test_a_refusal(serve: Serve) -> None:
    client = await serve(b'{"version": 1, "error": {"code": "busy", "message": "it works"}, "result": {}}\n')
    with pytest.raises(ControlRefused, match="it works") as refused:
        await client.confirm("ada", 1)
    assert refused.value.code == "busy"


def test_where_the_agent_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUSHARE_CONTROL", raising=False)
    assert default_control_socket() == Path("/run/gpushare/control.sock")
    monkeypatch.setenv("GPUSHARE_CONTROL", "/tmp/elsewhere.sock")
    assert default_control_socket() == Path("/tmp/elsewhere.sock")
