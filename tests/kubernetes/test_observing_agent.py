"""An agent that only observes: pods of another layer, their GPU work, and what the node's report says of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus import arbitration
from gpushare_spawner.agent.kubernetes import observing
from gpushare_spawner.agent.kubernetes.devices.owners import DevicesRefused
from gpushare_spawner.model.controls import Controls, Keep, Message, MessageCause
from gpushare_spawner.model.frames import Kind, Role
from gpushare_spawner.model.kubernetes.annotations import controls_patch, messages_patch, notice_patch
from gpushare_spawner.model.kubernetes.objects import HOSTNAME_LABEL, OBSERVER
from gpushare_spawner.model.layers import LayerName, MemoryEngine
from gpushare_spawner.model.report import Notice, Report, SessionReport
from gpushare_spawner.model.share import NeighbourRules, Tier
from tests.agent.conftest import short_folder  # noqa: F401
from tests.agent.mig.test_instance_watch import LARGE, PARENT, SMALL
from tests.agent.peers import FIRST, SECOND, Peer
from tests.present import present

from .observing_agent import ObservingAgent, observing_agent
from .standin.client import path
from .standin.cluster import Cluster, a_pod

COMPUTING = 4_000_001
"""A pid that no process has."""


@pytest.fixture
def cgroups(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """The uids of the pods that processes are in, by pid."""
    pods: dict[int, str] = {}
    monkeypatch.setattr(processes, "cgroup", lambda pid: f"/kubepods.slice/kubepods-pod{pods.get(pid, '')}.slice/c")
    monkeypatch.setattr(processes, "uid", lambda pid: 1000)
    monkeypatch.setattr(processes, "parent", lambda pid: None)
    return pods


@pytest.fixture
async def agent(
    cluster: Cluster,
    short_folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    cgroups: dict[int, str],
) -> AsyncIterator[ObservingAgent]:
    monkeypatch.setattr(observing, "READ_EVERY", 0.1)
    monkeypatch.setattr(arbitration, "SAMPLED_LATELY", 0.4)
    agent = await observing_agent(cluster, short_folder)
    yield agent
    await agent.stop()


async def published(agent: ObservingAgent, name: str, holds: Callable[[SessionReport], bool]) -> Report:
    """What the node's report says, once the session in it is as wanted."""
    async with asyncio.timeout(10):
        while True:
            report = await agent.report()
            session = report.session(name) if report is not None else None
            if report is not None and session is not None and holds(session):
                return report
            await asyncio.sleep(0.05)


