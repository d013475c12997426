"""What was given to whom: pods with several containers and GPUs, and a kubelet whose word comes late or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpushare_spawner.agent.kubernetes.devices.pod_resources import DeviceIds, KubeletAssignments, PodKey
from gpushare_spawner.agent.kubernetes.pods.sessions import foreign_record
from gpushare_spawner.agent.session_records import SessionRecord
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.clients.api import Json
from gpushare_spawner.model.frames import Role
from gpushare_spawner.model.kubernetes.annotations import labels
from tests.agent.conftest import short_folder  # noqa: F401
from tests.agent.peers import FIRST, SECOND, Peer

from .agent_account import agent_token
from .node_agent import GPU_0, NodeAgent, inode, session
from .standin.client import path
from .standin.cluster import Cluster, a_pod


@pytest.fixture
async def agent(cluster: Cluster, short_folder: Path) -> AsyncIterator[NodeAgent]:  # noqa: F811
    kubelet = await cluster.make_node()
    agent = NodeAgent(cluster, kubelet, await agent_token(cluster, kubelet.name), short_folder)
    await agent.start()
    await agent.ready()
    yield agent
    await agent.stop()


async def test_each_container_of_a_pod_has_a_socket_of_the_session(agent: NodeAgent) -> None:
    manifest = a_pod("ada", limits={GPU_0: 25}, annotations=session("ada").annotations(), labels=labels())
    (notebook,) = manifest["spec"]["containers"]
    sidecar = {**notebook, "name": "sidecar", "resources": {"limits": {GPU_0: "10"}}}
    manifest["spec"]["containers"].append(sidecar)
    await agent.cluster.admin.create(path("pods", agent.cluster.namespace), manifest)
    await agent.cluster.wait_for_phase("ada", "Running")
    await agent.session("ada")
    await agent.until(lambda: len(agent.held("ada")[FIRST.uuid]) == 35)
    uid = agent.kubelet.worker(agent.cluster.namespace, "ada").pod["metadata"]["uid"]
    sockets = [agent.kubelet.plugins.given(uid, name).envs["GPUSHARE_SOCKET"] for name in ("notebook", "sidecar")]
    assert len(set(sockets)) == 2
    for socket in sockets:
        peer = Peer(socket)
        await peer.connect(Role.CUDA)
        peer.close()
    assert not agent.on_kubernetes.allocated.pending
    # both are in use: 35 of 100
    await agent.offered(100)
    # another agent finds both again
    folders = {folder: inode(folder) for folder in agent.folder.glob("pods/*")}
    await agent.stop()
    await agent.start()
    await agent.session("ada")
    for socket in sockets:
        peer = Peer(socket)
        await peer.connect(Role.CUDA)
        peer.close()
    assert {folder: inode(folder) for folder in agent.folder.glob("pods/*")} == folders


async def test_a_gpu_that_comes_too_late_for_its_session_is_not_free(agent: NodeAgent) -> None:
    """The kubelet asks for a pod's GPUs one after the other."""
    await agent.running("ada", gpus=(FIRST, SECOND), share=100)
    hold = agent.node.sessions["ada"].record.pod
    assert hold is not None
    second = hold.devices[SECOND.uuid]
    # as if only the first GPU had been listed when the session was made
    hold.devices, hold.given = {FIRST.uuid: hold.devices[FIRST.uuid]}, ()
    agent.on_kubernetes._kubelet.soon()
    await agent.until(lambda: (SECOND.uuid, frozenset(second)) in agent.on_kubernetes.allocated.pending)
    assert len(agent.on_kubernetes.allocated.offered(SECOND.uuid)) == 100
    assert set(second) == set(agent.on_kubernetes.allocated.offered(SECOND.uuid))


