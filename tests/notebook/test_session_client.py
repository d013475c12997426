"""The notebook server's connection to the agent: it comes back by itself, and nothing that an agent does hurts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from gpushare_spawner.model.frames import AskKind, Frame, Kind
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.share_status import AgentRecord, ServiceAnswer
from gpushare_spawner.notebook import session_client
from gpushare_spawner.notebook.client import AgentUnavailable
from gpushare_spawner.notebook.session_client import KernelActivity, NoAnswer, ServiceAsk, SessionClient
from tests.notebook.scripted_agent import ScriptedAgent


@asynccontextmanager
async def running() -> AsyncIterator[SessionClient]:
    """A client that runs until the end of the block."""
    client = SessionClient()
    task = asyncio.create_task(client.run())
    try:
        yield client
        assert not task.done(), "the client ended by itself"
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until(condition: Callable[[], bool], timeout: float = 15.0) -> None:
    """Wait for it to become true."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts to connect come quickly, and no answer is kept."""
    monkeypatch.setattr(session_client, "FIRST_DELAY", 0.02)
    monkeypatch.setattr(session_client, "LAST_DELAY", 0.1)
    monkeypatch.setattr(session_client, "FRESH_SECONDS", 0.0)


async def test_it_asks_and_is_answered(agent: ScriptedAgent) -> None:
    async with running() as client:
        await until(lambda: client.connected)
        assert (await client.query()).share_units == 25
        agent.script.tier, agent.script.effective = Tier.RELEASED, 0
        assert (await client.query()).tier is Tier.RELEASED


async def test_without_a_share_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUSHARE_SOCKET", raising=False)
    client = SessionClient()
    await asyncio.wait_for(client.run(), 1)
    assert not client.shared
    assert not (await client.query()).shared
    await client.tell_kernels(KernelActivity(1, 1))


async def test_it_connects_again_and_tells_the_kernels_again(agent: ScriptedAgent) -> None:
    async with running() as client:
        await until(lambda: client.connected)
        await client.tell_kernels(KernelActivity(busy=1, alive=3, last_activity=12.5))
        told = await asyncio.to_thread(agent.wait_for, Kind.KERNELS)
        assert told[0].fields[:3] == (1, 3, 12_500_000_000)
        await asyncio.to_thread(agent.stop)
        await until(lambda: not client.connected)
        away = await client.query()
        assert away.shared
        assert "GPU work continues without the agent" in away.problem
        await client.tell_kernels(KernelActivity(busy=0, alive=4))
        agent.start()
        await until(lambda: client.connected)
        told = await asyncio.to_thread(agent.wait_for, Kind.KERNELS, 2)
        assert told[1].fields[:2] == (0, 4)
        assert (await client.query()).known


async def test_frames_are_numbered_from_one_on_each_connection(agent: ScriptedAgent) -> None:
    async with running() as client:
        await until(lambda: client.connected)
        await client.query()
        await client.query()
        await asyncio.to_thread(agent.wait_for, Kind.QUERY, 2)
    assert [frame.serial for frame in agent.heard] == [1, 2, 3]


async def test_a_silent_agent_costs_the_timeout(agent: ScriptedAgent) -> None:
    async with running() as client:
        await until(lambda: client.connected)
        agent.silent = True
        assert "did not answer within 0.2 s" in (await client.query(timeout=0.2)).problem
        agent.silent = False
        assert (await client.query()).known


