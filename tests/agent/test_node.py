"""Sessions come, change and go; the agent counts for itself, whatever the hub believed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from gpushare_spawner.agent.gpus.nvml import Gpu, GpuState
from gpushare_spawner.agent.periodic import RoundSettings
from gpushare_spawner.model.control import ConfirmRequest, ControlRefused, NoticeRequest, TierRequest
from gpushare_spawner.model.frames import Kind, Role
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.share import Tier
from tests.agent.conftest import LIBRARIES, Agent, Eventually, request_for
from tests.agent.peers import FIRST, GIB, SECOND


def session(agent: Agent, id: str = "ada") -> SessionReport:
    found = agent.node.report().session(id)
    assert found is not None
    return found


def refusal(agent: Agent, id: str = "ada", **changes: Any) -> str:
    before = agent.node.report().sessions
    with pytest.raises(ControlRefused) as refused:
        agent.open(id, **changes)
    assert [one.id for one in agent.node.report().sessions] == [one.id for one in before]
    return refused.value.code


def to_tier(agent: Agent, id: str, tier: Tier, units: int, **changes: Any) -> None:
    agent.node.requests.tier(TierRequest(id=id, tier=tier, effective_units=units, reason="idle", **changes))


async def test_open_returns_the_environment(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMGPU_STATE", "/dev/shm/simgpu-test")
    environment = agent.node.requests.open(request_for()).environment
    socket = environment.pop("GPUSHARE_SOCKET")
    assert environment == {
        "LD_PRELOAD": str(LIBRARIES.preload),
        "LD_LIBRARY_PATH": str(LIBRARIES.simulated_driver),
        "SIMGPU_STATE": "/dev/shm/simgpu-test",
        "CUDA_VISIBLE_DEVICES": FIRST.uuid,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    folder = os.path.dirname(socket)
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert os.stat(folder).st_uid == os.getuid()


async def test_a_new_session_is_unconfirmed_and_active(agent: Agent) -> None:
    agent.open()
    now = session(agent)
    assert (now.confirmed, now.pid, now.tier, now.last_gpu_activity) == (False, None, Tier.ACTIVE, None)
    assert (now.share_units, now.effective_units, now.guaranteed_units, now.memory_limit_bytes) == (
        25,
        25,
        25,
        16 * GIB,
    )


async def test_no_more_than_the_capacity_is_guaranteed(agent: Agent) -> None:
    for user in ("a", "b", "c", "d"):
        agent.open(user)
    assert refusal(agent, "e") == "no-capacity"
    agent.open("e", gpus=(SECOND.uuid,))
    agent.node.registry.end("b", "closed")
    agent.open("f")


async def test_lent_units_are_only_for_those_who_say_that_they_borrow(agent: Agent) -> None:
    agent.open("owner", share_units=100)
    to_tier(agent, "owner", Tier.RELEASED, 0)
    assert refusal(agent, "guest") == "no-capacity"
    agent.open("guest", borrowed_units=25)
    assert session(agent, "guest").guaranteed_units == 25
    to_tier(agent, "owner", Tier.ACTIVE, 100)
    assert session(agent, "guest").guaranteed_units == 0
    assert refusal(agent, "late", borrowed_units=25) == "no-capacity"


async def test_borrowed_units_become_owned_when_their_owner_leaves(agent: Agent) -> None:
    agent.open("owner", share_units=100)
    to_tier(agent, "owner", Tier.RELEASED, 0)
    agent.open("first", borrowed_units=25)
    agent.open("second", borrowed_units=25)
    peer = await agent.peer(agent.node.requests.open(request_for("second")).environment["GPUSHARE_SOCKET"])
    agent.node.registry.end("owner", "closed")
    assert [(one.id, one.borrowed_units, one.guaranteed_units) for one in agent.node.report().sessions] == [
        ("first", 0, 25),
        ("second", 0, 25),
    ]
    assert (await peer.expect(Kind.TIER)).fields[:4] == (0, 25, 0, 25)


async def test_overcommit_guarantees_more_than_there_is(agent: Agent) -> None:
    await agent.stop()
    await agent.start(capacity_units=150)
    agent.open("a", share_units=100)
    agent.open("b", share_units=50)
    assert refusal(agent, "c", share_units=1) == "no-capacity"
    assert agent.node.report().gpus[0].capacity_units == 150


async def test_opening_the_same_again_is_no_error_and_another_is(agent: Agent) -> None:
    path = agent.open()
    agent.node.requests.confirm(ConfirmRequest(id="ada", pid=os.getpid()))
    to_tier(agent, "ada", Tier.RELEASED, 0)
    assert agent.open() == path
    assert (session(agent).tier, session(agent).confirmed) == (Tier.ACTIVE, False)
    assert refusal(agent, share_units=50) == "exists"
    assert refusal(agent, gpus=(SECOND.uuid,)) == "exists"


async def test_a_session_that_is_opened_again_has_no_past(agent: Agent) -> None:
    path = agent.open()
    peer = await agent.peer(path)
    peer.send(Kind.REQUEST, GIB, 0, 1, gpu=FIRST.uuid)
    lease = (await peer.expect(Kind.GRANT)).fields[0]
    await asyncio.sleep(0.05)
    peer.send(Kind.RELEASE, lease, 50_000_000, 0, gpu=FIRST.uuid)
    await peer.quiet(0.05)
    assert session(agent).gpu_seconds > 0.02
    agent.open()
    assert (session(agent).last_gpu_activity, session(agent).gpu_seconds) == (None, 0.0)
    peer.send(Kind.REQUEST, GIB, 0, 1, gpu=FIRST.uuid)
    lease = (await peer.until(Kind.GRANT)).fields[0]
    await asyncio.sleep(0.03)
    peer.send(Kind.RELEASE, lease, 30_000_000, 0, gpu=FIRST.uuid)
    await peer.quiet(0.05)
    assert session(agent).last_gpu_activity is not None
    assert 0.01 < session(agent).gpu_seconds < 0.05


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"gpus": ("GPU-no",)}, "unknown-gpu"),
        ({"gpus": (FIRST.uuid, SECOND.uuid), "last_units": 25}, "bad-request"),
        ({"gpus": (FIRST.uuid, FIRST.uuid), "share_units": 100}, "bad-request"),
        ({"borrowed_units": 26}, "bad-request"),
        ({"uid": -1}, "bad-request"),
        ({"memory_limit": "0"}, "bad-request"),
    ],
)
async def test_requests_that_make_no_sense(agent: Agent, changes: dict[str, Any], code: str) -> None:
    assert refusal(agent, **changes) == code


async def test_an_agent_that_is_not_root_serves_its_own_user(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert refusal(agent, uid=1001) == "bad-request"


async def test_a_sick_gpu_takes_nobody_and_is_reported(agent: Agent, eventually: Eventually) -> None:
    agent.open("before")
    agent.source.states[FIRST.uuid] = GpuState(healthy=False)
    await eventually(lambda: not agent.node.report().gpus[0].healthy)
    assert refusal(agent) == "unhealthy-gpu"
    assert session(agent, "before").guaranteed_units == 25
    agent.source.states[FIRST.uuid] = GpuState(
        healthy=True, memory_used_bytes=GIB, temperature_celsius=61, power_watts=233.5
    )
    await eventually(lambda: agent.node.report().gpus[0].healthy)
    gpu = agent.node.report().gpus[0]
    assert (gpu.memory_used_bytes, gpu.temperature_celsius, gpu.power_watts) == (GIB, 61, 233.5)
    agent.open()


async def test_a_driver_that_hangs_is_reported_and_does_not_stop_the_agent(
    agent: Agent, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def hangs(gpu: Gpu) -> GpuState:
        answers.wait(30)
        return GpuState(healthy=True)

    await agent.stop()
    await agent.start(rounds=RoundSettings(check_every=0.05, poll_every=0.05, answer_within=0.2, well_after=0.0))
    monkeypatch.setattr(agent.source, "state", hangs)
    await eventually(lambda: not agent.node.report().gpus[0].healthy)
    assert refusal(agent) == "unhealthy-gpu"
    answers.set()
    await eventually(lambda: agent.node.report().gpus[0].healthy)
    agent.open()


async def test_the_downgrade_is_refused_after_a_burst(agent: Agent) -> None:
    peer = await agent.peer(agent.open())
    decided = time.time()
    peer.send(Kind.REQUEST, GIB, 0, 1, gpu=FIRST.uuid)
    lease = (await peer.expect(Kind.GRANT)).fields[0]
    with pytest.raises(ControlRefused, match="worked on the GPU") as refused:  # it runs
        to_tier(agent, "ada", Tier.RELEASED, 0, if_idle_since=decided)
    assert refused.value.code == "busy"
    peer.send(Kind.RELEASE, lease, 1000, 0, gpu=FIRST.uuid)
    await peer.quiet(0.05)
    with pytest.raises(ControlRefused):  # it ran
        to_tier(agent, "ada", Tier.RELEASED, 0, if_idle_since=decided)
    to_tier(agent, "ada", Tier.RELEASED, 0, if_idle_since=time.time())
    assert session(agent).tier is Tier.RELEASED


async def test_tiers_and_units_that_do_not_go_together(agent: Agent) -> None:
    agent.open()
    for tier, units in ((Tier.ACTIVE, 24), (Tier.RELEASED, 1), (Tier.DOWNGRADED, 26)):
        with pytest.raises(ControlRefused) as refused:
            to_tier(agent, "ada", tier, units)
        assert refused.value.code == "bad-request"
    with pytest.raises(ControlRefused) as refused:
        to_tier(agent, "nobody", Tier.RELEASED, 0)
    assert refused.value.code == "unknown-session"


async def test_pages_of_a_released_session_leave_when_a_neighbour_needs_the_memory(agent: Agent) -> None:
    peer = await agent.peer(agent.open())
    peer.send(Kind.REQUEST, 10 * GIB, 0, 1, gpu=FIRST.uuid)
    lease = (await peer.expect(Kind.GRANT)).fields[0]
    peer.send(Kind.RELEASE, lease, 1000, 0, gpu=FIRST.uuid)
    to_tier(agent, "ada", Tier.DOWNGRADED, 10)
    assert (await peer.expect(Kind.TIER)).fields[:4] == (1, 10, 0, 10)
    await peer.quiet(0.05)
    to_tier(agent, "ada", Tier.RELEASED, 0)
    await peer.expect(Kind.TIER)
    await peer.quiet(0.05)
    assert session(agent).resident_bytes == 10 * GIB
    other = await agent.peer(agent.open("bob"))
    other.send(Kind.REQUEST, 8 * GIB, 0, 1, gpu=FIRST.uuid)
    await other.until(Kind.GRANT)
    page_out = await peer.until(Kind.PAGE_OUT)
    assert page_out.fields[0] == 2 * GIB
    peer.send(Kind.PAGED_OUT, 2 * GIB, 1_000_000, 0, gpu=FIRST.uuid)
    await peer.quiet(0.05)
    assert (session(agent).memory_bytes, session(agent).resident_bytes) == (10 * GIB, 8 * GIB)


async def test_an_announced_step_is_gone_once_it_was_taken(agent: Agent) -> None:
    agent.open()
    agent.node.requests.notify(NoticeRequest(id="ada", tier=Tier.DOWNGRADED, at=5, effective_units=10, reason="idle"))
    notice = session(agent).notice
    assert notice is not None
    assert (notice.tier, notice.at, notice.reason, notice.effective_units) == (Tier.DOWNGRADED, 5, "idle", 10)
    to_tier(agent, "ada", Tier.DOWNGRADED, 10)
    assert session(agent).notice is None


async def test_unconfirmed_sessions_are_dropped(agent: Agent, eventually: Eventually) -> None:
    agent.open("slow", confirm_within=0.2)
    agent.open("quick", confirm_within=0.2)
    agent.node.requests.confirm(ConfirmRequest(id="quick", pid=os.getpid()))
    await eventually(lambda: agent.node.report().session("slow") is None)
    assert session(agent, "quick").confirmed


async def test_a_session_ends_with_its_server(agent: Agent, eventually: Eventually) -> None:
    server = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        path = agent.open()
        agent.node.requests.confirm(ConfirmRequest(id="ada", pid=server.pid))
        assert session(agent).pid == server.pid
        peer = await agent.peer(path)
        server.kill()
        # not yet waited for: a zombie is gone too
        await eventually(lambda: agent.node.report().session("ada") is None)
        assert await peer.ended() == 4
    finally:
        server.kill()
        server.communicate()


async def test_confirming_what_is_not_there(agent: Agent) -> None:
    agent.open()
    server = subprocess.Popen(["true"])
    server.wait()
    with pytest.raises(ControlRefused) as refused:
        agent.node.requests.confirm(ConfirmRequest(id="ada", pid=server.pid))
    assert refused.value.code == "bad-request"
    assert not session(agent).confirmed
    with pytest.raises(ControlRefused) as refused:
        agent.node.requests.confirm(ConfirmRequest(id="nobody", pid=os.getpid()))
    assert refused.value.code == "unknown-session"


async def test_closing_frees_the_units_and_is_idempotent(agent: Agent) -> None:
    path = agent.open(share_units=100)
    agent.node.registry.end("ada", "closed")
    agent.node.registry.end("ada", "closed")
    agent.node.registry.end("nobody", "closed")
    assert not os.path.exists(os.path.dirname(path))
    agent.open("bob", share_units=100)


async def test_a_restart_keeps_sessions_tiers_and_activity(agent: Agent) -> None:
    path = agent.open()
    agent.node.requests.confirm(ConfirmRequest(id="ada", pid=os.getpid()))
    agent.open("owner", share_units=75)
    peer = await agent.peer(path)
    peer.send(Kind.REQUEST, GIB, 0, 1, gpu=FIRST.uuid)
    lease = (await peer.expect(Kind.GRANT)).fields[0]
    await asyncio.sleep(0.05)
    peer.send(Kind.RELEASE, lease, 50_000_000, 0, gpu=FIRST.uuid)
    await peer.quiet(0.05)
    to_tier(agent, "ada", Tier.DOWNGRADED, 10)
    agent.node.requests.notify(NoticeRequest(id="ada", tier=Tier.RELEASED, at=10**10, reason="idle"))
    before = agent.node.report()

    await agent.stop()
    assert await peer.ended() is None  # no ERROR: it shall come back
    await agent.start()

    after = agent.node.report()
    for old, new in zip(before.sessions, after.sessions, strict=True):
        assert new.last_gpu_activity == pytest.approx(old.last_gpu_activity, abs=1e-3)
        assert new.gpu_seconds == pytest.approx(old.gpu_seconds, abs=1e-3)
        same = {"last_gpu_activity", "gpu_seconds", "memory_bytes", "resident_bytes", "processes"}
        same.add("host_memory_needed_bytes")
        assert new.model_dump(exclude=same) == old.model_dump(exclude=same)
    again = await agent.peer(path)
    again.send(Kind.REQUEST, GIB, 0, 1, gpu=FIRST.uuid)
    assert (await again.until(Kind.GRANT)).fields[0] != 0
    assert session(agent).tier is Tier.ACTIVE


async def test_a_server_that_died_meanwhile_is_not_taken_up_again(agent: Agent) -> None:
    server = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    path = agent.open()
    agent.node.requests.confirm(ConfirmRequest(id="ada", pid=server.pid))
    await agent.node.requests.answer(ConfirmRequest(id="ada", pid=server.pid))
    await agent.stop()
    server.kill()
    server.communicate()
    await agent.start()
    assert agent.node.report().sessions == ()
    assert not os.path.exists(path)


async def test_a_gpu_that_is_gone_after_a_restart_leaves_its_session_in_the_report(agent: Agent) -> None:
    agent.open(gpus=(SECOND.uuid,))
    agent.open("bob")
    await agent.stop()
    agent.gpus = (FIRST,)
    await agent.start()
    assert (session(agent).gpus, session(agent).guaranteed_units) == ((SECOND.uuid,), 0)
    assert session(agent, "bob").guaranteed_units == 25
    agent.node.registry.end("ada", "closed")
    assert agent.node.report().session("ada") is None


async def test_bypassing_processes_are_reported_after_a_second_look(agent: Agent, eventually: Eventually) -> None:
    path = agent.open()
    agent.node.requests.confirm(ConfirmRequest(id="ada", pid=os.getpid()))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        agent.source.states[FIRST.uuid] = GpuState(healthy=True, processes=dict.fromkeys((child.pid, os.getpid(), 1)))
        await eventually(lambda: session(agent).bypassing_pids == tuple(sorted((os.getpid(), child.pid))))
        await agent.peer(path)  # this process has the library after all
        await eventually(lambda: session(agent).bypassing_pids == (child.pid,))
        agent.source.states[FIRST.uuid] = GpuState(healthy=True)
        await eventually(lambda: session(agent).bypassing_pids == ())
    finally:
        child.kill()
        child.communicate()


async def test_an_observer_is_no_cuda_process(agent: Agent) -> None:
    await agent.peer(agent.open(), Role.OBSERVER)
    assert session(agent).processes == 0


async def test_an_idle_session_is_not_written_again_and_again(agent: Agent, eventually: Eventually) -> None:
    """The end of its last burst is one instant, however often and with whatever clocks it is looked at."""
    settings = RoundSettings(check_every=0.02, poll_every=0.05, save_every=0.05)
    await agent.stop()
    await agent.start(rounds=settings)
    peer = await agent.peer(agent.open())
    peer.send(Kind.REQUEST, GIB, 0, gpu=FIRST.uuid)
    grant = await peer.expect(Kind.GRANT)
    peer.send(Kind.IDLE, grant.fields[0], 1_000_000, 1_000_000, gpu=FIRST.uuid)
    session = agent.node.sessions["ada"]
    await eventually(lambda: session.record.last_gpu_activity is not None and not session.record.gpu_busy)
    await eventually(lambda: not session.has_new_frames)
    saved, report = session.saved_at, agent.node.report()
    await asyncio.sleep(0.4)
    assert session.saved_at == saved
    assert agent.node.report().sessions == report.sessions
