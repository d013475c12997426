"""The events of cells, from real kernels of a real Jupyter server to the agent."""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_server.gateway.managers import GatewayKernelManager
from jupyter_server.services.kernels.connection.base import serialize_msg_to_ws_v1
from tornado.httpclient import HTTPRequest
from tornado.websocket import WebSocketClientConnection, websocket_connect

from gpushare_spawner.cli import main
from gpushare_spawner.model.frames import CellEvent, Feature, Kind
from gpushare_spawner.model.share_status import CellsStatus, CellStatus
from gpushare_spawner.notebook.extension import CellWatch
from gpushare_spawner.notebook.session_client import Execution, SessionClient, number_of
from tests.notebook.jupyter import TOKEN, Jupyter, running
from tests.notebook.scripted_agent import Script, ScriptedAgent
from tests.notebook.test_session_client import running as running_client
from tests.notebook.test_session_client import until

V1 = "v1.kernel.websocket.jupyter.org"


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedAgent]:
    script = Script(features=Feature.CELLS)
    with ScriptedAgent(tmp_path_factory.mktemp("agent") / "s.sock", script) as agent:
        yield agent


@pytest.fixture(scope="module")
def server(agent: ScriptedAgent, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jupyter]:
    with running(tmp_path_factory.mktemp("jupyter"), GPUSHARE_SOCKET=str(agent.path)) as jupyter:
        agent.wait_for(Kind.KERNELS)
        yield jupyter


@pytest.fixture(scope="module")
def kernel(server: Jupyter) -> str:
    code, body = server.post("api/kernels", {"name": "python3"})
    assert code == 201
    return str(body["id"])


async def connected(server: Jupyter, kernel: str, v1: bool = True) -> WebSocketClientConnection:
    url = f"{server.url.replace('http', 'ws', 1)}api/kernels/{kernel}/channels"
    request = HTTPRequest(url, headers={"Authorization": f"token {TOKEN}"})
    return await websocket_connect(request, subprotocols=[V1] if v1 else None)


async def execute(socket: WebSocketClientConnection, code: str, v1: bool = True, **content: Any) -> str:
    """Send an execute_request as JupyterLab does; its message ID."""
    message_id = uuid.uuid4().hex
    header = {"msg_id": message_id, "msg_type": "execute_request", "username": "", "session": "s", "version": "5.3"}
    parts = {
        "header": {**header, "date": "2026-01-01T00:00:00Z"},
        "parent_header": {},
        "metadata": {"cellId": f"cell of {code}"},
        "content": {"code": code, "silent": False, "store_history": True, **content},
    }
    if v1:
        packed = serialize_msg_to_ws_v1(parts, "shell", lambda part: json.dumps(part).encode())  # type: ignore[no-untyped-call]
        await socket.write_message(packed, binary=True)
    else:
        await socket.write_message(json.dumps({**parts, "channel": "shell", "buffers": []}))
    return message_id


async def events(agent: ScriptedAgent, message_id: str, count: int, timeout: float = 20.0) -> list[tuple[int, ...]]:
    """The fields of an execution's events, once so many have come."""
    deadline = time.monotonic() + timeout
    while True:
        found = [frame.fields for frame in agent.of_kind(Kind.CELL) if frame.fields[1] == number_of(message_id)]
        if len(found) >= count:
            return found
        assert time.monotonic() < deadline, f"{found} of {count} events"
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("v1", [True, False], ids=["v1", "legacy"])
async def test_an_execution_is_reported_when_it_is_requested_when_it_starts_and_when_it_ends(
    server: Jupyter, agent: ScriptedAgent, kernel: str, v1: bool
) -> None:
    socket = await connected(server, kernel, v1)
    first = await execute(socket, "import os, time; time.sleep(1)", v1)
    second = await execute(socket, "import os, time; time.sleep(1)", v1)
    other = await execute(socket, "pass", v1)
    hidden = await execute(socket, "1 + 1", v1, silent=True)
    (submitted,) = await events(agent, second, 1, timeout=0.9)  # while the first runs
    assert submitted[:3] == (CellEvent.SUBMITTED, number_of(second), number_of(kernel))
    found = await events(agent, second, 3)
    assert [fields[0] for fields in found] == list(CellEvent)
    assert {fields[1:5] for fields in found} == {submitted[1:5]}
    (started,) = (fields for fields in await events(agent, first, 3) if fields[0] == CellEvent.STARTED)
    assert found[1][5] == started[5] + 1
    # the same text has the same hash, another text another one, and neither is a hash that anybody can compute
    assert started[3] == submitted[3] != (await events(agent, other, 3))[0][3]
    assert started[3] != number_of("import os, time; time.sleep(1)")
    assert Path(f"/proc/{submitted[4]}/cmdline").read_text().count(kernel) == 1
    assert await events(agent, hidden, 0) == []
    socket.close()


