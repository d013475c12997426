"""The session socket from the notebook's side, as docs/reference/protocol.md says."""

from __future__ import annotations

import asyncio
import os
import time

from gpushare_spawner.agent.session_socket import MALFORMED, NOT_ALLOWED, SESSION_CLOSED, WRONG_VERSION
from gpushare_spawner.agent.sessions.conversation import AGENT_FEATURES
from gpushare_spawner.model.control import NoticeRequest, TierRequest
from gpushare_spawner.model.frames import Feature, Frame, Kind, Role, gpu_bytes
from gpushare_spawner.model.layers import MemoryEngine
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import IdleCause, Tier
from gpushare_spawner.model.share_status import PendingAction
from tests.agent.conftest import Agent, Eventually
from tests.agent.peers import FIRST, GIB, SECOND, Peer


async def test_hello_is_answered_with_the_share_and_its_gpus(agent: Agent) -> None:
    path = agent.open(gpus=(FIRST.uuid, SECOND.uuid), share_units=100, memory_limit="50%")
    peer = Peer(path)
    agent.peers.append(peer)
    welcome, *devices = await peer.connect()
    assert welcome.fields[:6] == (100, 0, 100, 0, 1, 2)
    assert [(device.gpu, device.fields[:2]) for device in devices] == [
        (gpu_bytes(gpu.uuid), (8 * GIB, 16 * GIB)) for gpu in (FIRST, SECOND)
    ]
    assert [frame.serial for frame in (welcome, *devices)] == [1, 2, 3]


async def test_feature_bits_of_hello_are_kept_and_unknown_bits_are_ignored(agent: Agent) -> None:
    path = agent.open()
    older, newer = Peer(path), Peer(path)
    agent.peers += [older, newer]
    await older.connect()
    welcome, *_ = await newer.connect(features=Feature.PACE | Feature.RESERVE | 1 << 63)
    assert welcome.fields[6] == AGENT_FEATURES
    features = {connection.features for connection in agent.node.sessions["ada"].cuda}
    assert features == {Feature(0), Feature.PACE | Feature.RESERVE}


async def test_without_oversubscription_no_more_than_the_gpu_is_shown(agent: Agent) -> None:
    peer = Peer(agent.open(oversubscribe=False, memory_limit="200%"))
    agent.peers.append(peer)
    welcome, device = await peer.connect()
    assert welcome.fields[4] == 0
    assert device.fields[:2] == (16 * GIB, 4 * GIB)


async def test_engine_suspend_converts_no_memory_and_shows_no_more_than_the_gpu(agent: Agent) -> None:
    peer = Peer(agent.open(engine=MemoryEngine.SUSPEND, memory_limit="200%"))
    agent.peers.append(peer)
    welcome, device = await peer.connect()
    assert welcome.fields[4] == 0
    assert device.fields[:2] == (16 * GIB, 4 * GIB)
    assert agent.node.report().sessions[0].engine is MemoryEngine.SUSPEND


async def test_observer_hears_whether_its_session_is_suspended_and_why_not(agent: Agent) -> None:
    path = agent.open(engine=MemoryEngine.SUSPEND)
    observer = Peer(path)
    agent.peers.append(observer)
    await observer.connect(Role.NOTEBOOK)
    session = agent.node.sessions["ada"]
    session.suspended, session.not_suspendable = True, "It has managed memory."
    status = await observer.status()
    assert (status.suspended, status.not_suspendable) == (True, "It has managed memory.")
    report = agent.node.report().sessions[0]
    assert (report.suspended, report.not_suspendable) == (True, "It has managed memory.")


async def test_a_lease_from_request_to_release(agent: Agent) -> None:
    peer = await agent.peer(agent.open())
    peer.send(Kind.MEMORY, 2 * GIB, 0, gpu=FIRST.uuid)
    peer.send(Kind.REQUEST, 2 * GIB, 0, 1, gpu=FIRST.uuid)
    grant = await peer.expect(Kind.GRANT)
    lease = grant.fields[0]
    assert lease != 0
    assert grant.gpu == gpu_bytes(FIRST.uuid)
    session = agent.node.report().sessions[0]
    assert (session.gpu_busy, session.waiting, session.memory_bytes, session.processes) == (True, False, 2 * GIB, 1)
    await asyncio.sleep(0.05)
    peer.send(Kind.IDLE, lease, 20_000_000, 0, gpu=FIRST.uuid)
    peer.send(Kind.RELEASE, lease, 20_000_000, 0, gpu=FIRST.uuid)
    await peer.quiet()
    session = agent.node.report().sessions[0]
    assert not session.gpu_busy
    assert session.last_gpu_activity is not None
    assert abs(session.last_gpu_activity - time.time()) < 5
    assert 0.01 < session.gpu_seconds < 1


