"""Pods become sessions on their node, and tiers go both ways through annotations."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.nvml import GpuState
from gpushare_spawner.agent.kubernetes.cluster_agent import answer_in_cluster
from gpushare_spawner.clients.api import ApiFailure
from gpushare_spawner.model.control import CloseRequest, ControlRefused
from gpushare_spawner.model.controls import AskAnswer, Controls, Exemption, Keep, Message, MessageCause
from gpushare_spawner.model.frames import AskKind, Kind, Role
from gpushare_spawner.model.kubernetes.annotations import (
    SHARE,
    answers_patch,
    borrowed_patch,
    controls_patch,
    labels,
    messages_patch,
    notice_patch,
    stop_processes_patch,
    tier_patch,
)
from gpushare_spawner.model.kubernetes.container_requests import Requests, requests_patch
from gpushare_spawner.model.layers import MemoryEngine
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import NeighbourRules, Tier
from gpushare_spawner.model.share_status import AdminMessage, AgentRecord, ServiceAnswer
from tests.agent.conftest import request_for, short_folder  # noqa: F401
from tests.agent.peers import FIRST, GIB, SECOND, Peer
from tests.present import present

from .agent_account import agent_token
from .node_agent import GPU_0, NodeAgent, session
from .standin.cluster import Cluster
from .standin.faults import by_service_accounts


@pytest.fixture
async def agent(cluster: Cluster, short_folder: Path) -> AsyncIterator[NodeAgent]:  # noqa: F811
    kubelet = await cluster.make_node()
    token = await agent_token(cluster, kubelet.name)
    agent = NodeAgent(cluster, kubelet, token, short_folder)
    await agent.start()
    await agent.ready()
    yield agent
    await agent.stop()


async def test_a_pod_becomes_the_session_that_its_annotations_say(agent: NodeAgent) -> None:
    rules = NeighbourRules(("course",), ("exam",), alone=True)
    said = session("ada+lab", share=40, memory_limit="8Gi", oversubscribe=False, neighbours=rules)
    await agent.pod("jupyter-ada--lab", said)
    found = await agent.session("ada+lab")
    assert (found.user, found.server, found.template) == ("ada", "lab", "quarter-gpu")
    assert (found.gpus, found.share_units, found.effective_units) == ((FIRST.uuid,), 40, 40)
    assert found.memory_limit_bytes == 8 * GIB
    assert found.neighbours == rules
    assert found.confirmed
    peer = await agent.peer("ada+lab")
    peer.send(Kind.REQUEST, GIB, 0, gpu=FIRST.uuid)
    await peer.expect(Kind.GRANT)


async def test_engine_of_a_pods_session_is_reported_and_its_memory_stays_plain(agent: NodeAgent) -> None:
    await agent.pod("jupyter-ada", session("ada", engine=MemoryEngine.SUSPEND))
    assert (await agent.session("ada")).engine is MemoryEngine.SUSPEND
    peer = Peer(agent.environment("jupyter-ada")["GPUSHARE_SOCKET"])
    welcome, _device = await peer.connect(Role.CUDA)
    assert welcome.fields[4] == 0
    peer.close()


def is_exceeding(agent: NodeAgent, name: str) -> bool:
    return bool(present(agent.node.report().session(name)).exceeding)


async def test_named_process_of_the_pod_is_stopped_and_a_forged_name_stops_none(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "print('ready', flush=True); input()"
    async with contextlib.AsyncExitStack() as stack:
        programs = [
            subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(2)
        ]
        for program in programs:
            stack.callback(program.communicate)
            stack.callback(program.kill)
        pods = {}
        for name, program in zip(("ada", "eve"), programs, strict=True):
            await agent.running(name, memory_limit="1Gi")
            pods[program.pid] = present(agent.node.sessions[name].record.pod).uid
        cgroup = processes.cgroup
        monkeypatch.setattr(
            processes, "cgroup", lambda pid: f"/kubepods/pod{pods[pid]}/1" if pid in pods else cgroup(pid)
        )
        shown = GpuState(healthy=True, processes={program.pid: 2 * GIB for program in programs})
        agent.source.states[FIRST.uuid] = shown
        for name in ("ada", "eve"):
            await agent.until(partial(is_exceeding, agent, name))
        (of_ada,) = present(agent.node.report().session("ada")).exceeding
        notice = messages_patch(
            [Message(text="Over.", by="culler", at=1.0, cause=MessageCause.BYPASS)], MessageCause.BYPASS
        )
        await agent.annotate("eve", {**notice, **stop_processes_patch([of_ada])})
        await agent.annotate("ada", stop_processes_patch([of_ada]))
        await asyncio.sleep(1.0)
        assert [program.poll() for program in programs] == [None, None], "ada does not know of it"
        await agent.annotate("ada", {**notice, **stop_processes_patch([of_ada])})
        await agent.until(lambda: programs[0].poll() is not None)
        assert (programs[0].poll(), programs[1].poll()) == (-signal.SIGTERM, None)


async def test_the_socket_is_where_the_container_was_told(agent: NodeAgent) -> None:
    await agent.running("ada")
    peer = Peer(agent.environment("ada")["GPUSHARE_SOCKET"])
    welcome, _device = await peer.connect(Role.CUDA)
    assert welcome.fields[0] == 25
    peer.close()


async def test_two_at_once_with_the_same_share_are_told_apart(agent: NodeAgent) -> None:
    names = ["ada", "ben", "cleo", "dora"]
    await asyncio.gather(*(agent.pod(name, share=25, template=f"of-{name}") for name in names))
    for name in names:
        assert (await agent.session(name)).template == f"of-{name}"
    sockets = {agent.environment(name)["GPUSHARE_SOCKET"] for name in names}
    assert len(sockets) == 4


async def test_a_session_on_two_gpus_has_a_socket_for_each(agent: NodeAgent) -> None:
    found = await agent.running("ada", gpus=(FIRST, SECOND), share=100)
    assert found.gpus == (FIRST.uuid, SECOND.uuid)
    assert set(agent.held("ada")) == {FIRST.uuid, SECOND.uuid}
    sockets = list(agent.folder.glob("pods/*/s/gpu"))
    assert len(sockets) == 2
    # whichever of them the container was told of
    for path in sockets:
        peer = Peer(path)
        assert (await peer.connect(Role.CUDA))[0].fields[5] == 2
        peer.close()


async def test_a_tier_is_applied_within_two_seconds(agent: NodeAgent) -> None:
    await agent.running("ada")
    peer = await agent.peer("ada")
    began = time.monotonic()
    await agent.annotate("ada", tier_patch(Tier.DOWNGRADED, time.time(), 10, idle_since=time.time()))
    told = await peer.until(Kind.TIER, timeout=2.0)
    assert time.monotonic() - began < 2.0
    assert told.fields[:2] == (Tier.DOWNGRADED.depth, 10)
    found = await agent.session("ada")
    assert (found.tier, found.effective_units, found.guaranteed_units) == (Tier.DOWNGRADED, 10, 10)
    await agent.annotate("ada", tier_patch(Tier.RELEASED, time.time(), 0, idle_since=time.time()))
    assert (await peer.until(Kind.TIER, timeout=2.0)).fields[:2] == (Tier.RELEASED.depth, 0)


async def test_a_pod_that_waits_for_what_it_gave_back_is_reported_and_its_user_told(agent: NodeAgent) -> None:
    await agent.pod("ada", limits={"cpu": "1", "memory": "1Gi"})
    assert not (await agent.session("ada")).lacks_requests
    socket = agent.node.sessions["ada"].socket
    assert socket is not None
    observer = Peer(socket.path)
    await observer.connect(Role.NOTEBOOK)
    full = requests_patch(Requests(2000, 2 * GIB))
    await agent.annotate("ada", {**tier_patch(Tier.RELEASED, time.time(), 0, idle_since=time.time()), **full})
    await agent.until(lambda: agent.node.sessions["ada"].record.tier is Tier.RELEASED)
    assert not (await agent.session("ada")).lacks_requests, "a released session lacks nothing"
    await agent.annotate("ada", tier_patch(Tier.ACTIVE, time.time(), 25))
    await agent.until(lambda: present(agent.node.report().session("ada")).lacks_requests)
    assert (await observer.status()).lacks_requests
    await agent.annotate("ada", requests_patch(None))
    await agent.until(lambda: not present(agent.node.report().session("ada")).lacks_requests)
    assert not (await observer.status()).lacks_requests
    observer.close()


async def test_a_busy_session_over_quota_makes_way_and_the_one_in_quota_owns_the_units(agent: NodeAgent) -> None:
    await agent.running("over", share=100)
    peer = await agent.peer("over")
    peer.send(Kind.REQUEST, GIB, 0, gpu=FIRST.uuid)
    await peer.until(Kind.GRANT)
    kept = tier_patch(Tier.DOWNGRADED, time.time(), 40, yields_until=time.time() + 60)
    await agent.annotate("over", kept | borrowed_patch(60))
    assert (await peer.until(Kind.TIER)).fields[:4] == (Tier.DOWNGRADED.depth, 40, 60, 40)
    peer.send(Kind.REQUEST, GIB, 0, gpu=FIRST.uuid)
    assert (await agent.session("over")).yields
    owner = await agent.running("owner", share=60)
    assert (owner.borrowed_units, owner.guaranteed_units) == (0, 60)
    await until_annotated(agent, "over", Tier.ACTIVE, 100)
    said = await agent.annotations("over")
    assert (said.yields_until, said.borrowed_units) == (None, 60)
    found = await agent.session("over")
    assert (found.guaranteed_units, found.borrowed_units, found.borrowed_now) == (40, 60, 0)


async def until_annotated(agent: NodeAgent, pod: str, tier: Tier, units: int) -> None:
    for _ in range(200):
        said = await agent.annotations(pod)
        if (said.tier, said.effective_units) == (tier, units):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"the pod says {said}")


async def downgraded(agent: NodeAgent, name: str = "ada") -> Peer:
    await agent.running(name)
    peer = await agent.peer(name)
    await agent.annotate(name, tier_patch(Tier.DOWNGRADED, time.time(), 10, idle_since=time.time()))
    await peer.until(Kind.TIER)
    return peer


async def test_a_burst_restores_at_once_and_the_pod_is_patched(agent: NodeAgent) -> None:
    peer = await downgraded(agent)
    peer.send(Kind.REQUEST, GIB, 0, gpu=FIRST.uuid)
    told = await peer.expect(Kind.TIER)
    assert told.fields[:2] == (Tier.ACTIVE.depth, 25)
    await peer.expect(Kind.GRANT)
    await until_annotated(agent, "ada", Tier.ACTIVE, 25)
    said = await agent.annotations("ada")
    assert said.idle_since is None
    # what it wrote itself is no decision to follow, now or after further events of the pod
    await agent.annotate("ada", {"example.org/other": "1"})
    await asyncio.sleep(0.2)
    assert (await agent.session("ada")).tier is Tier.ACTIVE


async def test_the_restore_is_patched_as_soon_as_the_api_server_answers(agent: NodeAgent) -> None:
    peer = await downgraded(agent)
    agent.cluster.faults.fail_next("patch", "pods", "500", times=2)
    agent.cluster.faults.fail_next("patch", "pods", "lost", times=1)
    peer.send(Kind.REQUEST, GIB, 0, gpu=FIRST.uuid)
    await peer.until(Kind.GRANT)
    await until_annotated(agent, "ada", Tier.ACTIVE, 25)


async def test_an_idle_action_that_work_overtook_is_undone(agent: NodeAgent) -> None:
    await agent.running("ada")
    peer = await agent.peer("ada")
    decided_on = time.time() - 60
    peer.send(Kind.REQUEST, GIB, 0, gpu=FIRST.uuid)
    grant = await peer.expect(Kind.GRANT)
    # busy
    await agent.annotate("ada", tier_patch(Tier.RELEASED, time.time(), 0))
    await until_annotated(agent, "ada", Tier.ACTIVE, 25)
    peer.send(Kind.IDLE, grant.fields[0], 1_000_000, 1_000_000, gpu=FIRST.uuid)
    await agent.until(lambda: not agent.node.report().sessions[0].gpu_busy)
    # not busy, but later than what the service had seen
    await agent.annotate("ada", tier_patch(Tier.DOWNGRADED, time.time(), 10, idle_since=decided_on))
    await until_annotated(agent, "ada", Tier.ACTIVE, 25)
    assert (await agent.session("ada")).tier is Tier.ACTIVE
    # with knowledge of that work the step is right
    await agent.annotate("ada", tier_patch(Tier.DOWNGRADED, time.time(), 10, idle_since=time.time()))
    await agent.until(lambda: agent.node.report().sessions[0].tier is Tier.DOWNGRADED)


async def test_notices_come_and_are_taken_back(agent: NodeAgent) -> None:
    await agent.running("ada")
    peer = await agent.peer("ada")
    observer = Peer(agent.node.sessions["ada"].socket.path)  # type: ignore[union-attr]
    await observer.connect(Role.NOTEBOOK)
    before = (await agent.annotations("ada")).tier_since
    step = Notice(tier=Tier.DOWNGRADED, at=time.time() + 300, reason="idle", effective_units=10)
    await agent.annotate("ada", notice_patch(step))
    assert present((await observer.changed()).notice).tier is Tier.DOWNGRADED
    peer.send(Kind.REQUEST, GIB, 0, gpu=FIRST.uuid)
    assert (await observer.changed()).notice is None
    for _ in range(100):
        if (await agent.annotations("ada")).notice is None:
            break
        await asyncio.sleep(0.02)
    else:
        raise AssertionError("the notice is still on the pod")
    # from now on idleness counts anew, before the report says so
    assert (await agent.annotations("ada")).tier_since > before
    observer.close()


async def test_controls_of_the_pod_reach_observers_and_survive_the_loss_of_the_state(agent: NodeAgent) -> None:
    await agent.running("ada")
    observer = Peer(agent.node.sessions["ada"].socket.path)  # type: ignore[union-attr]
    agent.peers.append(observer)
    await observer.connect(Role.NOTEBOOK)
    controls = Controls(keep=Keep(until=2e9, since=1e9, by="ada"), keeps=(1e9,), exemption=Exemption(by="root"))
    message = Message(text="Please save your work.", by="root", at=1e9)
    await agent.annotate("ada", controls_patch(controls) | messages_patch([message], message.cause))
    for _ in range(2):
        assert await observer.record() == AgentRecord()
    told = present((await observer.status()).controls)
    assert (told.keep_until, told.exempt, told.exempt_until) == (2e9, True, None)
    assert told.messages == (AdminMessage("Please save your work.", 1e9),)
    observer.send(Kind.ASK, 7, AskKind.END_KEEP)
    await agent.until(lambda: agent.node.report().sessions[0].asks)
    # the service's answer, and an old one that nobody waits for
    old, new = (AskAnswer(number=number, done=True, text=f"{number}.", at=1e9) for number in (6, 7))
    ended = controls_patch(Controls(keeps=(1e9,)))
    await agent.annotate("ada", ended | answers_patch([old], new))
    assert await observer.answer() == ServiceAnswer(7, True, "7.")
    found = await agent.session("ada")
    assert (found.controls, found.asks, found.messages) == (Controls(keeps=(1e9,)), (), (message,))
    await agent.stop()
    for record in agent.folder.glob("records/*"):
        record.unlink()
    await agent.annotate("ada", controls_patch(controls))
    await agent.start()
    found = await agent.session("ada")
    assert (found.controls, found.messages) == (controls, (message,))


async def test_borrowed_units_that_come_to_be_owned_are_written_to_the_pod(agent: NodeAgent) -> None:
    await agent.running("ada", share=60)
    await agent.annotate("ada", tier_patch(Tier.RELEASED, time.time(), 0))
    await agent.offered(160)
    await agent.running("ben", share=60, borrowed_units=20)
    await agent.delete("ada")
    for _ in range(200):
        if (await agent.annotations("ben")).borrowed_units == 0:
            break
        await asyncio.sleep(0.02)
    else:
        raise AssertionError("ben still borrows of nobody")


async def test_a_pod_that_is_deleted_ends_its_session_and_leaves_nothing(agent: NodeAgent) -> None:
    await agent.running("ada")
    peer = await agent.peer("ada")
    folder = Path(agent.environment("ada")["GPUSHARE_SOCKET"]).parent.parent
    await agent.delete("ada")
    await agent.cluster.wait_until_gone("ada")
    await agent.until(lambda: "ada" not in agent.node.sessions)
    assert await peer.ended() is not None
    assert not folder.exists()
    await agent.node.registry.store.flush()
    assert not list(agent.folder.glob("records/*"))
    assert not agent.on_kubernetes.allocated.pending


async def test_a_pod_that_ends_by_itself_ends_its_session(agent: NodeAgent) -> None:
    from .standin.client import path
    from .standin.cluster import a_pod

    said = session("ada")
    manifest = a_pod(
        "ada", command=["sleep", "1"], limits={GPU_0: 25}, annotations=said.annotations(), labels=labels(),
        restartPolicy="Never",
    )  # fmt: skip
    await agent.cluster.admin.create(path("pods", agent.cluster.namespace), manifest)
    await agent.session("ada")
    await agent.cluster.wait_for_phase("ada", "Succeeded")
    await agent.until(lambda: "ada" not in agent.node.sessions)


async def test_a_server_that_starts_again_at_once_is_another_session(agent: NodeAgent) -> None:
    await agent.running("ada")
    await agent.annotate("ada", tier_patch(Tier.RELEASED, time.time(), 0))
    await agent.until(lambda: agent.node.report().sessions[0].tier is Tier.RELEASED)
    first = agent.node.sessions["ada"].record.pod
    await agent.delete("ada")
    await agent.cluster.wait_until_gone("ada")
    await agent.running("ada")
    await agent.until(lambda: (one := agent.node.sessions.get("ada")) and one.record.pod.uid != first.uid)  # type: ignore
    assert (await agent.session("ada")).tier is Tier.ACTIVE
    # the kubelet's list knows names alone: for a moment it can show the first pod's devices for the second
    given = Path(agent.environment("ada")["GPUSHARE_SOCKET"])
    await agent.until(lambda: (socket := agent.node.sessions["ada"].socket) and socket.path == given)
    await agent.peer("ada")


async def test_an_update_of_the_agent_keeps_sessions_ids_and_sockets(agent: NodeAgent) -> None:
    await downgraded(agent)
    await agent.running("ben")
    before = {name: (agent.held(name), agent.environment(name)["GPUSHARE_SOCKET"]) for name in ("ada", "ben")}
    folders = {path: os.stat(path).st_ino for path in agent.folder.glob("pods/*")}
    await agent.stop()
    await agent.start()
    assert set(agent.node.sessions) == {"ada", "ben"}
    await agent.offered(115)
    await asyncio.sleep(0.3)
    for name, (held, socket) in before.items():
        assert agent.held(name) == held
        peer = Peer(socket)
        await peer.connect(Role.CUDA)
        peer.close()
    # what containers have mounted is the very folder
    assert {path: os.stat(path).st_ino for path in agent.folder.glob("pods/*")} == folders
    assert (await agent.session("ada")).tier is Tier.DOWNGRADED


async def test_a_restore_that_was_not_written_before_the_agent_died(agent: NodeAgent) -> None:
    peer = await downgraded(agent)
    agent.cluster.faults.fail_next("patch", "pods", "500", times=50)
    peer.send(Kind.REQUEST, GIB, 0, gpu=FIRST.uuid)
    await peer.until(Kind.GRANT)
    await agent.node.registry.store.flush()
    await agent.stop()
    agent.cluster.faults.clear()
    await agent.start()
    await until_annotated(agent, "ada", Tier.ACTIVE, 25)
    assert (await agent.session("ada")).tier is Tier.ACTIVE


async def test_everything_comes_back_after_the_state_was_lost(agent: NodeAgent) -> None:
    await downgraded(agent)
    socket = agent.environment("ada")["GPUSHARE_SOCKET"]
    await agent.stop()
    for record in agent.folder.glob("records/*"):
        record.unlink()
    await agent.start()
    found = await agent.session("ada")
    assert (found.tier, found.effective_units) == (Tier.DOWNGRADED, 10)
    peer = Peer(socket)
    await peer.connect(Role.CUDA)
    peer.close()


async def test_pods_that_died_while_no_agent_ran(agent: NodeAgent) -> None:
    await agent.running("ada")
    await agent.running("ben")
    await agent.stop()
    await agent.delete("ada")
    await agent.cluster.wait_until_gone("ada")
    await agent.start()
    await agent.until(lambda: set(agent.node.sessions) == {"ben"})
    await agent.until(lambda: len(list(agent.folder.glob("pods/*"))) == 1)


async def test_sessions_stay_while_the_api_server_is_unavailable(agent: NodeAgent) -> None:
    await agent.running("ada")
    peer = await agent.peer("ada")
    agent.cluster.faults.rate = 1.0
    agent.cluster.faults.kinds = ("500", "reset")
    await agent.stop()
    await agent.start()
    await asyncio.sleep(0.5)
    assert "ada" in agent.node.sessions
    peer = await agent.peer("ada")
    peer.send(Kind.REQUEST, GIB, 0, gpu=FIRST.uuid)
    await peer.until(Kind.GRANT)
    agent.cluster.faults.clear()
    assert agent.on_kubernetes.pods.listed_at is None
    await agent.until(lambda: agent.on_kubernetes.pods.listed_at is not None)
    assert "ada" in agent.node.sessions


async def test_a_watch_that_is_too_old_lists_anew(agent: NodeAgent) -> None:
    await agent.running("ada")
    agent.cluster.faults.fail_next("watch", "pods", "410", of=by_service_accounts)
    agent.cluster.faults.cut_watches()
    await agent.running("ben")
    await agent.annotate("ada", tier_patch(Tier.RELEASED, time.time(), 0))
    await agent.until(lambda: agent.node.report().session("ada").tier is Tier.RELEASED)  # type: ignore[union-attr]


async def test_a_pod_that_is_nobodys_counts_and_goes(agent: NodeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpushare_spawner.agent.kubernetes.pods.sessions.STRANGER_AFTER", 0.5)
    monkeypatch.setattr("gpushare_spawner.agent.kubernetes.pods.sessions.GONE_AFTER", 0.3)
    monkeypatch.setattr("gpushare_spawner.agent.kubernetes.pods.sessions.TRUST_KUBELET_AFTER", 0.0)
    await agent.cluster.create_pod("stray", limits={GPU_0: 30})
    await agent.cluster.wait_for_phase("stray", "Running")
    name = f"pod:{agent.cluster.namespace}:stray"
    found = await agent.session(name)
    assert (found.share_units, found.template) == (30, "none")
    await agent.delete("stray")
    await agent.cluster.wait_until_gone("stray")
    for _ in range(3):
        agent.on_kubernetes._kubelet.soon()
        await asyncio.sleep(0.3)
    await agent.until(lambda: name not in agent.node.sessions)


async def test_annotations_that_make_no_sense_are_said_and_the_devices_count(
    agent: NodeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    from .standin.client import path
    from .standin.cluster import a_pod

    annotations = session("ada").annotations() | {SHARE: "many"}
    manifest = a_pod("odd", limits={GPU_0: 20}, annotations=annotations, labels=labels())
    await agent.cluster.admin.create(path("pods", agent.cluster.namespace), manifest)
    found = await agent.session(f"pod:{agent.cluster.namespace}:odd")
    assert found.share_units == 20
    assert "gpushare-spawner.io/share is 'many'" in caplog.text


async def test_sessions_are_opened_by_pods_alone(agent: NodeAgent) -> None:
    for request in (request_for("ada"), CloseRequest(id="ada")):
        with pytest.raises(ControlRefused, match="start and end with pods"):
            await answer_in_cluster(agent.node, request)


async def test_it_may_do_no_more_than_it_needs(agent: NodeAgent) -> None:
    with pytest.raises(ApiFailure) as refused:
        await agent.on_kubernetes.pods._api.list(f"/api/v1/namespaces/{agent.cluster.namespace}/secrets")
    assert refused.value.status == 403