async def test_an_execution_ends_for_the_agent_also_without_its_browser_tab(
    server: Jupyter, agent: ScriptedAgent, kernel: str
) -> None:
    socket = await connected(server, kernel)
    message_id = await execute(socket, "time.sleep(1.5)")
    await events(agent, message_id, 2)
    socket.close()
    assert [fields[0] for fields in await events(agent, message_id, 3)] == list(CellEvent)


async def test_executions_of_another_frontend_are_reported_from_the_kernels_messages(
    server: Jupyter, agent: ScriptedAgent, kernel: str
) -> None:
    file = next(server.log.parent.glob(f"runtime/kernel-{kernel}.json"))
    client = BlockingKernelClient(connection_file=str(file))
    client.load_connection_file()
    client.start_channels()
    message_id = client.execute("2 + 2")
    assert [fields[0] for fields in await events(agent, message_id, 3)] == list(CellEvent)
    client.stop_channels()


def test_an_execution_ends_with_the_next_of_its_shell_if_the_kernels_message_was_lost() -> None:
    told: list[tuple[CellEvent, str]] = []
    client = SimpleNamespace(tell_cell=lambda event, execution, at: told.append((event, execution.message_id)))
    watch = CellWatch(SimpleNamespace(), client)  # type: ignore[arg-type]
    session = SimpleNamespace(unpack=json.loads, feed_identities=lambda message: ([], message))

    def starts(message_id: str, **parent: str) -> None:
        parts = ["", {"msg_type": "execute_input"}, {"msg_id": message_id, **parent}, {}]
        watch._from_kernel(
            "k",
            SimpleNamespace(session=session),
            [json.dumps(part) for part in [*parts, {"code": "1", "execution_count": 1}]],
        )

    for message_id, parent in (("a", {}), ("b", {"subshell_id": "s"}), ("c", {})):
        starts(message_id, **parent)
    ended = [message_id for event, message_id in told if event is CellEvent.ENDED]
    assert ended == ["a"]


async def test_executions_that_a_failed_cell_aborts_end(server: Jupyter, agent: ScriptedAgent, kernel: str) -> None:
    socket = await connected(server, kernel)
    await execute(socket, "time.sleep(0.5); 1 / 0", stop_on_error=True)
    aborted = await execute(socket, "3 + 3")
    assert [fields[0] for fields in await events(agent, aborted, 2)] == [CellEvent.SUBMITTED, CellEvent.ENDED]
    socket.close()


async def test_a_restart_or_the_end_of_the_kernel_ends_its_executions(server: Jupyter, agent: ScriptedAgent) -> None:
    kernel = server.post("api/kernels", {"name": "python3"})[1]["id"]
    for action in ("restart", "kill"):
        socket = await connected(server, kernel)
        running = await execute(socket, "import os, time; time.sleep(600)")
        waiting = await execute(socket, "0")
        submitted, started = (await events(agent, running, 2))[:2]
        assert (started[0], started[4]) == (CellEvent.STARTED, submitted[4])
        if action == "restart":
            assert (await asyncio.to_thread(server.post, f"api/kernels/{kernel}/restart", {}))[0] == 200
        else:
            os.kill(started[4], 9)
        assert (await events(agent, running, 3))[-1][0] == CellEvent.ENDED
        assert (await events(agent, waiting, 2))[-1][0] == CellEvent.ENDED
        socket.close()


