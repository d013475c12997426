"""Session controls at the agent: kept over restarts, told to observers; asks of observers, and their answers."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any

import pytest

from gpushare_spawner.agent.session_socket import MALFORMED, NOT_ALLOWED
from gpushare_spawner.model.control import (
    AnswerRequest,
    AskedRequest,
    CloseRequest,
    ControlRefused,
    ControlsRequest,
    MessageRequest,
)
from gpushare_spawner.model.controls import MOST_ASKS, AskAnswer, Controls, Exemption, Keep, Message
from gpushare_spawner.model.frames import AskKind, Kind, Role
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.share_status import AdminMessage, AgentRecord, ServiceAnswer
from gpushare_spawner.wording.actions import TOO_MANY_REQUESTS
from tests.agent.conftest import Agent, request_for
from tests.agent.peers import Peer
from tests.present import present

KEEP = Keep(until=2_000_000_000.5, since=1_999_990_000, by="ada")
CONTROLS = Controls(keep=KEEP, keeps=(1_999_990_000,), exemption=Exemption(by="root", reason="exam"))
MESSAGE = Message(text="Bitte heute Abend Platz machen: Prüfung. " * 5, by="root", at=1_999_990_001.25)


async def observer(agent: Agent, path: str) -> Peer:
    peer = Peer(path)
    agent.peers.append(peer)
    await peer.connect(Role.NOTEBOOK)
    return peer


def session(agent: Agent) -> SessionReport:
    return present(agent.node.report().session("ada"))


async def test_controls_and_message_survive_a_restart_of_the_agent(agent: Agent) -> None:
    agent.open()
    await agent.node.requests.answer(ControlsRequest.of("ada", CONTROLS))
    await agent.node.requests.answer(MessageRequest(id="ada", message=MESSAGE))
    before = session(agent)
    await agent.stop()
    await agent.start()
    after = session(agent)
    assert (before.controls, before.messages) == (CONTROLS, (MESSAGE,))
    assert (after.controls, after.messages) == (CONTROLS, (MESSAGE,))


async def test_a_session_that_is_opened_again_begins_without_controls(agent: Agent) -> None:
    agent.open()
    await agent.node.requests.answer(ControlsRequest.of("ada", CONTROLS))
    await agent.node.requests.answer(MessageRequest(id="ada", message=MESSAGE))
    agent.node.requests.open(request_for("ada"))
    assert (session(agent).controls, session(agent).messages) == (Controls(), ())


async def test_controls_of_an_unknown_session_are_refused(agent: Agent) -> None:
    requests: list[Any] = [
        ControlsRequest.of("eve", CONTROLS),
        MessageRequest(id="eve", message=MESSAGE),
        AnswerRequest(id="eve", answer=AskAnswer(number=1, done=True, text="", at=1)),
    ]
    for one in requests:
        with pytest.raises(ControlRefused, match="no session eve is open"):
            await agent.node.requests.answer(one)


async def test_observers_are_told_on_each_change_and_on_query(agent: Agent) -> None:
    path = agent.open()
    server = await observer(agent, path)
    await agent.node.requests.answer(ControlsRequest.of("ada", CONTROLS))
    controls = present((await server.changed()).controls)
    assert (controls.keep_until, controls.exempt, controls.exempt_until) == (2_000_000_000.5, True, None)
    await agent.node.requests.answer(MessageRequest(id="ada", message=MESSAGE))
    assert present((await server.changed()).controls).messages == (AdminMessage(MESSAGE.text, MESSAGE.at),)
    # nothing new: nobody is told again
    await agent.node.requests.answer(ControlsRequest.of("ada", CONTROLS))
    await agent.node.requests.answer(MessageRequest(id="ada", message=MESSAGE))
    await server.quiet()
    until = Exemption(until=2_000_000_001, by="root")
    await agent.node.requests.answer(ControlsRequest.of("ada", Controls(exemption=until)))
    controls = present((await server.changed()).controls)
    assert (controls.keep_until, controls.exempt_until) == (None, 2_000_000_001)


async def test_an_ask_is_in_the_report_until_its_answer_which_all_observers_get(agent: Agent) -> None:
    path = agent.open()
    asking, other = await observer(agent, path), await observer(agent, path)
    news = []
    agent.node.changed = lambda: news.append(session(agent).asks)
    asking.send(Kind.ASK, 77, AskKind.KEEP, 3600)
    await asking.quiet()
    assert [(ask.number, ask.kind, ask.value) for ask in session(agent).asks] == [(77, AskKind.KEEP, 3600)]
    assert [ask.number for ask in news[-1]] == [77]
    answer = AskAnswer(number=77, done=True, text="Your share is kept until 18:00.", at=2)
    await agent.node.requests.answer(AnswerRequest(id="ada", answer=answer))
    for peer in (asking, other):
        assert await peer.answer() == ServiceAnswer(77, True, "Your share is kept until 18:00.")
    assert not session(agent).asks
    assert not news[-1]
    # the answer once more, as after a restart of the service
    await agent.node.requests.answer(AnswerRequest(id="ada", answer=answer.model_copy(update={"text": "No."})))
    await other.quiet()


async def test_a_keep_and_the_answer_to_its_ask_come_together(agent: Agent) -> None:
    path = agent.open()
    peer = await observer(agent, path)
    peer.send(Kind.ASK, 5, AskKind.KEEP, 3600)
    await peer.quiet()
    answer = AskAnswer(number=5, done=True, text="Kept.", at=2)
    await agent.node.requests.answer(ControlsRequest.of("ada", CONTROLS, answer))
    assert (session(agent).keep, session(agent).asks) == (KEEP, ())
    assert await peer.record() == AgentRecord()
    assert await peer.answer() == ServiceAnswer(5, True, "Kept.")


async def test_the_user_hears_of_a_keep_when_it_is_on_the_disk(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between answer and record, the agent would forget what it has told."""
    peer = await observer(agent, agent.open())
    peer.send(Kind.ASK, 5, AskKind.KEEP, 3600)
    await peer.quiet()
    store = agent.node.registry.store
    write, written = store._folder.write, threading.Event()

    def slowly(name: str, record: bytes | None) -> None:
        time.sleep(0.2)
        write(name, record)
        written.set()

    monkeypatch.setattr(store._folder, "write", slowly)
    answer = AskAnswer(number=5, done=True, text="Kept.", at=2)
    request = asyncio.create_task(agent.node.requests.answer(ControlsRequest.of("ada", CONTROLS, answer)))
    assert await peer.answer() == ServiceAnswer(5, True, "Kept.")
    assert written.is_set()
    await request