async def test_what_does_not_fit_is_handed_over(agent: Agent) -> None:
    """Two sessions of 12 GiB on 16: the idle holder gives way, and its pages go out after its release."""
    first, second = await agent.peer(agent.open("ada")), await agent.peer(agent.open("bob"))
    first.send(Kind.REQUEST, 12 * GIB, 0, 1, gpu=FIRST.uuid)
    lease = (await first.expect(Kind.GRANT)).fields[0]
    first.send(Kind.IDLE, lease, 1000, 0, gpu=FIRST.uuid)
    second.send(Kind.REQUEST, 12 * GIB, 0, 1, gpu=FIRST.uuid)
    revoke = await first.expect(Kind.REVOKE)
    assert revoke.fields[0] == lease
    assert revoke.fields[1] >= 8 * GIB
    assert agent.node.report().gpus[0].waiting == 1
    first.send(Kind.RELEASE, lease, 1000, 1, gpu=FIRST.uuid)
    first.send(Kind.PAGED_OUT, revoke.fields[1], 500_000_000, lease, gpu=FIRST.uuid)
    await second.expect(Kind.GRANT)
    assert agent.node.report().gpus[0].waiting == 0


async def test_a_holder_that_dies_inside_a_burst_hands_over(agent: Agent) -> None:
    first, second = await agent.peer(agent.open("ada")), await agent.peer(agent.open("bob"))
    first.send(Kind.REQUEST, 12 * GIB, 0, 1, gpu=FIRST.uuid)
    await first.expect(Kind.GRANT)
    second.send(Kind.REQUEST, 12 * GIB, 0, 1, gpu=FIRST.uuid)
    await second.quiet()
    first.close()
    await second.until(Kind.GRANT, timeout=2)


async def test_a_burst_brings_a_released_session_back_before_it_is_granted(agent: Agent) -> None:
    path = agent.open()
    peer, observer = await agent.peer(path), await agent.peer(path, Role.OBSERVER)
    agent.node.requests.tier(TierRequest(id="ada", tier=Tier.RELEASED, effective_units=0, reason="idle"))
    assert (await peer.until(Kind.TIER)).fields[:4] == (2, 0, 0, 0)
    assert (await observer.until(Kind.TIER)).fields[:4] == (2, 0, 0, 0)
    peer.send(Kind.REQUEST, GIB, 0, 1, gpu=FIRST.uuid)
    assert (await peer.until(Kind.TIER)).fields[:4] == (0, 25, 0, 25)
    await peer.until(Kind.GRANT)
    assert (await observer.until(Kind.TIER)).fields[:4] == (0, 25, 0, 25)
    session = agent.node.report().sessions[0]
    assert (session.tier, session.effective_units, session.guaranteed_units) == (Tier.ACTIVE, 25, 25)


async def test_the_borrower_is_told_when_the_owner_is_back(agent: Agent) -> None:
    agent.open("filler", share_units=75)
    owner = await agent.peer(agent.open("ada"))
    agent.node.requests.tier(TierRequest(id="ada", tier=Tier.RELEASED, effective_units=0, reason="idle"))
    borrower = await agent.peer(agent.open("bob", borrowed_units=25))
    assert agent.node.report().session("bob").guaranteed_units == 25  # type: ignore[union-attr]
    owner.send(Kind.REQUEST, GIB, 0, 1, gpu=FIRST.uuid)
    assert (await borrower.until(Kind.TIER)).fields[:4] == (0, 25, 25, 0)
    assert (await owner.until(Kind.TIER, timeout=2)).fields[1] == 0  # the downgrade, told first
    assert (await owner.until(Kind.TIER)).fields[:4] == (0, 25, 0, 25)


async def test_notebook_servers_see_notices_also_those_made_before_they_came(agent: Agent) -> None:
    path = agent.open()
    first = await agent.peer(path, Role.NOTEBOOK)
    at = time.time() + 300
    step = Notice(tier=Tier.STOPPED, at=at, reason="too old", cause=IdleCause.MAX_AGE, after_seconds=86400)
    agent.node.requests.notify(NoticeRequest.of("ada", step))
    later = await agent.peer(path, Role.NOTEBOOK)
    for status in (await first.changed(), await later.status()):
        assert status.notice == PendingAction(Tier.STOPPED, at, 0, IdleCause.MAX_AGE, 86400)
    agent.node.requests.notify(NoticeRequest(id="ada", tier=None))
    assert (await first.changed()).notice is None


async def test_a_burst_takes_a_notice_back(agent: Agent) -> None:
    path = agent.open()
    peer, observer = await agent.peer(path), await agent.peer(path, Role.NOTEBOOK)
    agent.node.requests.notify(NoticeRequest(id="ada", tier=Tier.RELEASED, at=time.time() + 60, reason="idle"))
    assert (await observer.changed()).notice is not None
    peer.send(Kind.REQUEST, GIB, 0, 1, gpu=FIRST.uuid)
    assert (await observer.changed()).notice is None
    assert agent.node.report().sessions[0].notice is None


