"""While a session holds the free memory of a GPU, others are granted no more of it, but for too long a hold."""

from __future__ import annotations

import asyncio

import pytest

from gpushare_spawner.agent import session_limit
from gpushare_spawner.agent.session_limit import EXCLUSIVE_AT_MOST, ExclusiveMemory
from gpushare_spawner.model.frames import Feature, Frame, Kind, Role
from tests.agent.conftest import Agent
from tests.agent.peers import FIRST, SECOND, Peer

MIB = 2**20
GIB = 2**30
GRANTED = 0


def test_hold_is_against_all_others_on_its_gpu_until_the_last_step_ends() -> None:
    over = list[str]()
    exclusive_memory = ExclusiveMemory(lambda: 0.0, over.append)
    with exclusive_memory.exclusive("GPU-1", "ann"):
        with exclusive_memory.exclusive("GPU-1", "ann"):
            assert exclusive_memory.excludes("GPU-1", "ben")
            assert not exclusive_memory.excludes("GPU-1", "ann")
            assert not exclusive_memory.excludes("GPU-2", "ben")
            with exclusive_memory.exclusive("GPU-1", "ben"):
                assert exclusive_memory.excludes("GPU-1", "ann")
        assert exclusive_memory.excludes("GPU-1", "ben")
    assert not exclusive_memory.excludes("GPU-1", "ben")
    assert over == ["GPU-1"] * 3


def test_hold_that_lasts_too_long_keeps_nobody_waiting() -> None:
    now = 0.0
    exclusive_memory = ExclusiveMemory(lambda: now, lambda gpu: None)
    with exclusive_memory.exclusive("GPU-1", "ann"):
        now = EXCLUSIVE_AT_MOST - 1
        with exclusive_memory.exclusive("GPU-1", "ann"):
            assert exclusive_memory.excludes("GPU-1", "ben")
            now = EXCLUSIVE_AT_MOST
            assert not exclusive_memory.excludes("GPU-1", "ben")


async def reserving(agent: Agent) -> Peer:
    """A process that asks before it allocates, with nothing yet."""
    peer = Peer(agent.open("ben"))
    agent.peers.append(peer)
    await peer.connect(Role.CUDA, Feature.RESERVE)
    return peer


def reserve(peer: Peer, size: int, number: int) -> None:
    peer.send(Kind.RESERVE, size, 0, size, number, 0, gpu=FIRST.uuid)


async def reserved(peer: Peer) -> tuple[int, int, int]:
    """Bytes, result, and the number of the question."""
    frame: Frame = await peer.until(Kind.RESERVED)
    return frame.fields[0], frame.fields[1], frame.fields[2]


async def test_allocation_waits_until_the_free_memory_is_nobodys(agent: Agent) -> None:
    peer = await reserving(agent)
    with agent.node.exclusive_memory.exclusive(FIRST.uuid, "ann"):
        reserve(peer, GIB, 1)
        await peer.quiet()
        with agent.node.exclusive_memory.exclusive(SECOND.uuid, "ann"):
            pass
        await peer.quiet()
    added, result, number = await reserved(peer)
    assert (added >= GIB, result, number) == (True, GRANTED, 1)


async def test_process_that_waits_is_told_in_time_to_ask_again_and_is_refused_nothing(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_limit, "ASK_AGAIN", 0.05)
    monkeypatch.setattr(session_limit, "EXCLUSIVE_AT_MOST", 0.12)
    peer = await reserving(agent)
    numbers = []
    with agent.node.exclusive_memory.exclusive(FIRST.uuid, "ann"):
        for number in range(1, 10):
            reserve(peer, GIB, number)
            added, result, answered = await reserved(peer)
            assert (result, answered) == (GRANTED, number)
            if added:
                break
            numbers.append(number)
    assert numbers == [1, 2, 3]  # and then it allocates all the same: a hold must not stop a program
    session = agent.node.report().session("ben")
    assert session is not None
    assert session.memory_limit_hits.count == 0


async def test_process_that_connects_while_memory_is_held_gets_nothing_in_advance(agent: Agent) -> None:
    peer = await reserving(agent)
    with agent.node.exclusive_memory.exclusive(FIRST.uuid, "ann"):
        peer.send(Kind.RESERVE, 100 * MIB, 100 * MIB, 0, 0, 0, gpu=FIRST.uuid)
        assert (await reserved(peer))[0] == 100 * MIB


async def test_what_was_granted_in_advance_is_recalled(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = await reserving(agent)
    reserve(peer, GIB, 1)
    added, _, _ = await reserved(peer)
    assert added > GIB
    peer.send(Kind.MEMORY, 0, GIB, gpu=FIRST.uuid)
    memory = agent.node.sessions["ben"].memory
    assert memory is not None
    while memory.counted(FIRST.uuid)[1] != added - GIB:
        await asyncio.sleep(0.005)
    recalling = asyncio.create_task(memory.recall_unused(FIRST.uuid))
    recall = await peer.until(Kind.RECALL)
    assert recall.fields[0] == added - GIB
    assert not recalling.done()
    peer.send(Kind.RETURN, added - GIB, GIB, recall.fields[1], gpu=FIRST.uuid)
    await recalling
    assert memory.counted(FIRST.uuid) == (GIB, 0)
    await memory.recall_unused(FIRST.uuid)  # there is nothing more, and nothing to wait for


async def test_process_that_does_not_answer_a_recall_is_not_waited_for(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_limit, "RECALL_WITHIN", 0.05)
    peer = await reserving(agent)
    reserve(peer, GIB, 1)
    await reserved(peer)
    memory = agent.node.sessions["ben"].memory
    assert memory is not None
    async with asyncio.timeout(2):
        await memory.recall_unused(FIRST.uuid)
        leaving = asyncio.create_task(memory.recall_unused(FIRST.uuid))
        await peer.until(Kind.RECALL)
        peer.close()
        await leaving