async def test_bursts_of_a_program_with_the_library_are_in_the_nodes_report(agent: ObservingAgent) -> None:
    await agent.server("ada")
    environment = agent.environment("ada")
    assert environment["GPUSHARE_ENGINE"] == "observe"
    assert environment["LD_PRELOAD"] == "/opt/gpushare/libgpushare.so"
    assert not {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"} & set(environment), "the layer says which GPU"
    program = await agent.program("ada")
    program.send(Kind.MEMORY, 0, 2**30, gpu=SECOND.uuid)
    program.send(Kind.BUSY, 0, gpu=SECOND.uuid)
    report = await published(agent, "ada", lambda one: one.gpu_busy and one.memory_bytes == 2**30)
    ada = report.session("ada")
    assert ada is not None
    assert (ada.layer, ada.gpus, ada.share_units, ada.guaranteed_units) == (
        LayerName.TIME_SLICING, ("time-slicing/ada/0",), 25, 25
    )  # fmt: skip
    assert (ada.gpu_use_known, ada.processes, ada.memory_limit_bytes) == (True, 1, 0)
    assert (report.gpus, report.host_memory) == ((), None), "nothing here is the hub's to place on"
    program.send(Kind.IDLE, 0, 5_000_000, 1_000_000, gpu=SECOND.uuid)
    report = await published(agent, "ada", lambda one: not one.gpu_busy)
    ada = report.session("ada")
    assert ada is not None
    assert ada.last_gpu_activity == pytest.approx(report.published_at, abs=5)


async def test_gpu_work_is_seen_as_the_driver_counts_it_where_the_layer_preloads_a_library(
    agent: ObservingAgent, cgroups: dict[int, str]
) -> None:
    uid = await agent.server("ada", LayerName.HAMI, library=False)
    other = await agent.server("bob", LayerName.HAMI, library=False)
    cgroups[COMPUTING], cgroups[COMPUTING + 1] = uid.replace("-", "_"), other
    agent.source.working[FIRST.uuid] = {COMPUTING: 0.5, COMPUTING + 1: 0.0}
    report = await published(agent, "ada", lambda one: one.gpu_busy)
    bob = report.session("bob")
    assert bob is not None
    assert (bob.gpu_busy, bob.last_gpu_activity, bob.gpu_use_known) == (False, None, True)
    await published(agent, "ada", lambda one: one.memory_bytes == 2**30)
    agent.source.working[FIRST.uuid] = {}
    await published(agent, "ada", lambda one: not one.memory_bytes)
    report = await published(agent, "ada", lambda one: not one.gpu_busy)
    ada = report.session("ada")
    assert ada is not None
    assert ada.last_gpu_activity is not None
    assert 0 < ada.gpu_seconds < 5


async def test_a_server_without_the_library_is_seen_all_the_same(
    agent: ObservingAgent, cgroups: dict[int, str]
) -> None:
    """It was made while a node of its layer had no observer."""
    cgroups[COMPUTING] = await agent.server("ada", library=False)
    agent.source.working[FIRST.uuid] = {COMPUTING: 0.2}
    await published(agent, "ada", lambda one: one.gpu_busy)


async def test_daemons_of_mps_are_not_the_agents_in_a_cluster(agent: ObservingAgent) -> None:
    await agent.server("ada", LayerName.MPS)
    await agent.node.mps.check()
    ada = agent.node.report().session("ada")
    assert ada is not None
    assert ada.layer_trouble is None
    assert list((agent.folder / "mps").glob("*")) == []


async def test_work_on_mig_instances_is_what_programs_say(agent: ObservingAgent) -> None:
    await agent.stop()
    agent.gpus, agent.source.tells = (SMALL, LARGE), False
    await agent.start()
    await agent.until(lambda: agent.observing.devices.plugin.is_heard)
    await agent.server("ada", LayerName.MIG)
    program = await agent.program("ada")
    program.send(Kind.BUSY, 0, gpu=PARENT)
    report = await published(agent, "ada", lambda one: one.gpu_busy)
    ada = report.session("ada")
    assert ada is not None
    assert (ada.gpu_use_known, ada.layer_trouble, report.gpus) == (True, None, ())
    program.send(Kind.IDLE, 0, 5_000_000, 1_000_000, gpu=PARENT)
    await published(agent, "ada", lambda one: not one.gpu_busy and one.last_gpu_activity is not None)


async def test_work_of_a_process_that_is_connected_counts_once(agent: ObservingAgent, cgroups: dict[int, str]) -> None:
    uid = await agent.server("ada")
    program = await agent.program("ada")
    (connection,) = agent.node.sessions["ada"].cuda
    cgroups[connection.peer.pid] = uid
    agent.source.working[FIRST.uuid] = {connection.peer.pid: 1.0}
    await asyncio.sleep(0.5)
    assert not (await agent.session("ada")).gpu_busy, "what it says itself is more exact"
    program.close()
    await agent.until(lambda: agent.node.report().session("ada").gpu_busy)  # type: ignore[union-attr]


async def test_a_driver_that_does_not_count_by_process_tells_of_a_server_that_has_a_gpu_alone(
    agent: ObservingAgent, cgroups: dict[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    agent.source.tells = False
    cgroups[COMPUTING] = await agent.server("ada", LayerName.HAMI, library=False)
    agent.source.working[FIRST.uuid] = {COMPUTING: 0.5}
    report = await published(agent, "ada", lambda one: one.gpu_busy)
    cgroups[COMPUTING + 1] = await agent.server("bob", LayerName.KAI, library=False)
    await agent.server("cyn")
    agent.source.working[FIRST.uuid] = {COMPUTING: 0.5, COMPUTING + 1: 0.0}
    await published(agent, "bob", lambda one: not one.gpu_use_known)
    await agent.program("cyn")
    report = await published(agent, "cyn", lambda one: one.processes == 1)
    assert {one.id: one.gpu_use_known for one in report.sessions} == {"ada": False, "bob": False, "cyn": True}
    assert caplog.text.count("only kernels show which sessions are idle") == 1


async def test_the_agent_is_restarted_and_knows_the_last_use(agent: ObservingAgent, cgroups: dict[int, str]) -> None:
    await agent.server("ada")
    program = await agent.program("ada")
    program.send(Kind.BUSY, 0, gpu=FIRST.uuid)
    program.send(Kind.IDLE, 0, 5_000_000, 1_000_000, gpu=FIRST.uuid)
    report = await published(agent, "ada", lambda one: one.last_gpu_activity is not None)
    before = report.session("ada")
    socket = Path(agent.environment("ada")["GPUSHARE_SOCKET"])
    assert before is not None
    await agent.stop()
    await agent.server_without_agent("bob")
    await agent.start()
    after = await agent.session("ada")
    assert after.last_gpu_activity == pytest.approx(before.last_gpu_activity, abs=0.1)
    assert after.opened_at == before.opened_at
    again = Peer(socket)
    await again.connect(Role.OBSERVER)
    again.close()
    await agent.session("bob")


async def test_a_notice_reaches_the_server_and_stays_until_the_service_withdraws_it(agent: ObservingAgent) -> None:
    await agent.server("ada")
    observer = await agent.program("ada", Role.NOTEBOOK)
    notice = Notice(tier=Tier.STOPPED, at=2_000_000_000.0, reason="It is idle.")
    await agent.annotate("ada", notice_patch(notice))
    told = present((await observer.changed()).notice)
    assert (told.tier, told.at) == (Tier.STOPPED, 2_000_000_000.0)
    program = await agent.program("ada")
    program.send(Kind.BUSY, 0, gpu=FIRST.uuid)
    # the service reads both, and decides
    await published(agent, "ada", lambda one: one.gpu_busy and one.notice == notice)
    await observer.quiet()
    await agent.annotate("ada", notice_patch(None))
    assert (await observer.changed()).notice is None


async def test_keep_and_message_of_the_service_reach_the_server(agent: ObservingAgent) -> None:
    await agent.server("ada")
    observer = await agent.program("ada", Role.NOTEBOOK)
    keep = Keep(until=2_000_000_000.0, since=1_900_000_000.0, by="ada")
    await agent.annotate("ada", controls_patch(Controls(keep=keep, keeps=(keep.since,))))
    assert present((await observer.changed()).controls).keep_until == 2_000_000_000.0
    await agent.annotate(
        "ada", messages_patch([Message(text="Please save.", by="root", at=1_900_000_000.0)], MessageCause.ADMIN)
    )
    assert [said.text for said in present((await observer.changed()).controls).messages] == ["Please save."]


async def test_a_session_ends_when_the_kubelet_gives_its_devices_to_another_pod(agent: ObservingAgent) -> None:
    await agent.server("ada")
    await agent.program("ada")
    hold = agent.node.sessions["ada"].record.pod
    assert hold is not None
    ((device,),) = hold.grants
    await agent.observing.devices._grant([device])
    assert "ada" not in agent.node.sessions
    with pytest.raises(DevicesRefused, match="of-another-plugin was requested, but is not offered"):
        await agent.observing.devices._grant(["of-another-plugin"])


async def test_a_pod_that_is_gone_ends_its_session_and_its_folder(agent: ObservingAgent) -> None:
    await agent.server("ada")
    folder = Path(agent.environment("ada")["GPUSHARE_SOCKET"]).parent.parent
    await agent.program("ada")
    await agent.delete("ada")
    await agent.until(lambda: "ada" not in agent.node.sessions)
    await agent.until(lambda: not folder.exists())


async def test_a_pod_that_is_no_session_gets_no_socket_and_its_folder_goes(
    agent: ObservingAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    await agent.cluster.admin.create(path("pods", agent.cluster.namespace), a_pod("stranger", limits={OBSERVER: 1}))
    await agent.cluster.wait_for_phase("stranger", "Running")
    socket = Path(agent.environment("stranger")["GPUSHARE_SOCKET"])
    await agent.until(lambda: agent.observing.devices.all_listed)
    assert not socket.exists()
    assert socket.parent.parent.is_dir(), "its container has it mounted"
    monkeypatch.setattr(observing, "GONE_AFTER", 0.0)
    await agent.delete("stranger")

    def gone() -> bool:
        agent.observing._kubelet.soon()
        return not socket.parent.parent.exists()

    await agent.until(gone)
    assert agent.node.sessions == {}


async def test_a_session_whose_pod_was_replaced_is_the_new_pods(agent: ObservingAgent) -> None:
    await agent.server("ada")
    first = agent.node.sessions["ada"].record.pod
    await agent.delete("ada")
    await agent.until(lambda: "ada" not in agent.node.sessions)
    await agent.server("ada")
    second = agent.node.sessions["ada"].record.pod
    assert first is not None
    assert second is not None
    assert first.uid != second.uid
    await agent.program("ada")


async def test_a_pod_whose_annotations_are_wrong_is_left_out(
    agent: ObservingAgent, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = a_pod("odd", labels={"gpushare-spawner.io/layer": "magic"})
    await agent.cluster.admin.create(path("pods", agent.cluster.namespace), manifest)
    await agent.server("ada")
    assert list(agent.node.sessions) == ["ada"]
    assert "the label gpushare-spawner.io/layer is 'magic'" in caplog.text


async def test_forged_annotations_of_our_own_layer_have_no_effect(agent: ObservingAgent) -> None:
    await agent.server("ada")
    forged: dict[str, Any] = {
        "engine": MemoryEngine.SUSPEND, "memory_limit": "1%", "borrowed_units": 20, "user_units": 1,
        "time_limit_units": 30, "neighbours": NeighbourRules(alone=True),
    }  # fmt: skip
    await agent.server("eve", **forged)
    pod = await agent.cluster.pod("eve")
    assert pod is not None
    assert pod["metadata"]["annotations"]["gpushare-spawner.io/memory-engine"] == "suspend"
    ada, eve = agent.node.sessions["ada"], agent.node.sessions["eve"]
    assert not eve.suspends
    assert eve.record.borrowed_units == 0
    names = {"id": "ada", "user": "ada", "gpus": ada.record.request.gpus}
    assert eve.record.request.model_copy(update=names) == ada.record.request


async def test_older_pod_that_names_the_same_session_is_left_alone(agent: ObservingAgent) -> None:
    """A pod that is being deleted beside its successor, or one that somebody else has made."""
    await agent.server("ada")
    first = agent.node.sessions["ada"]
    older = await agent.cluster.pod("ada")
    assert older is not None
    await asyncio.sleep(1.1)  # the API server's times are in seconds
    said = {"annotations": older["metadata"]["annotations"], "labels": older["metadata"]["labels"]}
    younger = a_pod("ada-2", nodeSelector={HOSTNAME_LABEL: agent.kubelet.name}, **said)
    await agent.cluster.admin.create(path("pods", agent.cluster.namespace), younger)
    await agent.until(lambda: agent.node.sessions["ada"] is not first)
    second = agent.node.sessions["ada"]
    assert second.record.pod is not None
    assert second.record.pod.name == "ada-2"
    for _ in range(3):
        agent.observing.sessions.changed()
        await asyncio.sleep(0.05)
    assert agent.node.sessions["ada"] is second