async def test_query_is_answered_for_each_gpu(agent: Agent) -> None:
    path = agent.open(gpus=(FIRST.uuid, SECOND.uuid), share_units=100)
    peer, server, nvml = [await agent.peer(path, role) for role in (Role.CUDA, Role.NOTEBOOK, Role.OBSERVER)]
    status = await server.status()
    assert [gpu.uuid for gpu in status.gpus] == [FIRST.uuid, SECOND.uuid]
    assert (status.share_units, status.tier, status.effective_units) == (100, Tier.ACTIVE, 100)
    assert (status.gpus[0].lease, status.gpus[0].limit_bytes, status.idle_seconds) == ("none", 16 * GIB, None)
    peer.send(Kind.REQUEST, 3 * GIB, 0, 1, gpu=SECOND.uuid)
    await peer.expect(Kind.GRANT)
    at = time.time() + 300
    agent.node.requests.notify(NoticeRequest(id="ada", tier=Tier.DOWNGRADED, at=at, effective_units=10, reason="idle"))
    status = await server.changed()
    first, second = status.gpus
    assert (first.lease, second.lease, second.memory_bytes) == ("none", "held", 3 * GIB)
    assert (status.idle_seconds, second.sessions, second.sessions_with_work) == (0, 1, 1)
    assert status.notice == PendingAction(Tier.DOWNGRADED, at, 10)
    nvml.send(Kind.QUERY)
    frames = [await nvml.until(Kind.STATUS) for _ in range(2)]
    assert [frame.gpu for frame in frames] == [gpu_bytes(FIRST.uuid), gpu_bytes(SECOND.uuid)]
    assert [(frame.fields[5], frame.fields[7]) for frame in frames] == [(0, 16 * GIB), (3 * GIB, 16 * GIB)]


async def test_kernels_go_into_the_report(agent: Agent) -> None:
    observer = await agent.peer(agent.open(), Role.NOTEBOOK)
    assert agent.node.report().sessions[0].kernels is None
    now = time.time_ns()
    observer.send(Kind.KERNELS, 1, 3, now)
    await observer.status()
    session = agent.node.report().sessions[0]
    assert (session.kernels, session.kernels_busy) == (3, 1)
    assert session.last_kernel_activity == now / 10**9
    observer.send(Kind.KERNELS, 0, 2**63, now + 10**18)  # nonsense is cut to what can be
    await observer.status()
    session = agent.node.report().sessions[0]
    assert session.last_kernel_activity is not None
    assert session.last_kernel_activity <= time.time()


async def test_a_closed_session_says_so(agent: Agent) -> None:
    path = agent.open()
    peer, observer = await agent.peer(path), await agent.peer(path, Role.OBSERVER)
    agent.node.registry.end("ada", "closed")
    assert await peer.ended() == SESSION_CLOSED
    assert await observer.ended() == SESSION_CLOSED
    assert not os.path.exists(path)


async def test_frames_out_of_turn_end_the_connection_and_nothing_else(agent: Agent) -> None:
    path = agent.open()
    bystander = await agent.peer(path)

    async def outcome(role: Role | None, *frames: Frame) -> int | None:
        peer = await agent.peer(path, role)
        for frame in frames:
            peer.send_raw(frame.pack())
        return await peer.ended()

    mine, other = gpu_bytes(FIRST.uuid), gpu_bytes(SECOND.uuid)
    assert await outcome(None, Frame(Kind.REQUEST, (1, 0, 1), mine)) == MALFORMED
    assert await outcome(None, Frame(Kind.HELLO, (4,))) == MALFORMED
    assert await outcome(Role.CUDA, Frame(Kind.HELLO, (1,))) == MALFORMED
    assert await outcome(Role.CUDA, Frame(Kind.REQUEST, (1, 0, 1), other)) == NOT_ALLOWED
    assert await outcome(Role.CUDA, Frame(Kind.GRANT, (1,), mine)) == NOT_ALLOWED
    assert await outcome(Role.OBSERVER, Frame(Kind.REQUEST, (1, 0, 1), mine)) == NOT_ALLOWED
    bystander.send(Kind.REQUEST, GIB, 0, 1, gpu=FIRST.uuid)
    await bystander.expect(Kind.GRANT)


async def test_short_long_and_foreign_packets(agent: Agent, eventually: Eventually) -> None:
    path = agent.open()
    good = Frame(Kind.HELLO, (1,), serial=1).pack()
    for packet, code in [
        (good[:127], MALFORMED),
        (good + b"\0", MALFORMED),
        (good * 100, MALFORMED),
        (b"x", MALFORMED),
        (b"X" + good[1:], MALFORMED),
        (good[:4] + b"\2\0" + good[6:], WRONG_VERSION),
        (good[:6] + b"\x63\0" + good[8:], MALFORMED),
    ]:
        peer = await agent.peer(path, None)
        peer.send_raw(packet)
        assert await peer.ended() == code, packet[:8]
    empty = await agent.peer(path, None)
    empty.send_raw(b"")
    assert await empty.ended() is None
    assert agent.node.report().sessions[0].processes == 0