async def test_an_old_agent_gets_no_events(
    agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    execution = Execution("m", "k", 7)
    with ScriptedAgent(tmp_path / "old.sock") as old:
        monkeypatch.setenv("GPUSHARE_SOCKET", str(old.path))
        async with running_client() as client:
            await until(lambda: client.connected)
            for event in CellEvent:
                client.tell_cell(event, execution)
            assert (await client.query()).known
        assert old.of_kind(Kind.CELL) == []


async def test_a_new_connection_gets_the_executions_that_have_not_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with ScriptedAgent(tmp_path / "new.sock", Script(features=Feature.CELLS)) as agent:
        monkeypatch.setenv("GPUSHARE_SOCKET", str(agent.path))
        async with running_client() as client:
            await until(lambda: client.connected)
            over, still = Execution("over", "k", 7), Execution("still", "k", 7, count=2)
            for event in CellEvent:
                client.tell_cell(event, over)
            client.tell_cell(CellEvent.SUBMITTED, still)
            client.tell_cell(CellEvent.STARTED, still)
            await asyncio.to_thread(agent.wait_for, Kind.CELL, 5)
            await asyncio.to_thread(agent.stop)
            agent.start()
            found = await asyncio.to_thread(agent.wait_for, Kind.CELL, 6)
            assert found[-1].fields[:7] == still.fields(CellEvent.STARTED)


async def test_without_an_agent_events_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUSHARE_SOCKET", raising=False)
    SessionClient().tell_cell(CellEvent.SUBMITTED, Execution("m", "k", 7))


CELLS = CellsStatus(
    (
        CellStatus(number_of("mine"), 50, 3, 1000.0, 12.0, False, 3.2),
        CellStatus(number_of("of nobody"), 50, 4, 1001.0, 12.0, False, 3.2),
    ),
    gpu_seconds=6.4,
)


async def test_the_browser_gets_the_cells_of_its_kernel_that_this_server_has_seen(
    server: Jupyter, agent: ScriptedAgent, kernel: str
) -> None:
    socket = await connected(server, kernel)
    message_id = await execute(socket, "5 + 5")
    await events(agent, message_id, 3)
    row = replace(CELLS.cells[0], number=number_of(message_id))
    agent.script.cells = replace(CELLS, cells=(*CELLS.cells, row))
    code, body = await asyncio.to_thread(server.get, f"gpushare/cells?kernel={kernel}")
    assert code == 200
    ((cell,), problem) = body["cells"], body["problem"]
    assert (cell["cell_id"], cell["line"], cell["count"], problem) == ("cell of 5 + 5", "GPU time 3.2\u00a0s", 3, "")
    assert not {"number", "pid"} & set(cell)
    assert (await asyncio.to_thread(server.get, "gpushare/cells?kernel=other"))[1]["cells"] == []
    assert (await asyncio.to_thread(server.get, f"gpushare/cells?kernel={kernel}", None))[0] == 403
    socket.close()


def test_the_command_prints_the_cells_or_that_the_agent_is_too_old(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedAgent(tmp_path / "s.sock", Script(features=Feature.CELLS, cells=CELLS)) as agent:
        command = ["status", "--cells", "--socket", str(agent.path)]
        assert main(command) == 0
        assert capsys.readouterr().out.endswith("GPU time 6.4 s: 6.4 s in 2 cells, 0 ms outside of cells.\n")
        assert main([*command, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["cells"][0]["gpu_seconds"] == 3.2
        agent.script.features = 0
        assert main(command) == 1
        assert "older than your notebook server" in capsys.readouterr().out
    assert main([*command, "--json"]) == 1
    assert "unavailable" in json.loads(capsys.readouterr().out)["problem"]


def test_without_a_share_there_are_no_cells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GPUSHARE_SOCKET", raising=False)
    assert main(["status", "--cells", "--watch"]) == 0
    assert capsys.readouterr().out == "This server has no GPU share: it was started without one.\n"
    monkeypatch.setenv("GPUSHARE_LAYER", "time-slicing")
    assert main(["status", "--cells"]) == 1
    assert capsys.readouterr().out == "No agent serves this server, so the GPU time of its cells is not known.\n"


async def test_cells_of_a_gateways_kernels_are_not_reported() -> None:
    events: list[Any] = []
    kernels = SimpleNamespace(list_kernel_ids=lambda: ["k"], get_kernel=lambda _: GatewayKernelManager())  # type: ignore[no-untyped-call]
    watch: Any = CellWatch(kernels, SimpleNamespace(tell_cell=lambda *event: events.append(event)))  # type: ignore[arg-type]
    message = {"header": {"msg_type": "execute_request", "msg_id": "m"}, "metadata": {}, "content": {"code": "1"}}
    watch.received("k", None, json.dumps(message))
    assert (events, watch._streams) == ([], {})


def test_each_cell_of_a_long_notebook_that_runs_as_a_whole_is_known() -> None:
    stream = SimpleNamespace(on_recv=lambda _: None, close=lambda: None)
    session = SimpleNamespace(feed_identities=lambda message: ([], message), unpack=lambda part: part)
    kernel = SimpleNamespace(ports=[1], connect_iopub=lambda: stream, session=session, provisioner=None)
    kernels = SimpleNamespace(list_kernel_ids=lambda: ["k"], get_kernel=lambda _: kernel)
    watch = CellWatch(kernels, SimpleNamespace(tell_cell=lambda *_: None))  # type: ignore[arg-type]
    for number in range(400):
        header = {"msg_type": "execute_request", "msg_id": str(number)}
        watch.received(
            "k",
            None,
            json.dumps({"header": header, "metadata": {"cellId": f"cell {number}"}, "content": {"code": "1"}}),
        )
    for number in range(400):
        parent = {"msg_id": str(number)}
        for kind, content in (
            ("execute_input", {"code": "1", "execution_count": 1}),
            ("status", {"execution_state": "idle"}),
        ):
            watch._from_kernel("k", kernel, ["", {"msg_type": kind}, parent, {}, content])
    assert [watch.known[number_of(str(number))].cell_id for number in range(400)] == [
        f"cell {number}" for number in range(400)
    ]