async def test_an_answer_to_a_session_that_ends_meanwhile_brings_no_record_back(agent: Agent) -> None:
    agent.open()
    answer = AskAnswer(number=5, done=True, text="Kept.", at=2)
    request = asyncio.create_task(agent.node.requests.answer(ControlsRequest.of("ada", CONTROLS, answer)))
    await asyncio.sleep(0)
    await agent.node.requests.answer(CloseRequest(id="ada"))
    await request
    await agent.stop()
    await agent.start()
    assert agent.node.report().sessions == ()


async def test_ten_thousand_asks_reach_neither_the_report_nor_other_observers(agent: Agent) -> None:
    path = agent.open()
    hostile, bystander = await observer(agent, path), await observer(agent, path)
    refused = 0
    for number in range(1, 201):
        hostile.send(Kind.ASK, number, AskKind.STOP, 2**64 - 1)
        if number > MOST_ASKS:
            assert await hostile.answer() == ServiceAnswer(number, False, TOO_MANY_REQUESTS)
            refused += 1
    assert refused == 200 - MOST_ASKS
    assert [ask.number for ask in session(agent).asks] == list(range(1, MOST_ASKS + 1))
    await bystander.quiet()


@pytest.mark.parametrize("fields", [(0, AskKind.KEEP, 60), (2**32, AskKind.KEEP, 60)])
async def test_an_ask_that_breaks_the_protocol_ends_its_connection_only(agent: Agent, fields: tuple[int, ...]) -> None:
    path = agent.open()
    bad, good = await observer(agent, path), await observer(agent, path)
    bad.send(Kind.ASK, *fields)
    assert await bad.ended() == MALFORMED
    assert session(agent).asks == ()
    assert (await good.status()).known


async def test_a_cuda_process_may_not_ask(agent: Agent) -> None:
    peer = Peer(agent.open())
    agent.peers.append(peer)
    await peer.connect(Role.CUDA)
    peer.send(Kind.ASK, 1, AskKind.KEEP, 60)
    assert await peer.ended() == NOT_ALLOWED


async def test_asks_end_with_the_agent_and_the_keep_stays(agent: Agent) -> None:
    """Killed between ask and answer: the keep is there, as it was answered, or it is not."""
    path = agent.open()
    peer = await observer(agent, path)
    await agent.node.requests.answer(ControlsRequest.of("ada", CONTROLS))
    peer.send(Kind.ASK, 1, AskKind.END_KEEP)
    assert await peer.record() == AgentRecord()
    await peer.quiet()
    assert len(session(agent).asks) == 1
    await agent.stop()
    await agent.start()
    assert (session(agent).keep, session(agent).asks) == (KEEP, ())
    # the service answers what it saw before the restart
    answer = AskAnswer(number=1, done=True, text="Ended.", at=2)
    await agent.node.requests.answer(ControlsRequest.of("ada", Controls(), answer))
    assert session(agent).keep is None
    assert os.path.exists(path)


async def test_the_service_hears_of_an_ask_at_once_and_of_none_after_a_while(agent: Agent) -> None:
    path = agent.open()
    peer = await observer(agent, path)
    began = time.monotonic()
    assert await agent.node.requests.answer(AskedRequest(within=0.2)) == {"asked": False}
    assert time.monotonic() - began >= 0.19
    waiting = [asyncio.create_task(agent.node.requests.answer(AskedRequest(within=30))) for _ in range(2)]
    await asyncio.sleep(0.05)
    peer.send(Kind.ASK, 1, AskKind.KEEP, 60)
    async with asyncio.timeout(2):
        assert [await one for one in waiting] == [{"asked": True}] * 2
    assert await agent.node.requests.answer(AskedRequest(within=30)) == {"asked": True}
    answer = AskAnswer(number=1, done=False, text="No.", at=2)
    await agent.node.requests.answer(AnswerRequest(id="ada", answer=answer))
    assert await agent.node.requests.answer(AskedRequest(within=0)) == {"asked": False}
