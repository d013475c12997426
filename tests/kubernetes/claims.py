"""Sessions whose pods get their GPUs by claims: what the spawner makes, and looks at slices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.model.kubernetes.annotations import SessionAnnotations, labels
from gpushare_spawner.model.kubernetes.objects import DEVICE_CLASS, DRIVER, HOSTNAME_LABEL, POD_CLAIM, claim_spec
from gpushare_spawner.model.report import GpuReport
from tests.agent.peers import FIRST

from .node_agent import NodeAgent
from .node_agent import session as a_session
from .standin.claim_allocator import GROUP
from .standin.client import ApiStatus, path
from .standin.cluster import Cluster, a_pod

CLASS = {
    "metadata": {"name": DEVICE_CLASS},
    "spec": {"selectors": [{"cel": {"expression": f'device.driver == "{DRIVER}"'}}]},
}


async def make_class(cluster: Cluster) -> None:
    """The chart's DeviceClass; tests at the same time on one cluster share it."""
    try:
        await cluster.admin.create(path("deviceclasses", group=GROUP), CLASS)
    except ApiStatus as error:
        if error.reason != "AlreadyExists":
            raise


async def claiming_pod(
    agent: NodeAgent,
    name: str,
    said: SessionAnnotations | None = None,
    *,
    command: list[str] | None = None,
    cpu: str = "",
    **changes: Any,
) -> dict[str, Any]:
    """Create the pod of a session and its claim on an agent in this process; returns the claim."""
    said = said or a_session(name, **changes)
    gpus = [gpu for gpu in agent.gpus if gpu.uuid in said.gpus]
    return await pod_with_claim(agent.cluster, agent.kubelet.name, name, said, gpus, command, cpu)


async def session_by_claim(
    cluster: Cluster, node: str, name: str, gpus: Sequence[GpuReport], share: int = 25
) -> dict[str, Any]:
    """The same on any agent, with GPUs that it has reported."""
    said = replace(
        a_session(name, share=share), gpus=tuple(gpu.uuid for gpu in gpus), gpu_indices=tuple(gpu.index for gpu in gpus)
    )
    return await pod_with_claim(cluster, node, name, said, gpus)


async def pod_with_claim(
    cluster: Cluster,
    node: str,
    name: str,
    said: SessionAnnotations,
    gpus: Sequence[Gpu | GpuReport],
    command: list[str] | None = None,
    cpu: str = "",
) -> dict[str, Any]:
    """Create the pod of a session and its claim, as the spawner does; returns the claim."""
    claim = f"{name}-claim"
    manifest = a_pod(
        name,
        command,
        limits={"cpu": cpu} if cpu else {},
        annotations=said.annotations(),
        labels=labels(),
        nodeSelector={HOSTNAME_LABEL: node},
        resourceClaims=[{"name": POD_CLAIM, "resourceClaimName": claim}],
    )
    pod = await cluster.admin.create(path("pods", cluster.namespace), manifest)
    owner = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": pod["metadata"]["uid"], "controller": True}
    memory = {gpu.uuid: gpu.memory_bytes for gpu in gpus}
    spec = claim_spec(DEVICE_CLASS, said.share, memory)
    item = {"metadata": {"name": claim, "ownerReferences": [owner]}, "spec": spec}
    made: dict[str, Any] = await cluster.admin.create(path("resourceclaims", cluster.namespace, group=GROUP), item)
    return made


async def published_slice(
    cluster: Cluster, node: str, holds: Callable[[Any], bool], within: float = 10.0
) -> dict[str, Any] | None:
    """A node's slice once it is as wanted; None where it has none."""
    end = asyncio.get_running_loop().time() + within
    fields = f"spec.nodeName={node}"
    while True:
        items = await cluster.admin.list(path("resourceslices", group=GROUP), fields=fields)
        item = items[0] if items else None
        if holds(item):
            return item
        assert asyncio.get_running_loop().time() < end, f"after {within} s the slice is {item}"
        await asyncio.sleep(0.02)


async def claim_of(agent: NodeAgent, name: str) -> dict[str, Any] | None:
    try:
        where = path("resourceclaims", agent.cluster.namespace, f"{name}-claim", group=GROUP)
        found: dict[str, Any] = await agent.cluster.admin.get(where)
    except ApiStatus as error:
        if error.code == 404:
            return None
        raise
    return found


def units_of(item: dict[str, Any] | None, gpu: str = FIRST.uuid) -> int | None:
    """The units that a slice offers of a GPU; None where it does not offer the GPU."""
    for device in item["spec"].get("devices") or [] if item is not None else []:
        if device["attributes"]["uuid"]["string"] == gpu:
            return int(device["capacity"]["units"]["value"])
    return None
