"""What the kubelet lists, and when a pod that it does not list has ended."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gpushare_spawner.agent.kubernetes.devices.owners import AllocatedDevices
from gpushare_spawner.agent.kubernetes.devices.pod_resources import KubeletAssignments
from gpushare_spawner.agent.kubernetes.pods.sessions import GONE_AFTER, TRUST_KUBELET_AFTER, KubeletList
from gpushare_spawner.log_once import EachOnce
from tests.agent.peers import FIRST, SECOND

ADA = ("jupyter", "ada")
RESOURCE = "gpushare-spawner.io/gpu-0"


class Clock:
    """The event loop's time, which only the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class World:
    """A list of the kubelet, and the devices of two GPUs that no session holds."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.held = AllocatedDevices((FIRST, SECOND), 100, 1, {}, folder)
        self.list = KubeletList(self.held, EachOnce(logging.getLogger("test")), self.clock)
        self.ids = self.held.offered(FIRST.uuid)

    def lists(self, *ids: str, started: float = 1.0, resource: str = RESOURCE) -> None:
        """The kubelet lists a container of Ada's pod with these ids; none: no pod."""
        by_pod = {ADA: {resource: (frozenset(ids),)}} if ids else {}
        self.list.take(KubeletAssignments(by_pod, {}, started), {ADA})


@pytest.fixture
async def world(tmp_path: Path) -> World:
    return World(tmp_path / "pods")


async def test_listed_devices_are_sorted_by_gpu(world: World) -> None:
    world.lists(*world.ids[:2])
    assert list(world.list.pods()) == [(ADA, {FIRST.uuid: (frozenset(world.ids[:2]),)})]


async def test_devices_of_other_plugins_are_left_out(world: World) -> None:
    world.lists("GPU-of-another-plugin", resource="nvidia.com/gpu")
    assert list(world.list.pods()) == []


async def test_device_of_an_unknown_gpu_is_logged_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        world.lists("GPU-that-was-taken-out", world.ids[0])
    assert list(world.list.pods()) == [(ADA, {FIRST.uuid: (frozenset(world.ids[:1]),)})]
    assert [record.message for record in caplog.records] == [
        f"device GPU-that-was-taken-out of {RESOURCE} belongs to a GPU that this agent does not have (any more)"
    ]


async def test_pod_has_ended_when_it_was_missing_for_long_enough(world: World) -> None:
    world.lists(world.ids[0])
    assert not world.list.has_ended(ADA)
    world.lists()
    world.clock.now += GONE_AFTER - 0.1
    assert not world.list.has_ended(ADA)
    world.clock.now += 0.1
    assert world.list.has_ended(ADA)


async def test_pod_that_is_listed_again_has_not_ended(world: World) -> None:
    world.lists()
    world.clock.now += GONE_AFTER - 1
    world.lists(world.ids[0])
    world.lists()
    world.clock.now += GONE_AFTER - 1
    assert not world.list.has_ended(ADA)


async def test_kubelet_that_has_just_started_ends_no_pod(world: World) -> None:
    world.lists()
    world.clock.now += GONE_AFTER
    world.lists(started=2.0)
    assert not world.list.has_ended(ADA)
    world.clock.now += TRUST_KUBELET_AFTER
    assert world.list.has_ended(ADA)


async def test_allocated_devices_that_no_pod_holds_become_free(world: World) -> None:
    grant = world.held.grant(FIRST.uuid, world.ids[:3])
    # a grant carries the event loop's time
    world.clock.now = grant.made_at + TRUST_KUBELET_AFTER
    world.lists()
    world.clock.now = grant.made_at + GONE_AFTER
    world.lists()
    assert world.held.pending
    world.clock.now += 0.1
    world.lists()
    assert not world.held.pending
    assert not world.held.folder_of(grant).exists()


async def test_devices_of_a_grant_stay_while_a_pod_holds_them(world: World) -> None:
    grant = world.held.grant(FIRST.uuid, world.ids[:3])
    world.clock.now = grant.made_at + 10 * GONE_AFTER
    world.lists(*world.ids[:3])
    assert list(world.held.pending.values()) == [grant]


async def test_dropped_pod_is_listed_no_more(world: World) -> None:
    world.lists(world.ids[0])
    assert world.list.drop(ADA)
    assert not world.list.drop(ADA)
    assert list(world.list.pods()) == []
