"""The device plugin from the kubelet's side: register, offer, allocate, resize, come back."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from gpushare_spawner.agent.gpus.nvml import GpuState
from gpushare_spawner.agent.kubernetes.kubelet import deviceplugin_pb2 as messages
from gpushare_spawner.agent.kubernetes.kubelet import deviceplugin_pb2_grpc as services
from gpushare_spawner.model.kubernetes.annotations import PREFIX, labels
from gpushare_spawner.model.share import Tier
from tests.agent.conftest import short_folder  # noqa: F401
from tests.agent.peers import FIRST, SECOND

from .agent_account import agent_token
from .node_agent import GPU_0, GPU_1, LIBRARY, NodeAgent
from .standin.cluster import Cluster


@pytest.fixture
async def agent(cluster: Cluster, short_folder: Path) -> AsyncIterator[NodeAgent]:  # noqa: F811
    kubelet = await cluster.make_node()
    token = await agent_token(cluster, kubelet.name)
    agent = NodeAgent(cluster, kubelet, token, short_folder)
    await agent.start()
    yield agent
    await agent.stop()


async def test_each_gpu_is_a_resource_of_100_units(agent: NodeAgent) -> None:
    await agent.ready()
    status = (await agent.cluster.node(agent.kubelet.name))["status"]
    assert {name for name in status["capacity"] if name.startswith(PREFIX)} == {GPU_0, GPU_1}


async def test_ids_are_short_unique_and_packed_low(agent: NodeAgent) -> None:
    await agent.ready()
    offers = agent.kubelet.devices.offers
    everything = [*offers[GPU_0].healthy, *offers[GPU_1].healthy]
    assert len(set(everything)) == 200
    assert all(len(device) <= 63 for device in everything)
    await agent.running("ada")
    await agent.running("ben", share=10)
    lowest = sorted(offers[GPU_0].healthy)
    assert agent.held("ada")[FIRST.uuid] == tuple(lowest[:25])
    assert agent.held("ben")[FIRST.uuid] == tuple(lowest[25:35])


async def test_units_of_five_and_overcommit(agent: NodeAgent) -> None:
    await agent.stop()
    agent.with_units_of(5)
    agent.settings = type(agent.settings)(name=agent.settings.name, capacity_units=150, rounds=agent.settings.rounds)
    await agent.start()
    await agent.offered(30)
    # rounded up: 12 units are three devices
    ada = await agent.running("ada", share=12, unit_size=5)
    assert ada.share_units == 12
    assert len(agent.held("ada")[FIRST.uuid]) == 3


async def test_what_a_container_gets(agent: NodeAgent) -> None:
    await agent.ready()
    await agent.running("ada")
    worker = agent.kubelet.worker(agent.cluster.namespace, "ada")
    given = agent.kubelet.plugins.given(worker.pod["metadata"]["uid"], "notebook")
    socket = Path(given.envs["GPUSHARE_SOCKET"])
    assert given.envs["CUDA_VISIBLE_DEVICES"] == FIRST.uuid
    assert given.envs["LD_PRELOAD"] == str(LIBRARY)
    # everything by the same path on both sides, and nothing to be written to
    assert {mount.host_path for mount in given.mounts} == {str(socket.parent.parent), str(LIBRARY)}
    assert all(mount.read_only and mount.container_path == mount.host_path for mount in given.mounts)
    assert stat.S_ISSOCK(os.stat(socket).st_mode)
    assert os.stat(socket).st_mode & 0o777 == 0o666
    assert os.stat(socket.parent).st_mode & 0o777 == 0o755
    assert os.stat(socket.parent.parent.parent).st_mode & 0o777 == 0o700


async def test_cdi_name_and_preload_file(agent: NodeAgent, tmp_path: Path) -> None:
    await agent.stop()
    agent.cdi_folders = (tmp_path / "cdi",)
    agent.preload_file = True
    await agent.start()
    await agent.ready()
    # the specification is written after the agent has started, as at the boot of a node
    (tmp_path / "cdi").mkdir()
    specification = {"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": [{"name": FIRST.uuid}]}
    (tmp_path / "cdi" / "nvidia.json").write_text(json.dumps(specification))
    await agent.running("ada")
    worker = agent.kubelet.worker(agent.cluster.namespace, "ada")
    given = agent.kubelet.plugins.given(worker.pod["metadata"]["uid"], "notebook")
    assert [device.name for device in given.cdi_devices] == [f"nvidia.com/gpu={FIRST.uuid}"]
    assert given.envs["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert "LD_PRELOAD" not in given.envs
    assert {mount.container_path for mount in given.mounts} >= {"/etc/ld.so.preload", str(LIBRARY)}


async def test_it_registers_again_when_the_kubelet_restarts(agent: NodeAgent) -> None:
    await agent.ready()
    before = await agent.running("ada")
    held = agent.held("ada")
    for _ in range(2):
        await agent.kubelet.restart(down=0.1)
        await agent.offered(100)
        await agent.offered(100, GPU_1)
        # for a second the kubelet lists no pods: that is not "all free"
        assert agent.held("ada") == held
        assert len(agent.on_kubernetes.allocated.offered(FIRST.uuid)) == 100
    await asyncio.sleep(1.2)
    after = await agent.session("ada")
    assert after.opened_at == before.opened_at
    await agent.running("ben")


async def test_a_plugin_that_nobody_listens_to_registers_again(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet dials back once; a stream that breaks later is not opened again by it."""
    monkeypatch.setattr("gpushare_spawner.agent.kubernetes.devices.plugin.HEARD_WITHIN", 2.0)
    await agent.ready()
    ada = await agent.running("ada")
    for following in list(agent.kubelet.plugins._tasks):
        following.cancel()
    offers = agent.kubelet.devices.offers
    await agent.until(lambda: not offers[GPU_0].healthy and not offers[GPU_1].healthy)
    await agent.until(lambda: len(offers[GPU_0].healthy) == len(offers[GPU_1].healthy) == 100)
    assert (await agent.session("ada")).opened_at == ada.opened_at


