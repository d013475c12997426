"""The control socket, from a well-behaved client's side and from a bad one's."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.agent import control_socket
from gpushare_spawner.agent.control_socket import CannotListen, ControlSocket
from gpushare_spawner.clients.agent import AgentClient
from gpushare_spawner.model.control import MAX_LINE_BYTES, AgentUnreachable, ControlRefused, NoticeRequest, TierRequest
from gpushare_spawner.model.share import Tier
from tests.agent.conftest import Agent, request_for
from tests.agent.test_hostile_peers import stranger


@pytest.fixture
async def control(agent: Agent) -> AsyncIterator[ControlSocket]:
    control = ControlSocket(agent.path / "control.sock", agent.node.requests.answer)
    await control.start()
    yield control
    await control.close()


async def said(control: ControlSocket, *lines: bytes) -> list[Any]:
    """Send the lines, half-close, and read all answers."""
    reader, writer = await asyncio.open_unix_connection(str(control.path), limit=MAX_LINE_BYTES)
    for line in lines:
        writer.write(line)
    try:
        await writer.drain()
        writer.write_eof()
    except OSError:
        pass  # it had enough of us
    answers = []
    try:
        async for line in reader:
            answers.append(json.loads(line))
    except ConnectionResetError:
        pass  # it ended the connection before it had read everything
    finally:
        writer.close()
    return answers


async def test_a_session_from_open_to_close(control: ControlSocket) -> None:
    client = AgentClient(control.path)
    opened = await client.open(request_for())
    assert opened.environment["GPUSHARE_SOCKET"].startswith(str(control.path.parent))
    await client.confirm("ada", os.getpid())
    await client.send(NoticeRequest(id="ada", tier=Tier.DOWNGRADED, at=10**10, effective_units=10, reason="idle"))
    await client.send(TierRequest(id="ada", tier=Tier.DOWNGRADED, effective_units=10, reason="idle"))
    report = await client.report()
    session = report.session("ada")
    assert session is not None
    assert (session.confirmed, session.tier, session.effective_units) == (True, Tier.DOWNGRADED, 10)
    assert (report.node, [gpu.capacity_units for gpu in report.gpus]) == ("here", [100, 100])
    await client.close("ada")
    await client.close("ada")
    assert (await client.report()).sessions == ()


async def test_what_is_refused_has_a_code_and_a_sentence(control: ControlSocket) -> None:
    client = AgentClient(control.path)
    with pytest.raises(ControlRefused) as refused:
        await client.open(request_for(gpus=("GPU-no",)))
    assert (refused.value.code, "this machine has no GPU GPU-no" in refused.value.message) == ("unknown-gpu", True)
    with pytest.raises(ControlRefused) as refused:
        await client.confirm("ada", os.getpid())
    assert refused.value.code == "unknown-session"


async def test_an_opened_session_is_on_the_disk_when_the_answer_comes(agent: Agent, control: ControlSocket) -> None:
    await AgentClient(control.path).open(request_for())
    assert len(list((agent.path / "records").glob("*.json"))) == 1


async def test_several_requests_on_one_connection_are_answered_in_order(control: ControlSocket) -> None:
    opened, report, wrong, closed = await said(
        control,
        request_for().model_dump_json().encode() + b"\n",
        b'{"op": "report"}\n',
        b'{"op": "confirm", "id": "nobody", "pid": 1}\n',
        b'{"op": "close", "id": "ada"}\n',
    )
    assert "GPUSHARE_SOCKET" in opened["result"]["environment"]
    assert report["result"]["sessions"][0]["id"] == "ada"
    assert wrong["error"]["code"] == "unknown-session"
    assert closed == {"version": 1, "error": None, "result": {}}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"\n", "Invalid JSON"),
        (b"\xff\xfe\x00garbage\n", "Invalid JSON"),
        (b"[]\n", "request"),
        (b"null\n", "request"),
        (b'{"op": "reboot"}\n', "reboot"),
        (b'{"op": "report", "version": 2}\n', "version"),
        (b'{"op": "report", "extra": 1}\n', "extra"),
        (b'{"op": "close"}\n', "id"),
        (b'{"op": "close", "id": "../../etc/passwd"}\n', "id"),
        (b'{"op": "tier", "id": "a", "tier": "stopped", "effective_units": 0, "reason": ""}\n', "tier"),
        (b'{"op": "confirm", "id": "a", "pid": -5}\n', "pid"),
        (b"[" * 100_000 + b"\n", "Invalid JSON"),
    ],
)
async def test_a_line_that_makes_no_sense_is_answered_and_the_next_one_counts(
    control: ControlSocket, line: bytes, words: str
) -> None:
    wrong, right = await said(control, line, b'{"op": "report"}\n')
    assert wrong["error"]["code"] == "bad-request"
    assert words in wrong["error"]["message"]
    assert right["result"]["node"] == "here"


async def test_a_line_without_an_end(control: ControlSocket) -> None:
    chunk = b"x" * 1024 * 1024
    answers = await said(control, *[chunk] * 17)
    assert [answer["error"]["code"] for answer in answers] in ([], ["bad-request"])
    assert (await AgentClient(control.path).report()).node == "here"


async def test_half_a_line_and_gone(control: ControlSocket) -> None:
    answers = await said(control, b'{"op": "rep')
    assert [answer["error"]["code"] for answer in answers] == ["bad-request"]
    assert (await AgentClient(control.path).report()).node == "here"


async def test_too_many_connections_are_answered_overloaded(
    control: ControlSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_socket, "MAX_CONNECTIONS", 2)
    held = [await asyncio.open_unix_connection(str(control.path)) for _ in range(2)]
    [answer] = await said(control, b'{"op": "report"}\n')
    assert answer["error"]["code"] == "overloaded"
    with pytest.raises(AgentUnreachable, match="overloaded: the agent has 2 connections"):
        await AgentClient(control.path, timeout=0.5).report()
    waits = asyncio.create_task(AgentClient(control.path).report())
    await asyncio.sleep(0.1)
    for _, writer in held:
        writer.close()
        await writer.wait_closed()
    assert (await waits).node == "here"


async def test_three_hundred_requests_at_once_are_all_answered(control: ControlSocket) -> None:
    """At most 64 are worked on, the others wait; none is reset."""
    client = AgentClient(control.path, timeout=30.0)
    reports = await asyncio.gather(*(client.report() for _ in range(300)))
    assert {report.node for report in reports} == {"here"}


async def test_more_than_the_kernel_keeps_are_answered(short_folder: Path) -> None:
    """While the agent is at something else connections wait in the kernel's queue, those beyond it with the client."""
    path = short_folder / "control.sock"

    def serve() -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(1)
        listening.set()
        time.sleep(0.3)
        for _ in range(10):
            connection, _address = listener.accept()
            with connection, connection.makefile("rb") as lines:
                lines.readline()
                connection.sendall(b'{"version": 1, "result": {}}\n')
        listener.close()

    listening = threading.Event()
    server = asyncio.create_task(asyncio.to_thread(serve))
    await asyncio.to_thread(listening.wait)
    await asyncio.gather(*(AgentClient(path).close("ada") for _ in range(10)))
    await server