async def test_a_pod_of_which_the_api_server_tells_late_keeps_its_socket(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet knows the pod, and the agent's watch is broken for a while: it looks like a pod that is nobody's."""
    monkeypatch.setattr("gpushare_spawner.agent.kubernetes.pods.sessions.STRANGER_AFTER", 0.3)
    with monkeypatch.context() as broken:
        broken.setattr(agent.on_kubernetes.pods, "named", lambda namespace, name: None)
        await agent.pod("ada")
        await agent.session(f"pod:{agent.cluster.namespace}:ada", timeout=30.0)
    socket = Path(agent.environment("ada")["GPUSHARE_SOCKET"])
    mounted = inode(socket.parent.parent)
    agent.on_kubernetes.sessions.changed()
    await agent.session("ada")
    assert set(agent.node.sessions) == {"ada"}
    assert inode(socket.parent.parent) == mounted
    peer = Peer(socket)
    await peer.connect(Role.CUDA)
    peer.close()


async def test_a_pod_that_the_watch_has_not_shown_is_no_stranger(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before a pod counts as nobody's the pods are listed anew, and the list shows it."""
    monkeypatch.setattr("gpushare_spawner.agent.kubernetes.pods.sessions.STRANGER_AFTER", 0.3)
    names: set[str] = set()
    add = agent.node.registry.add_and_listen

    def noted(record: SessionRecord) -> Session:
        names.add(record.request.id)
        return add(record)

    monkeypatch.setattr(agent.node.registry, "add_and_listen", noted)
    # the watch brings nothing any more
    monkeypatch.setattr(agent.on_kubernetes.pods, "_take", lambda event: event["object"]["metadata"]["resourceVersion"])
    await agent.running("ada")
    assert names == {"ada"}
    assert "lacks the label" not in caplog.text


async def test_a_pod_that_no_list_has_shown_is_not_called_unlabelled(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("STRANGER_AFTER", "UNSEEN_AFTER"):
        monkeypatch.setattr(f"gpushare_spawner.agent.kubernetes.pods.sessions.{name}", 0.3)
    monkeypatch.setattr(agent.on_kubernetes.pods, "_take", lambda event: event["object"]["metadata"]["resourceVersion"])
    with monkeypatch.context() as silent:
        silent.setattr(agent.on_kubernetes.pods, "list_again", lambda: None)
        await agent.pod("ada")
        await agent.session(f"pod:{agent.cluster.namespace}:ada", timeout=30.0)
        assert "has not shown it yet" in caplog.text
        assert "lacks the label" not in caplog.text
    agent.on_kubernetes.pods.list_again()
    await agent.session("ada")
    assert set(agent.node.sessions) == {"ada"}


async def test_a_pod_that_cannot_be_dealt_with_is_no_trouble_to_others(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deal = agent.on_kubernetes.sessions._reconcile_pod

    def fails_for_ada(key: PodKey, devices: dict[str, DeviceIds]) -> None:
        if key[1] == "ada":
            raise RuntimeError("what a pod")
        deal(key, devices)

    monkeypatch.setattr(agent.on_kubernetes.sessions, "_reconcile_pod", fails_for_ada)
    await agent.pod("ada")
    await agent.until(lambda: "/ada; retrying" in caplog.text)
    await agent.running("ben")


def test_pods_with_long_names_are_told_apart() -> None:
    devices = {FIRST.uuid: (frozenset({"a"}),)}
    ids = {foreign_record(("hub", "x" * 240 + end), devices, 1, 1.0).request.id for end in "ab"}
    assert len(ids) == 2
    assert all(len(one) <= 200 for one in ids)


async def test_a_kubelet_that_has_just_started_frees_nothing(agent: NodeAgent) -> None:
    """It lists no pods for a second, and may be asked before the plugin has noticed that it is another one."""
    await agent.running("ada")
    socket = Path(agent.environment("ada")["GPUSHARE_SOCKET"])
    grant = inode(socket.parent.parent)
    for record in list(agent.node.sessions.values()):
        # the state was lost: the folder is known from the kubelet's list alone
        agent.node.registry._sessions.pop(record.id)
    sessions = agent.on_kubernetes.sessions
    sessions._listed._kubelet_since -= 60
    sessions.take_assignments(KubeletAssignments({}, {}, started=1.0))
    sessions.take_assignments(KubeletAssignments({}, {}, started=1.0))
    assert inode(socket.parent.parent) == grant
    # when it has run for a while its word counts
    sessions._listed._kubelet_since -= 60
    sessions.take_assignments(KubeletAssignments({}, {}, started=1.0))
    assert not socket.parent.parent.exists()


async def test_patches_that_fail_for_long_are_complained_of_once(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gpushare_spawner.agent.kubernetes.pods.annotations.LONGEST_PAUSE", 0.05)
    caplog.set_level("INFO")
    await agent.running("ada")
    await agent.running("ben")
    agent.cluster.faults.fail_next("patch", "pods", "500", times=20)
    for name in ("ada", "ben"):
        agent.node.sessions[name].record.borrowed_units = 5
    agent.on_kubernetes.sessions.changed()
    for name in ("ada", "ben"):
        for _ in range(200):
            if (await agent.annotations(name)).borrowed_units == 5:
                break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError(f"{name}'s pod was never patched")
    assert caplog.text.count("cannot write tiers to pods' annotations") == 1
    await agent.until(lambda: "tiers can be written to pods' annotations again" in caplog.text)


async def test_a_patch_that_breaks_in_an_unforeseen_way_is_not_tried_without_end(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpushare_spawner.agent.kubernetes.pods.annotations.LONGEST_PAUSE", 0.5)
    await agent.running("ada")
    tries = 0

    patch = agent.on_kubernetes.sessions._writer._api.patch

    async def breaks(path: str, item: Json) -> Json:
        nonlocal tries
        if "/pods/" not in path:
            return await patch(path, item)
        tries += 1
        raise KeyError("metadata")

    with monkeypatch.context() as patched:
        patched.setattr(agent.on_kubernetes.sessions._writer._api, "patch", breaks)
        agent.node.sessions["ada"].record.borrowed_units = 5
        agent.on_kubernetes.sessions.changed()
        await asyncio.sleep(0.3)
        assert tries == 1
    await agent.until(lambda: not agent.on_kubernetes.sessions._writer._tasks)
    assert (await agent.annotations("ada")).borrowed_units == 5
