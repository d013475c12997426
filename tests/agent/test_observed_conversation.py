"""The session socket where another layer shares the GPU: docs/reference/protocol.md, "Observing only"."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping

import pytest

from gpushare_spawner.agent.session_records import SessionRecord
from gpushare_spawner.agent.session_socket import NOT_ALLOWED
from gpushare_spawner.agent.sessions.conversation import OBSERVED_FEATURES
from gpushare_spawner.model.control import NoticeRequest
from gpushare_spawner.model.frames import Feature, Frame, Kind, Role, SessionMemoryTopic, gpu_bytes
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import Notice, SessionReport
from gpushare_spawner.model.share import Tier
from tests.agent.conftest import Agent, Eventually, request_for
from tests.agent.peers import FIRST, GIB, SECOND, Peer
from tests.present import present

SECOND_NS = 1_000_000_000


def shared(agent: Agent, id: str = "ada", **changes: object) -> str:
    """Open a session whose GPU another layer shares; the path of its socket."""
    request = request_for(id, **{"layer": LayerName.TIME_SLICING, "oversubscribe": False} | changes)
    session = agent.node.registry.add_and_listen(SessionRecord.opened(request, time.time()))
    assert session.socket is not None
    return str(session.socket.path)


async def process(agent: Agent, path: str) -> Peer:
    """A CUDA process with engine `observe`."""
    peer = Peer(path)
    agent.peers.append(peer)
    await peer.connect(features=Feature.OBSERVE)
    return peer


def report(agent: Agent, id: str = "ada") -> SessionReport:
    found = agent.node.report().session(id)
    assert found is not None
    return found


async def test_welcome_says_that_reports_are_taken_and_nothing_is_reserved(agent: Agent) -> None:
    path = shared(agent)
    cuda, observer = Peer(path), Peer(path)
    agent.peers += [cuda, observer]
    welcome, device = await cuda.connect(features=Feature.OBSERVE)
    assert welcome.fields[:2] == (25, 0)
    assert welcome.fields[4:7] == (0, 1, Feature.OBSERVE)
    assert device.fields[0] > 0
    seen, *_ = await observer.connect(Role.OBSERVER)
    assert seen.fields[6] == OBSERVED_FEATURES
    native = Peer(agent.open("bob", gpus=(SECOND.uuid,)))
    agent.peers.append(native)
    welcome, *_ = await native.connect()
    assert not Feature.OBSERVE & welcome.fields[6]


async def test_burst_shows_in_the_report_while_it_lasts_and_after(agent: Agent, eventually: Eventually) -> None:
    peer = await process(agent, shared(agent))
    peer.send(Kind.MEMORY, 0, 2 * GIB, gpu=FIRST.uuid)
    peer.send(Kind.BUSY, 0, gpu=FIRST.uuid)
    await eventually(lambda: report(agent).gpu_busy)
    during = report(agent)
    assert (during.layer, during.waiting, during.processes) == (LayerName.TIME_SLICING, False, 1)
    assert (during.memory_bytes, during.resident_bytes) == (2 * GIB, 2 * GIB)
    await asyncio.sleep(0.05)
    peer.send(Kind.IDLE, 0, SECOND_NS // 20, 0, gpu=FIRST.uuid)
    await eventually(lambda: not report(agent).gpu_busy)
    after = report(agent)
    assert after.last_gpu_activity is not None
    assert abs(after.last_gpu_activity - time.time()) < 5
    assert after.gpu_seconds == pytest.approx(0.05)


async def test_process_gets_no_lease_and_no_order(agent: Agent) -> None:
    first, second = await process(agent, shared(agent)), await process(agent, shared(agent, "bob"))
    for peer in (first, second):
        peer.send(Kind.MEMORY, 0, 12 * GIB, gpu=FIRST.uuid)
        peer.send(Kind.BUSY, 0, gpu=FIRST.uuid)
    await first.quiet()
    await second.quiet(0.01)
    assert report(agent).gpu_busy
    assert report(agent, "bob").gpu_busy
    assert agent.node.report().gpus[0].waiting == 0


async def test_death_in_a_burst_ends_it(agent: Agent, eventually: Eventually) -> None:
    peer = await process(agent, shared(agent))
    peer.send(Kind.BUSY, 0, gpu=FIRST.uuid)
    await eventually(lambda: report(agent).gpu_busy)
    peer.close()
    await eventually(lambda: not report(agent).gpu_busy)
    after = report(agent)
    assert (after.processes, after.memory_bytes) == (0, 0)
    assert after.last_gpu_activity is not None
    assert abs(after.last_gpu_activity - time.time()) < 5


@pytest.mark.parametrize(
    ("kind", "fields", "gpu"),
    [
        (Kind.REQUEST, (0, GIB, 1), FIRST.uuid),
        (Kind.RELEASE, (1, 0, 0), FIRST.uuid),
        (Kind.RESERVE, (GIB, 0, GIB, 1), FIRST.uuid),
        (Kind.PAGED_OUT, (GIB, 1, 0), FIRST.uuid),
        (Kind.BUSY, (7,), FIRST.uuid),
        (Kind.IDLE, (2**64 - 1, 0, 0), FIRST.uuid),
        (Kind.BUSY, (0,), SECOND.uuid),
        (Kind.SUSPEND_READY, (0, 0, 0, 0, 0, 1), None),
        (Kind.QUERY, (), None),
    ],
)
async def test_frame_that_has_no_place_there_ends_only_its_connection(
    agent: Agent, kind: Kind, fields: tuple[int, ...], gpu: str | None
) -> None:
    path = shared(agent)
    good, bad = await process(agent, path), await process(agent, path)
    bad.send(kind, *fields, gpu=gpu)
    assert await bad.ended() == NOT_ALLOWED
    good.send(Kind.BUSY, 0, gpu=FIRST.uuid)
    await good.quiet(0.05)
    assert report(agent).gpu_busy
    assert report(agent).processes == 1


async def test_process_with_another_engine_is_refused_before_it_waits_for_a_lease(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    peer = Peer(shared(agent))
    agent.peers.append(peer)
    await peer.connect(None)
    peer.send(Kind.HELLO, Role.CUDA, 1, 100, Feature.PACE | Feature.RESERVE)
    assert await peer.ended() == NOT_ALLOWED
    assert "is GPUSHARE_ENGINE unset?" in caplog.text
    assert report(agent).processes == 0


async def test_claims_of_gpu_time_and_memory_stay_within_what_is_possible(agent: Agent, eventually: Eventually) -> None:
    peer = await process(agent, shared(agent))
    peer.send(Kind.MEMORY, 2**64 - 1, 2**64 - 1, gpu=FIRST.uuid)
    peer.send(Kind.IDLE, 0, 2**64 - 1, 2**64 - 1, gpu=FIRST.uuid)
    await eventually(lambda: report(agent).last_gpu_activity is not None)
    seen = report(agent)
    assert seen.gpu_seconds < 5
    assert seen.memory_bytes == 16 * GIB
    assert seen.last_gpu_activity is not None
    assert abs(seen.last_gpu_activity - time.time()) < 5


async def test_flood_of_bursts_delays_no_other_session_and_ends_as_it_was_reported(
    agent: Agent, eventually: Eventually
) -> None:
    path = shared(agent)
    flooding = [await process(agent, path) for _ in range(4)]
    neighbour = await agent.peer(agent.open("bob", gpus=(SECOND.uuid,)))
    frames = [Frame(kind, (0, 2**64 - 1, 0), gpu_bytes(FIRST.uuid)).pack() for kind in (Kind.BUSY, Kind.IDLE)]
    end, waits = time.monotonic() + 0.5, []
    while time.monotonic() < end:
        for peer in flooding:
            with contextlib.suppress(BlockingIOError):
                for number in range(50):
                    peer.send_raw(frames[number % 2])
        began = time.monotonic()
        neighbour.send(Kind.REQUEST, 1000, 0, 1, gpu=SECOND.uuid)
        lease = (await neighbour.until(Kind.GRANT)).fields[0]
        waits.append(time.monotonic() - began)
        neighbour.send(Kind.RELEASE, lease, 0, 0, gpu=SECOND.uuid)
    assert sorted(waits)[len(waits) // 2] < 0.2
    flooded = report(agent)
    assert flooded.gpu_seconds <= 4 * (time.time() - flooded.opened_at)
    for peer in flooding:
        peer.close()
    await eventually(lambda: report(agent).processes == 0)
    assert not report(agent).gpu_busy


async def test_memory_takes_nothing_of_the_host_memory_that_other_sessions_may_use(agent: Agent) -> None:
    def needed() -> int:
        memory = agent.node.report().host_memory
        assert memory is not None
        return memory.needed_bytes

    agent.open("bob", gpus=(SECOND.uuid,))
    before = needed()
    peer = await process(agent, shared(agent, share_units=100))
    peer.send(Kind.MEMORY, 0, 64 * GIB, gpu=FIRST.uuid)
    await peer.quiet()
    assert report(agent).memory_bytes == 16 * GIB
    assert needed() == before


async def test_new_agent_takes_up_the_work_that_goes_on(agent: Agent, eventually: Eventually) -> None:
    path = shared(agent)
    peer = await process(agent, path)
    peer.send(Kind.BUSY, 0, gpu=FIRST.uuid)
    await eventually(lambda: report(agent).gpu_busy)
    await agent.stop()
    stopped_at = time.time()
    await agent.start()
    between = report(agent)
    assert between.layer is LayerName.TIME_SLICING
    assert not between.gpu_busy
    assert between.last_gpu_activity is not None
    assert between.last_gpu_activity >= stopped_at - 0.1
    again = await process(agent, path)
    again.send(Kind.BUSY, 0, gpu=FIRST.uuid)
    await eventually(lambda: report(agent).gpu_busy)
    assert report(agent).gpu_seconds >= between.gpu_seconds > 0


async def test_session_that_is_opened_again_begins_without_work(agent: Agent, eventually: Eventually) -> None:
    peer = await process(agent, shared(agent))
    peer.send(Kind.IDLE, 0, 1, 0, gpu=FIRST.uuid)
    await eventually(lambda: report(agent).last_gpu_activity is not None)
    session = agent.node.sessions["ada"]
    agent.node.registry.reopen(session, session.record.request)
    assert report(agent).last_gpu_activity is None
    assert report(agent).gpu_seconds == 0


async def test_burst_withdraws_the_notice_of_a_stop_for_idleness(agent: Agent, eventually: Eventually) -> None:
    path = shared(agent)
    peer, observer = await process(agent, path), await agent.peer(path, Role.NOTEBOOK)
    notice = Notice(tier=Tier.STOPPED, at=time.time() + 60, reason="idle", effective_units=0)
    agent.node.requests.notify(NoticeRequest.of("ada", notice))
    assert present((await observer.changed()).notice).tier is Tier.STOPPED
    peer.send(Kind.BUSY, 0, gpu=FIRST.uuid)
    assert (await observer.changed()).notice is None
    assert report(agent).notice is None


async def test_observer_is_told_of_memory_and_gpu_time_by_process(agent: Agent) -> None:
    path = shared(agent)
    peer = await process(agent, path)
    peer.send(Kind.MEMORY, 0, GIB, gpu=FIRST.uuid)
    peer.send(Kind.BUSY, 0, gpu=FIRST.uuid)
    await peer.quiet()
    observer = Peer(path)
    agent.peers.append(observer)
    await observer.connect(Role.OBSERVER, Feature.RESERVE | Feature.USE)
    observer.send(Kind.QUERY)
    memory = await observer.until(Kind.SESSION_MEMORY)
    assert memory.fields[0] == SessionMemoryTopic.PROCESS
    assert memory.fields[2] == GIB
    uses: Mapping[int, int] = {
        frame.fields[0]: frame.fields[1] for frame in [await observer.until(Kind.USE) for _ in range(2)]
    }
    assert all(used > SECOND_NS // 20 for used in uses.values())
    status = await observer.until(Kind.STATUS)
    assert status.fields[5] == GIB
    server = await agent.peer(path, Role.NOTEBOOK)
    said = await server.status()
    (gpu,), (shown,) = said.gpus, said.processes
    assert (gpu.memory_bytes, gpu.resident_bytes, gpu.lease, said.idle_seconds) == (GIB, GIB, "none", 0)
    assert (gpu.sessions, gpu.sessions_with_work, shown.memory_bytes) == (1, 1, GIB)
    assert gpu.utilisation
    assert shown.utilisation
