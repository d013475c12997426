"""An agent without a free file descriptor says so in a line or two, and works on."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpushare_spawner.agent.control_socket import ControlSocket
from gpushare_spawner.agent.session_socket import NOT_ALLOWED
from gpushare_spawner.clients.agent import AgentClient
from gpushare_spawner.descriptors import RESERVED, allow_many
from gpushare_spawner.log_once import LogOnce
from gpushare_spawner.model.control import AgentUnreachable
from tests.agent.conftest import Agent, request_for
from tests.agent.peers import Peer


@contextmanager
def files_at_most(more: int) -> Iterator[None]:
    """So many more descriptors may be opened than are open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_sessions_leave_descriptors_to_the_rest_of_the_agent(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    control = ControlSocket(agent.path / "control.sock", agent.node.requests.answer)
    await control.start()
    path = agent.open("eve")
    with files_at_most(RESERVED + 20):
        for _ in range(60):
            peer = Peer(path)
            agent.peers.append(peer)
            await peer.connect(None)
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        refused = 0
        for peer in agent.peers:
            try:
                frame = await peer.receive(0.02)
                refused += frame is not None and frame.fields[0] == NOT_ALLOWED
            except TimeoutError:
                pass
        assert 30 < refused < 60
        client = AgentClient(control.path)
        assert (await client.report()).session("eve") is not None
        await client.open(request_for("bob"))  # its socket and record are files too
    await control.close()
    assert sum("raise the agent's limit" in record.getMessage() for record in caplog.records) == 1


async def test_control_socket_without_descriptors_rejects_and_logs_once(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    control = ControlSocket(agent.path / "control.sock", agent.node.requests.answer)
    await control.start()
    client = AgentClient(control.path, timeout=0.5)
    assert (await client.report()).node == "here"
    with files_at_most(10):
        filler = []
        try:
            while True:
                filler.append(os.dup(0))
        except OSError:
            os.close(filler.pop())  # for the client
        turned_away = 0
        for _ in range(10):
            try:
                await AgentClient(control.path, timeout=0.1).report()
            except AgentUnreachable:
                turned_away += 1
        assert turned_away > 0
        for one in filler:
            os.close(one)
        await asyncio.sleep(0.3)
        assert (await client.report()).node == "here"
    await control.close()
    said = "\n".join(record.getMessage() for record in caplog.records if "control socket" in record.getMessage())
    assert said.count("no connection to the control socket can be accepted") == 1
    assert len(said) < 500


def test_trouble_that_comes_and_goes_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    trouble = LogOnce(logging.getLogger("test"), "trouble", "over", lasts=60.0)
    for _ in range(100):
        trouble.about("this")
        trouble.resolved()
    assert [record.getMessage() for record in caplog.records] == ["trouble: this"]


def test_changed_reason_is_logged_again_if_the_caller_wants_it(caplog: pytest.LogCaptureFixture) -> None:
    trouble = LogOnce(logging.getLogger("test"), "trouble", "over", each_reason=True)
    for reason in ("refused", "refused", "403", "403"):
        trouble.about(reason)
    assert [record.getMessage() for record in caplog.records] == ["trouble: refused", "trouble: 403"]
    caplog.clear()
    trouble = LogOnce(logging.getLogger("test"), "trouble", "over")
    for reason in ("refused", "403"):
        trouble.about(reason)
    assert [record.getMessage() for record in caplog.records] == ["trouble: refused"]


def test_soft_limit_of_files_becomes_the_hard_one() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] // 2, before[1]))
        allow_many()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == min(hard, 1024 * 1024)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
