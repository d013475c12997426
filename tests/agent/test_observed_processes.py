"""What an observer is told of a session's processes: `gpushare smi`, and NVML under the library, show these."""

from __future__ import annotations

import asyncio
import os

from gpushare_spawner.agent.session_limit import SHOWN_PROCESSES
from gpushare_spawner.model.frames import Feature, Frame, Kind, Role, SessionMemoryTopic, gpu_bytes
from tests.agent.conftest import Agent
from tests.agent.peers import FIRST, GIB, SECOND, Peer

MIB = 2**20


async def connected(agent: Agent, path: str, pid: int, role: Role = Role.CUDA, features: int = 0) -> Peer:
    """A peer that says this is its pid."""
    peer = Peer(path)
    agent.peers.append(peer)
    await peer.connect(None)
    peer.send(Kind.HELLO, role, pid, 100, features)
    welcome = await peer.expect(Kind.WELCOME)
    for _ in range(welcome.fields[5]):
        await peer.expect(Kind.DEVICE)
    return peer


async def observed(agent: Agent, path: str, gpus: int = 1) -> list[Frame]:
    """The frames of an answer to an observer."""
    observer = await connected(agent, path, os.getpid(), Role.OBSERVER, Feature.RESERVE | Feature.USE)
    observer.send(Kind.QUERY)
    frames: list[Frame] = []
    while sum(frame.kind is Kind.STATUS for frame in frames) < gpus:
        frame = await observer.receive()
        assert frame is not None
        frames.append(frame)
    return frames


def memory(frames: list[Frame], gpu: str = FIRST.uuid) -> dict[int, int]:
    """Bytes by pid."""
    return {
        frame.fields[1]: frame.fields[2]
        for frame in frames
        if frame.kind is Kind.SESSION_MEMORY
        and frame.fields[0] == SessionMemoryTopic.PROCESS
        and frame.gpu == gpu_bytes(gpu)
    }


def use(frames: list[Frame]) -> dict[int, int]:
    """Nanoseconds of GPU time by pid."""
    return {frame.fields[0]: frame.fields[1] for frame in frames if frame.kind is Kind.USE}


async def test_process_that_computes_is_told_with_its_memory_however_little_that_is(agent: Agent) -> None:
    path = agent.open()
    peers = [await connected(agent, path, 100 + number) for number in range(SHOWN_PROCESSES + 2)]
    small = peers[0]
    for peer in peers:
        peer.send(Kind.MEMORY, MIB if peer is small else GIB // 8, 0, gpu=FIRST.uuid)
    small.send(Kind.REQUEST, MIB, 0, 1, gpu=FIRST.uuid)
    await small.until(Kind.GRANT)
    await asyncio.sleep(0.05)
    frames = await observed(agent, path)
    assert use(frames)[100] == use(frames)[0] > 0
    assert len(memory(frames)) == SHOWN_PROCESSES + 1
    assert memory(frames)[100] == MIB


async def test_process_without_memory_on_a_gpu_is_not_told_for_it(agent: Agent) -> None:
    """A process connects for all GPUs of the session, whichever it uses."""
    path = agent.open(gpus=(FIRST.uuid, SECOND.uuid), share_units=100)
    first = await connected(agent, path, 41)
    await connected(agent, path, 42)
    first.send(Kind.MEMORY, GIB, 0, gpu=FIRST.uuid)
    await first.quiet()
    frames = await observed(agent, path, gpus=2)
    assert (memory(frames), memory(frames, SECOND.uuid)) == ({41: GIB}, {})


async def test_process_that_calls_itself_0_is_not_taken_for_the_session(agent: Agent) -> None:
    path = agent.open()
    nobody = await connected(agent, path, 0)
    nobody.send(Kind.REQUEST, MIB, 0, 1, gpu=FIRST.uuid)
    await nobody.until(Kind.GRANT)
    frames = await observed(agent, path)
    assert [frame.fields[0] for frame in frames if frame.kind is Kind.USE] == [0]
