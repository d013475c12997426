"""The agent's answers to the kubelet as a DRA plugin: each claim has one, and health is told whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from gpushare_spawner.agent.kubernetes.claims import plugin
from gpushare_spawner.agent.kubernetes.claims.allocation import AllocatedDevice, ClaimKey
from gpushare_spawner.agent.kubernetes.claims.plugin import ClaimPlugin, DeviceHealth, DriverSockets
from gpushare_spawner.agent.kubernetes.devices.owners import DevicesRefused
from gpushare_spawner.agent.kubernetes.grpc_socket import GrpcSockets
from gpushare_spawner.agent.kubernetes.kubelet import dra_health_pb2 as health_messages
from gpushare_spawner.agent.kubernetes.kubelet import dra_health_pb2_grpc as health_services
from gpushare_spawner.agent.kubernetes.kubelet import dra_pb2 as messages
from gpushare_spawner.agent.kubernetes.kubelet import dra_pb2_grpc as services
from gpushare_spawner.agent.kubernetes.kubelet import pluginregistration_pb2 as registration_messages
from gpushare_spawner.agent.kubernetes.kubelet import pluginregistration_pb2_grpc as registration
from gpushare_spawner.model.kubernetes.objects import DRIVER
from tests.agent.conftest import short_folder  # noqa: F401

SHARE = "0c35e43c-26bb-4e5e-a9ff-0e2f1e0c1b2a"


class Driver:
    """A driver on its sockets. Claims named `full` and `broken` fail."""

    def __init__(self, folder: Path) -> None:
        self.healthy = {"gpu-0": True, "gpu-1": True}
        self.registered: list[str] = []
        self.health = DeviceHealth("node-a", lambda: self.healthy)
        plugin = ClaimPlugin(self.prepare, self.unprepare)
        self.sockets = DriverSockets(plugin, self.health, folder, lambda: self.registered.append("yes"))
        self.service = folder / "plugins" / DRIVER / "dra.sock"
        self.registry = folder / "plugins_registry" / f"{DRIVER}-reg.sock"

    async def prepare(self, key: ClaimKey) -> tuple[AllocatedDevice, ...]:
        self._fail(key)
        first = AllocatedDevice(request="gpu-0", pool="node-a", device="gpu-0", share=SHARE)
        return first, AllocatedDevice(request="gpu-1", pool="node-a", device="gpu-1")

    async def unprepare(self, key: ClaimKey) -> None:
        self._fail(key)

    def _fail(self, key: ClaimKey) -> None:
        if key.name == "full":
            raise DevicesRefused("GPU 0 has 0 free units")
        if key.name == "broken":
            raise ZeroDivisionError("a bug")


@pytest.fixture
async def driver(short_folder: Path) -> AsyncIterator[Driver]:  # noqa: F811
    found = Driver(short_folder)
    await found.sockets.start()
    yield found
    await found.sockets.close()


def claims(*names: str) -> list[Any]:
    return [messages.Claim(namespace="hub", name=name, uid=f"uid-{name}") for name in names]


async def test_each_claim_has_an_answer_and_one_that_fails_is_no_other_one_s_trouble(driver: Driver) -> None:
    asked = claims("ada", "full", "broken", "ben")
    async with grpc.aio.insecure_channel(f"unix:{driver.service}") as channel:
        stub = services.DRAPluginStub(channel)  # type: ignore[no-untyped-call]
        prepared = await stub.NodePrepareResources(messages.NodePrepareResourcesRequest(claims=asked))
        unprepared = await stub.NodeUnprepareResources(messages.NodeUnprepareResourcesRequest(claims=asked))
    assert set(prepared.claims) == set(unprepared.claims) == {one.uid for one in asked}
    errors = {uid: answer.error for uid, answer in prepared.claims.items()}
    assert errors == {
        "uid-ada": "", "uid-ben": "", "uid-full": "gpushare: GPU 0 has 0 free units", "uid-broken": "gpushare: a bug",
    }  # fmt: skip
    assert {uid: answer.error for uid, answer in unprepared.claims.items()} == errors
    first, second = prepared.claims["uid-ada"].devices
    assert (list(first.request_names), first.pool_name, first.device_name) == (["gpu-0"], "node-a", "gpu-0")
    assert (first.share_id, second.HasField("share_id"), list(first.cdi_device_ids)) == (SHARE, False, [])
    assert not prepared.claims["uid-full"].devices


async def test_the_kubelet_finds_a_driver_whose_own_socket_answers_already(driver: Driver) -> None:
    async with grpc.aio.insecure_channel(f"unix:{driver.registry}") as channel:
        stub = registration.RegistrationStub(channel)  # type: ignore[no-untyped-call]
        info = await stub.GetInfo(registration_messages.InfoRequest(), timeout=1)
        await stub.NotifyRegistrationStatus(
            registration_messages.RegistrationStatus(plugin_registered=False, error="no")
        )
        assert not driver.registered
        await stub.NotifyRegistrationStatus(registration_messages.RegistrationStatus(plugin_registered=True))
    assert (info.type, info.name, info.endpoint) == ("DRAPlugin", DRIVER, str(driver.service))
    # names of services: a kubelet does not know "v1" (kubernetes pkg/kubelet/cm/dra/plugin)
    assert list(info.supported_versions) == ["v1.DRAPlugin", "v1alpha1.DRAResourceHealth"]
    assert driver.registered == ["yes"]


async def test_the_own_socket_is_served_before_the_one_for_registration(
    short_folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: list[str] = []

    class Noted(GrpcSockets):
        async def serve(self, servers: Mapping[Path, grpc.aio.Server]) -> None:
            served.extend(path.name for path in servers)
            await super().serve(servers)

    monkeypatch.setattr(plugin, "GrpcSockets", Noted)
    driver = Driver(short_folder)
    await driver.sockets.start()
    await driver.sockets.close()
    assert served == ["dra.sock", f"{DRIVER}-reg.sock"]


async def test_health_is_told_whole_at_first_with_each_change_and_before_the_kubelet_takes_it_for_unknown(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plugin.HEALTH_EVERY < 30
    monkeypatch.setattr(plugin, "HEALTH_EVERY", 0.1)
    async with grpc.aio.insecure_channel(f"unix:{driver.service}") as channel:
        stub = health_services.DRAResourceHealthStub(channel)  # type: ignore[no-untyped-call]
        stream = stub.NodeWatchResources(health_messages.NodeWatchResourcesRequest())
        seen = [await _healths(stream)]
        driver.healthy = {"gpu-0": True, "gpu-1": False}
        driver.health.poll()
        async with asyncio.timeout(5):
            while (said := await _healths(stream)) == seen[0]:
                seen.append(said)
        stream.cancel()
    assert seen[0] == {("node-a", "gpu-0"): "HEALTHY", ("node-a", "gpu-1"): "HEALTHY"}
    assert said == {("node-a", "gpu-0"): "HEALTHY", ("node-a", "gpu-1"): "UNHEALTHY"}


async def _healths(stream: Any) -> dict[tuple[str, str], str]:
    answer = await stream.read()
    return {
        (one.device.pool_name, one.device.device_name): health_messages.HealthStatus.Name(one.health)
        for one in answer.devices
    }