async def test_many_tabs_that_ask_at_once_get_one_answer(agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_client, "FRESH_SECONDS", 60.0)
    async with running() as client:
        await until(lambda: client.connected)
        answers = await asyncio.gather(*(client.query() for _ in range(20)))
        assert all(answer is answers[0] for answer in answers)
        assert len(agent.of_kind(Kind.QUERY)) == 1
        # news makes the answer old
        agent.script.tier = Tier.DOWNGRADED
        agent.send(AgentRecord())
        await until(lambda: client._last is None)
        assert (await client.query()).tier is Tier.DOWNGRADED


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"short", "128 bytes"),
        (bytes(128), "wrong magic"),
        (b"{", "Expecting property name"),
        (b'{"status": 5}', "a ShareStatus is an object"),
        (b'{"status": []}', "a ShareStatus is an object, not list"),
        (b'{"status": {"gpus": 5}}', "gpus is a list, not int"),
        (b'{"status": {"processes": null}}', "processes is a list, not NoneType"),
        (b'{"status": {"share_units": true}}', "share_units is int, not bool"),
        (b'{"status": {"shared": 1}}', "shared is bool, not int"),
        (b'{"status": {"idle_seconds": "now"}}', "idle_seconds is float, not str"),
        (b'{"answer": {"number": 1}}', "a ServiceAnswer lacks fields"),
        (b'{"answer": {"number": [], "done": true, "text": ""}}', "number is int, not list"),
        (b'{"status": ' + b"[" * 100_000, "recursion"),
        (Frame(Kind.ERROR, (4,)).pack(), "This session has ended"),
        (Frame(Kind.ERROR, (99,)).pack(), "code 99"),
    ],
)
async def test_bad_answers_end_the_connection_and_nothing_else(agent: ScriptedAgent, sent: bytes, said: str) -> None:
    agent.after_hello = sent
    async with running() as client:
        await until(lambda: said in client._problem)
        assert said in (await client.query()).problem
        agent.after_hello = None
        await until(lambda: client.connected)
        assert (await client.query()).known


async def test_an_answer_whose_number_is_no_number_is_nobodys() -> None:
    client = SessionClient()
    await client._take(AgentRecord(answer=ServiceAnswer([], True, "")))  # type: ignore[arg-type]


async def test_an_agent_that_dies_while_asked(agent: ScriptedAgent) -> None:
    async with running() as client:
        await until(lambda: client.connected)
        agent.silent = True
        asking = asyncio.create_task(client.query(timeout=20))
        await asyncio.to_thread(agent.wait_for, Kind.QUERY)
        await asyncio.to_thread(agent.stop)
        assert "The agent is unavailable" in (await asking).problem


async def test_asks_are_answered_each_with_its_own_answer(agent: ScriptedAgent) -> None:
    agent.script.answer = (True, "The share is kept. " * 20)
    async with running() as client:
        await until(lambda: client.connected)
        asks = [ServiceAsk.of(AskKind.KEEP, 3600) for _ in range(4)]
        answers = await asyncio.gather(*(client.ask(one) for one in asks))
        assert [answer.number for answer in answers] == [one.number for one in asks]
        assert {(answer.done, answer.text) for answer in answers} == {(True, "The share is kept. " * 20)}
        # status and answers come over the same connection
        kept = (await client.query()).controls
        assert kept is not None
        assert kept.keep_until is not None
        assert client._asks == {}


async def test_an_ask_without_an_answer_says_so(agent: ScriptedAgent) -> None:
    agent.script.answer = None
    async with running() as client:
        await until(lambda: client.connected)
        with pytest.raises(NoAnswer, match=r"No answer within 0\.1 s"):
            await client.ask(ServiceAsk.of(AskKind.RELEASE), timeout=0.1)
        assert client._asks == {}
        agent.script.answer = (False, "late")
        assert (await client.query()).known


async def test_an_agent_that_dies_before_the_answer(agent: ScriptedAgent) -> None:
    agent.script.answer = None
    async with running() as client:
        await until(lambda: client.connected)
        asking = asyncio.create_task(client.ask(ServiceAsk.of(AskKind.RELEASE)))
        await asyncio.to_thread(agent.wait_for, Kind.ASK)
        await asyncio.to_thread(agent.stop)
        with pytest.raises(AgentUnavailable, match="the connection ended"):
            await asking
        with pytest.raises(AgentUnavailable, match="GPU work continues without the agent"):
            await client.ask(ServiceAsk.of(AskKind.RELEASE))


async def test_late_answers_are_not_taken_for_new_ones(agent: ScriptedAgent) -> None:
    async with running() as client:
        await until(lambda: client.connected)
        agent.silent = True
        await client.query(timeout=0.1)
        agent.send(AgentRecord(status=agent.script.status()))  # late
        await asyncio.sleep(0.1)
        agent.silent = False
        agent.script.share = 50
        assert (await client.query()).share_units == 50