async def test_a_plugin_that_comes_before_the_kubelet(agent: NodeAgent) -> None:
    await agent.ready()
    await agent.stop()
    await agent.kubelet.stop()
    await agent.start()
    await asyncio.sleep(0.7)
    await agent.kubelet.start()
    await agent.ready()


async def test_lent_units_are_offered_and_withdrawn(agent: NodeAgent) -> None:
    await agent.ready()
    await agent.running("ada", share=60)
    agent.node.registry.tiers.change_tier(agent.node.sessions["ada"], Tier.DOWNGRADED, 10, "a test")
    await agent.offered(150)
    # somebody takes a part of what was lent
    await agent.running("ben", share=60, borrowed_units=20)
    agent.node.registry.tiers.change_tier(agent.node.sessions["ada"], Tier.ACTIVE, 60, "a test")
    # ada's 60 and ben's 60 are held, nothing is free, and nobody loses a device
    await agent.offered(120)
    held = {*agent.held("ada")[FIRST.uuid], *agent.held("ben")[FIRST.uuid]}
    assert agent.kubelet.devices.offers[GPU_0].healthy == held
    await agent.delete("ben")
    await agent.offered(100)
    await agent.delete("ada")
    await agent.offered(100)
    lowest = agent.on_kubernetes.allocated.offered(FIRST.uuid)
    assert [int(one[-4:]) for one in lowest] == list(range(100))


async def test_released_sessions_lend_everything(agent: NodeAgent) -> None:
    await agent.ready()
    await agent.running("ada", share=100)
    agent.node.registry.tiers.change_tier(agent.node.sessions["ada"], Tier.RELEASED, 0, "a test")
    await agent.offered(200)