async def test_requests_are_handled_a_few_at_a_time(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_socket, "MAX_AT_ONCE", 3)
    now = most = 0

    async def slow(_: object) -> dict[str, Any]:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return {}

    control = ControlSocket(short_folder / "other.sock", slow)
    await control.start()
    await asyncio.gather(*(AgentClient(control.path).close("ada") for _ in range(20)))
    await control.close()
    assert most == 3


async def test_a_failure_inside_is_an_answer_too(agent: Agent, short_folder: Path) -> None:
    async def fails(_: object) -> dict[str, Any]:
        raise RuntimeError("the unforeseen")

    control = ControlSocket(short_folder / "other.sock", fails)
    await control.start()
    try:
        with pytest.raises(ControlRefused, match="report failed: the unforeseen") as refused:
            await AgentClient(control.path).report()
        assert refused.value.code == "internal"
    finally:
        await control.close()


async def test_only_its_owner_may_use_it(control: ControlSocket) -> None:
    assert control.path.stat().st_mode & 0o777 == 0o600
    if os.getuid() == 0:
        control.path.parent.chmod(0o711)
        assert await asyncio.to_thread(stranger, str(control.path), "stream") == "denied"
        control.path.chmod(0o666)  # even if somebody opened it
        assert await asyncio.to_thread(stranger, str(control.path), "stream") == ""


async def test_a_socket_that_was_left_behind_is_replaced_and_a_live_one_is_not(short_folder: Path) -> None:
    async def nothing(_: object) -> dict[str, Any]:
        return {}

    path = short_folder / "control.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    first = ControlSocket(path, nothing)
    await first.start()
    with pytest.raises(CannotListen, match="another agent answers"):
        await ControlSocket(path, nothing).start()
    await first.close()
    assert not path.exists()
    path.write_text("somebody's file")
    with pytest.raises(CannotListen, match="the path is in use"):
        await ControlSocket(path, nothing).start()
    assert path.read_text() == "somebody's file"
