"""HAMi 2.10: its device plugin's node annotation, its webhook, and its scheduler extender.

Source: Project-HAMi/HAMi 4707fb0, pkg/device/nvidia/device.go, pkg/scheduler/webhook.go, pkg/device/devices.go.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from ..client import Credentials, KubeClient, path
from ..cluster import Cluster
from ..errors import forbidden
from ..kubelet import StandInKubelet
from ..scheduler import Extender, Scheduler
from .nvidia import node_with_devices

NAME = "hami-scheduler"
GPU, MEMORY, PERCENTAGE, CORES = (f"nvidia.com/{name}" for name in ("gpu", "gpumem", "gpumem-percentage", "gpucores"))
SLOTS = 10
"""Pods on one GPU at most: deviceSplitCount."""
MEMORY_MIB = 81920


class HamiExtender(Extender):
    """Counts memory and cores of GPUs by the annotations of nodes and pods."""

    ignored = frozenset({MEMORY, PERCENTAGE, CORES})

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    def against(self, pod: dict[str, Any], node: dict[str, Any], pods: Sequence[dict[str, Any]]) -> Iterator[str]:
        if self._fitting(pod, node, pods) is None:
            yield "node(s) didn't have enough free GPU resources (CardInsufficientMemory)"

    async def chosen(self, pod: dict[str, Any], node: dict[str, Any], pods: Sequence[dict[str, Any]]) -> bool:
        found = self._fitting(pod, node, pods)
        assert found is not None
        uuid, mib, cores = found
        written = f"{uuid},NVIDIA,{mib},{cores}:;"
        annotations = {
            "hami.io/vgpu-node": node["metadata"]["name"],
            "hami.io/vgpu-devices-to-allocate": written,
            "hami.io/vgpu-devices-allocated": written,
            "hami.io/bind-phase": "success",
        }
        where = path("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])
        await self._client.patch(where, {"metadata": {"annotations": annotations}})
        return True

    def _fitting(
        self, pod: dict[str, Any], node: dict[str, Any], pods: Sequence[dict[str, Any]]
    ) -> tuple[str, int, int] | None:
        """The GPU, MiB and cores that the pod gets."""
        registered = json.loads(node["metadata"].get("annotations", {}).get("hami.io/node-nvidia-register", "[]"))
        asked = pod["spec"]["containers"][0]["resources"]["limits"]
        for gpu in registered:
            mib = int(asked.get(MEMORY, 0)) or gpu["devmem"] * int(asked.get(PERCENTAGE, 100)) // 100
            cores = int(asked.get(CORES, 0))
            held = [device for other in pods if _runs(other) for device in _devices(other) if device[0] == gpu["id"]]
            if (
                gpu.get("health")
                and len(held) < gpu["count"]
                and sum(one[1] for one in held) + mib <= gpu["devmem"]
                and sum(one[2] for one in held) + cores <= gpu["devcore"]
            ):
                return gpu["id"], mib, cores
        return None


def _runs(pod: dict[str, Any]) -> bool:
    return pod["status"].get("phase") not in ("Succeeded", "Failed")


def _devices(pod: dict[str, Any]) -> list[tuple[str, int, int]]:
    written = (pod["metadata"].get("annotations") or {}).get("hami.io/vgpu-devices-allocated", "")
    fields = [device.split(",") for device in written.replace(";", "").split(":") if device]
    return [(uuid, int(mib), int(cores)) for uuid, _, mib, cores in fields]


def webhook(pod: dict[str, Any]) -> None:
    """A pod that asks for a GPU gets HAMi's scheduler, unless it names another one; a privileged one is left alone."""
    limits = [(container.get("resources") or {}).get("limits") or {} for container in pod["spec"]["containers"]]
    if not any(name in amounts for amounts in limits for name in (GPU, MEMORY, PERCENTAGE, CORES)):
        return
    if pod["spec"].get("schedulerName", "default-scheduler") not in ("", "default-scheduler", NAME):
        return
    if pod["spec"].get("nodeName"):
        raise forbidden('admission webhook "vgpu.hami.io" denied the request: pod has node assigned')
    pod["spec"]["schedulerName"] = NAME


@contextlib.asynccontextmanager
async def hami(cluster: Cluster, gpus: int = 1) -> AsyncIterator[StandInKubelet]:
    """A node with GPUs that HAMi has registered, its webhook and its scheduler."""
    if cluster.server is not None:
        cluster.server.pod_webhooks.append(webhook)
    ids = [f"GPU-hami-{gpu}-{slot}" for gpu in range(gpus) for slot in range(SLOTS)]
    registered = [
        {
            "id": f"GPU-hami-{gpu}",
            # GPU 0 has no index: the field is left out where it is 0
            **({"index": gpu} if gpu else {}),
            "count": SLOTS,
            "devmem": MEMORY_MIB,
            "devcore": 100,
            "type": "NVIDIA-A100",
            "mode": "hami-core",
            "health": True,
        }
        for gpu in range(gpus)
    ]
    async with contextlib.AsyncExitStack() as stack:
        node = await stack.enter_async_context(node_with_devices(cluster, {GPU: ids}, {}))
        annotation = {"hami.io/node-nvidia-register": json.dumps(registered)}
        await cluster.admin.patch(path("nodes", name=node.name), {"metadata": {"annotations": annotation}})
        client = await stack.enter_async_context(KubeClient(Credentials(cluster.url, cluster.admin_token)))
        await stack.enter_async_context(Scheduler(client, name=NAME, extender=HamiExtender(client)))
        yield node