async def test_a_pod_that_comes_in_the_stale_window_fails_its_admission(agent: NodeAgent) -> None:
    """The node still says 150, the plugin offers less: the pod is scheduled, and refused by the plugin."""
    await agent.ready()
    await agent.running("ada", share=60)
    agent.node.registry.tiers.change_tier(agent.node.sessions["ada"], Tier.RELEASED, 0, "a test")
    await agent.offered(160)
    agent.kubelet.settings.status_interval = 5.0
    agent.node.registry.tiers.change_tier(agent.node.sessions["ada"], Tier.ACTIVE, 60, "a test")
    await agent.until(lambda: len(agent.kubelet.devices.offers[GPU_0].healthy) == 100)
    await agent.pod("ben", share=90)
    failed = await agent.cluster.wait_for_phase("ben", "Failed")
    assert failed["status"]["reason"] == "UnexpectedAdmissionError"
    assert "ben" not in agent.node.sessions
    assert not agent.on_kubernetes.allocated.pending


async def ask(agent: NodeAgent, devices: list[str]) -> messages.AllocateResponse:
    socket = agent.kubelet.plugin_folder / "gpushare-gpu-0.sock"
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        request = messages.AllocateRequest(container_requests=[messages.ContainerAllocateRequest(devices_ids=devices)])
        stub = services.DevicePluginStub(channel)  # type: ignore[no-untyped-call]
        answer: messages.AllocateResponse = await stub.Allocate(request, timeout=5)
        return answer


async def test_wrong_ids_are_refused(agent: NodeAgent) -> None:
    await agent.ready()
    good = agent.on_kubernetes.allocated.offered(FIRST.uuid)
    other = agent.on_kubernetes.allocated.offered(SECOND.uuid)
    for wrong in ([], ["nonsense"], [good[0], good[0]], [other[0]], [good[0], good[0][:-4] + "9999"]):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(agent, wrong)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert (refused.value.details() or "").startswith("gpushare: ")
    assert not agent.on_kubernetes.allocated.pending


async def test_more_than_there_is_is_refused(agent: NodeAgent) -> None:
    """The kubelet counts ids, and does no arithmetic: here the sum of what is in use counts."""
    await agent.ready()
    await agent.running("ada", share=60)
    agent.node.registry.tiers.change_tier(agent.node.sessions["ada"], Tier.RELEASED, 0, "a test")
    await agent.offered(160)
    await agent.running("ben", share=100, borrowed_units=60)
    agent.node.registry.tiers.change_tier(agent.node.sessions["ada"], Tier.ACTIVE, 60, "a test")
    # ada's pod has ended, says the kubelet; but ben's 100 units are all in use now
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(agent, list(agent.held("ada")[FIRST.uuid]))
    assert "100 are in use" in (refused.value.details() or "")
    assert "ada" in agent.node.sessions


async def test_the_same_devices_again_are_another_pods(agent: NodeAgent) -> None:
    await agent.ready()
    good = agent.on_kubernetes.allocated.offered(FIRST.uuid)
    first = (await ask(agent, good[:30])).container_responses[0].envs["GPUSHARE_SOCKET"]
    (Path(first).parent.parent / "left").touch()
    again = (await ask(agent, good[:30])).container_responses[0].envs["GPUSHARE_SOCKET"]
    assert first == again
    assert not (Path(first).parent.parent / "left").exists()
    await ask(agent, good[20:50])
    assert [len(one.devices) for one in agent.on_kubernetes.allocated.pending.values()] == [30]


async def test_devices_that_are_given_again_end_the_older_session(agent: NodeAgent) -> None:
    """The kubelet knows first that a pod has ended; the API's word comes later."""
    await agent.ready()
    await agent.running("ada", share=100)
    old = await agent.peer("ada")
    answer = await ask(agent, list(agent.held("ada")[FIRST.uuid]))
    assert "ada" not in agent.node.sessions
    assert await old.ended() is not None
    # the folder is there, and empty until it is known whose it is
    folder = Path(answer.container_responses[0].envs["GPUSHARE_SOCKET"]).parent.parent
    assert list(folder.iterdir()) == []


