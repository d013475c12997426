"""The stand-ins treat slices and claims as a real cluster was seen to (Kubernetes 1.36.2)."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.model.kubernetes.objects import DEVICE_CLASS, DRIVER

from .claims import make_class
from .standin.claim_allocator import CANNOT, GROUP
from .standin.client import ApiStatus, path
from .standin.cluster import Cluster, a_pod

UUID = "GPU-1"
SMALLEST = {"units": "1", "memory": "1Mi"}


def a_slice(node: str, units: str = "100", memory: str = "16Gi", **device: Any) -> dict[str, Any]:
    capacity = {
        name: {
            "value": value,
            "requestPolicy": {
                "default": SMALLEST[name], "validRange": {"min": SMALLEST[name], "step": SMALLEST[name]},
            },
        }
        for name, value in (("units", units), ("memory", memory))
    }  # fmt: skip
    attributes = {"uuid": {"string": UUID}}
    one = {"name": "gpu-1", "allowMultipleAllocations": True, "attributes": attributes, "capacity": capacity, **device}
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": [one]}
    return {"metadata": {"name": f"{node}-slice"}, "spec": spec}


async def claim(cluster: Cluster, name: str, requests: dict[str, str], expression: str = "") -> None:
    """A pod and its claim of the only GPU."""
    await cluster.admin.create(
        path("pods", cluster.namespace), a_pod(name, resourceClaims=[{"name": "gpu", "resourceClaimName": name}])
    )
    exactly: dict[str, Any] = {"deviceClassName": DEVICE_CLASS}
    if requests:
        exactly["capacity"] = {"requests": requests}
    if expression:
        exactly["selectors"] = [{"cel": {"expression": expression}}]
    item = {"metadata": {"name": name}, "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}}
    await cluster.admin.create(path("resourceclaims", cluster.namespace, group=GROUP), item)


async def consumed(cluster: Cluster, name: str) -> dict[str, str]:
    """What a pod's claim has got, once it is bound."""
    await cluster.wait_for_pod(name, lambda pod: bool(pod["spec"].get("nodeName")), timeout=5)
    found = await cluster.admin.get(path("resourceclaims", cluster.namespace, name, group=GROUP))
    (result,) = found["status"]["allocation"]["devices"]["results"]
    amounts: dict[str, str] = result["consumedCapacity"]
    return amounts


async def refused(cluster: Cluster, name: str) -> None:
    def said(pod: dict[str, Any]) -> bool:
        conditions = pod["status"].get("conditions") or [{}]
        return CANNOT in conditions[-1].get("message", "")

    await cluster.wait_for_pod(name, said, timeout=5)


@pytest.fixture
async def node(cluster: Cluster) -> str:
    cluster.standin("this is about the stand-ins")
    await make_class(cluster)
    name = (await cluster.make_node()).name
    await cluster.admin.create(path("resourceslices", group=GROUP), a_slice(name))
    return name


async def test_amounts_are_rounded_up_and_each_capacity_is_held_to_its_own_sum(cluster: Cluster, node: str) -> None:
    await claim(cluster, "a", {"units": "60"})
    # what is not named takes the default
    assert await consumed(cluster, "a") == {"units": "60", "memory": "1048576"}
    await claim(cluster, "b", {"units": "2.5", "memory": "1Gi"})
    assert (await consumed(cluster, "b"))["units"] == "3"
    await claim(cluster, "c", {"units": "38"})
    await claim(cluster, "d", {"memory": "16Gi"})
    await refused(cluster, "c")
    await refused(cluster, "d")
    # a value that is raised lets the first of them come
    where = path("resourceslices", name=f"{node}-slice", group=GROUP)
    item = await cluster.admin.get(where)
    item["spec"]["devices"][0]["capacity"]["units"]["value"] = "101"
    await cluster.admin.update(where, item)
    assert (await consumed(cluster, "c"))["units"] == "38"


async def test_an_unknown_attribute_ends_the_allocation_and_the_class_selects_the_driver_first(
    cluster: Cluster, node: str
) -> None:
    foreign = a_slice(node)
    foreign["metadata"]["name"] = "foreign"
    foreign["spec"] |= {"driver": "gpu.example.org", "pool": {**foreign["spec"]["pool"], "name": "theirs"}}
    await cluster.admin.create(path("resourceslices", group=GROUP), foreign)
    mine = f'device.attributes["{DRIVER}"].uuid == "{UUID}"'
    await claim(cluster, "a", {"units": "1"}, mine)
    assert await consumed(cluster, "a")
    await claim(cluster, "b", {"units": "1"}, f'device.attributes["{DRIVER}"].colour == "red"')
    await refused(cluster, "b")


async def test_what_the_server_refuses_and_what_cannot_be_changed(cluster: Cluster, node: str) -> None:
    wrong = a_slice(node)
    wrong["metadata"]["name"] = "wrong"
    wrong["spec"]["devices"][0]["capacity"]["units"]["requestPolicy"]["validRange"]["max"] = "130"
    with pytest.raises(ApiStatus, match="max is larger than capacity value"):
        await cluster.admin.create(path("resourceslices", group=GROUP), wrong)
    await claim(cluster, "a", {"units": "1"})
    where = path("resourceclaims", cluster.namespace, "a", group=GROUP)
    found = copy.deepcopy(await cluster.admin.get(where))
    found["spec"]["devices"]["requests"][0]["exactly"]["capacity"]["requests"]["units"] = "2"
    with pytest.raises(ApiStatus, match="field is immutable"):
        await cluster.admin.update(where, found)


async def test_a_gate_that_is_off_drops_fields_and_a_share_is_a_whole_device(cluster: Cluster, node: str) -> None:
    cluster.standin("this is about the stand-ins").gates = set()
    where = path("resourceslices", name=f"{node}-slice", group=GROUP)
    await cluster.admin.delete(where)
    taint = {"key": "example.org/broken", "effect": "NoSchedule"}
    await cluster.admin.create(path("resourceslices", group=GROUP), a_slice(node, taints=[taint]))
    (device,) = (await cluster.admin.get(where))["spec"]["devices"]
    assert device.keys() == {"name", "attributes", "capacity"}
    assert "requestPolicy" not in device["capacity"]["units"]
    await claim(cluster, "a", {"units": "10"})
    await cluster.wait_for_pod("a", lambda pod: bool(pod["spec"].get("nodeName")), timeout=5)
    await claim(cluster, "b", {"units": "10"})
    await refused(cluster, "b")


async def test_a_pod_that_mounts_a_folder_which_is_not_there_is_not_prepared(
    cluster: Cluster, node: str, tmp_path: Path
) -> None:
    """A kubelet waits for volumes first: a driver that makes the folder is not asked."""
    volume = {"name": "own", "hostPath": {"path": str(tmp_path / "late"), "type": "Directory"}}
    pod = a_pod("a", resourceClaims=[{"name": "gpu", "resourceClaimName": "b"}], volumes=[volume])
    await cluster.admin.create(path("pods", cluster.namespace), pod)
    await claim(cluster, "b", {"units": "1"})
    await cluster.wait_for_pod("a", lambda pod: bool(pod["spec"].get("nodeName")), timeout=5)
    while "FailedMount" not in [reason for reason, _ in await cluster.events("a")]:
        await asyncio.sleep(0.02)
    assert "FailedPrepareDynamicResources" not in [reason for reason, _ in await cluster.events("a")]
