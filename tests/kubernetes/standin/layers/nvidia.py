"""NVIDIA's device plugin and GPU feature discovery: replicas (time-slicing, MPS) and MIG devices."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ..cluster import Cluster
from ..kubelet import StandInKubelet
from ..programs import Listeners
from ..small_plugin import SmallPlugin

MEMORY_MIB = 81920


def discovered(model: str, gpus: int, **labels: str) -> dict[str, str]:
    """The labels of GPU feature discovery, `labels` with underscores for the dashes of their last part."""
    found = {"product": model, "count": str(gpus), "memory": str(MEMORY_MIB), **labels}
    return {f"nvidia.com/gpu.{name.replace('_', '-')}": value for name, value in found.items()}


def replica_ids(gpus: int, replicas: int) -> list[str]:
    """As the plugin names replicas: the GPU's UUID and a number (internal/rm/devices.go, AnnotatedID)."""
    return [f"GPU-{gpu}::{replica}" for gpu in range(gpus) for replica in range(replicas)]


class NvidiaPlugin(SmallPlugin):
    """``most``: devices that one container may ask for at most; None: any number."""

    def __init__(self, *args: Any, most: int | None = None) -> None:
        super().__init__(*args)
        self._most = most
        self.answer = lambda ids: {"NVIDIA_VISIBLE_DEVICES": ",".join(sorted({one.partition("::")[0] for one in ids}))}

    async def Allocate(self, request: Any, context: Any) -> Any:
        (asked,) = request.container_requests
        if self._most is not None and len(asked.devices_ids) > self._most:
            # internal/rm/rm.go, ValidateRequest
            raise ValueError(f"maximum request size for shared resources is {self._most}")
        return await super().Allocate(request, context)


@contextlib.asynccontextmanager
async def node_with_devices(
    cluster: Cluster, devices: Mapping[str, list[str]], labels: Mapping[str, str], most: int | None = None
) -> AsyncIterator[StandInKubelet]:
    """A node whose plugin offers these devices, by resource, once its status shows them."""
    async with contextlib.AsyncExitStack() as stack:
        node = await cluster.make_node(programs=Listeners(), labels=labels, status_interval=0.05)
        for resource, ids in devices.items():
            await stack.enter_async_context(NvidiaPlugin(node.plugin_folder, resource, ids, most=most))
            await cluster.wait_for_allocatable(node.name, resource, len(ids))
        yield node


@contextlib.asynccontextmanager
async def shared_node(
    cluster: Cluster,
    replicas: int,
    strategy: str = "time-slicing",
    resource: str = "nvidia.com/gpu.shared",
    gpus: int = 1,
    model: str = "NVIDIA-L4",
    **labels: str,
) -> AsyncIterator[StandInKubelet]:
    """A node whose GPUs have replicas. Its product has the suffix -SHARED unless the resource is renamed."""
    product = model if resource.endswith(".shared") else f"{model}-SHARED"
    found = discovered(product, gpus, replicas=str(replicas), sharing_strategy=strategy) | labels
    most = 1 if strategy == "mps" else None
    async with node_with_devices(cluster, {resource: replica_ids(gpus, replicas)}, found, most) as node:
        yield node


@contextlib.asynccontextmanager
async def mig_node(
    cluster: Cluster, profiles: Mapping[str, int], model: str = "NVIDIA-A100-SXM4-80GB"
) -> AsyncIterator[StandInKubelet]:
    """A node with the MIG strategy "mixed": so many devices of each profile, like 1g.10gb; "+" is "." in resources."""
    memory = {profile: int(profile.partition(".")[2].partition("gb")[0]) * 1024 for profile in profiles}
    labels = discovered(model, 1, replicas="0", sharing_strategy="none") | {"nvidia.com/mig.strategy": "mixed"}
    devices = {}
    for profile, count in profiles.items():
        resource = f"nvidia.com/mig-{profile.replace('+', '.')}"
        devices[resource] = [f"MIG-{profile}-{number}" for number in range(count)]
        labels |= {
            f"{resource}.count": str(count),
            f"{resource}.memory": str(memory[profile]),
            f"{resource}.product": f"{model}-MIG-{profile.replace('+', '.')}",
        }
    async with node_with_devices(cluster, devices, labels) as node:
        yield node