async def test_what_a_pod_holds_beyond_its_share_counts(agent: NodeAgent) -> None:
    """A pod that is nobody's may hold more than a GPU's units where there are more; so may one of another unit size."""
    await agent.stop()
    agent.settings = replace(agent.settings, capacity_units=150)
    await agent.start()
    await agent.offered(150)
    await agent.cluster.create_pod("stray", limits={GPU_0: 120}, labels=labels())
    stray = await agent.session(f"pod:{agent.cluster.namespace}:stray")
    assert stray.share_units == 100
    assert len(agent.on_kubernetes.allocated.offered(FIRST.uuid)) == 150
    free = sorted(set(agent.on_kubernetes.allocated.offered(FIRST.uuid)) - set(stray_devices(agent)))
    assert len(free) == 30


def stray_devices(agent: NodeAgent) -> tuple[str, ...]:
    return agent.held(f"pod:{agent.cluster.namespace}:stray")[FIRST.uuid]


async def test_gpus_that_are_numbered_anew_offer_nobodys_devices_twice(agent: NodeAgent) -> None:
    """As after a GPU that broke: the kubelet accounts for ids by resource, and the GPU is another one's now."""
    await agent.ready()
    await agent.running("ada", gpus=(SECOND,), share=40)
    held = agent.held("ada")[SECOND.uuid]
    await agent.stop()
    moved = replace(SECOND, index=0)
    agent.gpus = (moved,)
    await agent.start()
    await agent.until(lambda: len(agent.kubelet.devices.offers[GPU_0].healthy) == 60)
    assert agent.held("ada")[SECOND.uuid] == held
    assert not set(held) & agent.kubelet.devices.offers[GPU_0].healthy
    ben = await agent.running("ben", gpus=(moved,), share=60)
    assert ben.gpus == (SECOND.uuid,)
    assert set(agent.node.sessions) == {"ada", "ben"}


async def test_a_plugin_that_came_a_moment_ago_is_asked_for_at_each_grant(agent: NodeAgent) -> None:
    from .standin.devices import Offer

    await agent.ready()
    devices = agent.on_kubernetes.allocated.offered(FIRST.uuid)
    agent.kubelet.devices.offers["nvidia.com/gpu"] = Offer(healthy={FIRST.uuid})
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(agent, devices[:10])
    assert "offered as nvidia.com/gpu by another device plugin" in (refused.value.details() or "")
    assert not agent.on_kubernetes.allocated.pending


async def test_a_fault_in_dealing_with_the_kubelets_word_is_not_the_last(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await agent.ready()

    def fails(_assignments: object) -> None:
        raise OSError("the disk is on fire")

    with monkeypatch.context() as patched:
        patched.setattr(agent.on_kubernetes.sessions, "take_assignments", fails)
        agent.on_kubernetes._kubelet.soon()
        await agent.until(lambda: "the disk is on fire" in caplog.text)
    await agent.running("ada")


async def test_a_sick_gpu_is_unhealthy_and_its_sessions_stay(agent: NodeAgent) -> None:
    await agent.ready()
    await agent.running("ada")
    agent.source.states[FIRST.uuid] = GpuState(healthy=False)
    await agent.offered(0)
    for _ in range(100):
        report = await agent.report()
        if report is not None and not report.gpus[0].healthy:
            break
        await asyncio.sleep(0.05)
    else:
        raise AssertionError("the hub was not told")
    await agent.offered(100, GPU_1)
    assert "ada" in agent.node.sessions
    del agent.source.states[FIRST.uuid]
    await agent.offered(100)


async def test_a_gpu_that_nvidias_plugin_offers_too_is_not_given_out(agent: NodeAgent) -> None:
    from .standin.devices import Offer

    await agent.ready()
    agent.kubelet.devices.offers["nvidia.com/gpu"] = Offer(healthy={FIRST.uuid})
    agent.on_kubernetes._kubelet.soon()
    await agent.offered(0)
    await agent.offered(100, GPU_1)
    report = agent.node.report()
    assert [gpu.healthy for gpu in report.gpus] == [False, True]
    assert "nvidia.com/gpu" in agent.node.rounds.withheld[FIRST.uuid]
    del agent.kubelet.devices.offers["nvidia.com/gpu"]
    agent.on_kubernetes._kubelet.soon()
    await agent.offered(100)
