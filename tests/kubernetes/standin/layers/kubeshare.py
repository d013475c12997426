"""KubeShare 2: its scheduler, which deletes a pod and creates it again on the node that it chose.

Source: NTHU-LSALAB/KubeShare a862311, pkg/scheduler/pod.go.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from ..client import Credentials, KubeClient, path
from ..cluster import Cluster
from ..kubelet import StandInKubelet
from ..programs import Listeners
from ..scheduler import Extender, Scheduler
from .nvidia import discovered

NAME = "kubeshare-scheduler"
REQUEST, UUID = "sharedgpu/gpu_request", "sharedgpu/gpu_uuid"
GPU_UUID = "GPU-kubeshare-0"


class KubeShareExtender(Extender):
    """One GPU on each node."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    def against(self, pod: dict[str, Any], node: dict[str, Any], pods: Sequence[dict[str, Any]]) -> Iterator[str]:
        here = [
            other
            for other in pods
            if other["spec"].get("nodeName") == node["metadata"]["name"] and other["status"].get("phase") != "Failed"
        ]
        if sum(map(_requested, here)) + _requested(pod) > 1.0001:
            yield "the GPU resource is insufficient"

    async def chosen(self, pod: dict[str, Any], node: dict[str, Any], pods: Sequence[dict[str, Any]]) -> bool:
        metadata = pod["metadata"]
        await self._client.delete(path("pods", metadata["namespace"], metadata["name"]), grace=0)
        kept = {name: metadata.get(name) or {} for name in ("labels", "annotations")}
        again = {
            "metadata": {"name": metadata["name"], **kept, "annotations": {**kept["annotations"], UUID: GPU_UUID}},
            "spec": {**pod["spec"], "nodeName": node["metadata"]["name"]},
        }
        await self._client.create(path("pods", metadata["namespace"]), again)
        return False


def _requested(pod: dict[str, Any]) -> float:
    return float((pod["metadata"].get("labels") or {}).get(REQUEST, 0))


@contextlib.asynccontextmanager
async def kubeshare(cluster: Cluster) -> AsyncIterator[StandInKubelet]:
    """A node with one GPU, and the scheduler."""
    labels = discovered("NVIDIA-V100", 1)
    async with contextlib.AsyncExitStack() as stack:
        node = await cluster.make_node(programs=Listeners(), labels=labels)
        client = await stack.enter_async_context(KubeClient(Credentials(cluster.url, cluster.admin_token)))
        await stack.enter_async_context(Scheduler(client, name=NAME, extender=KubeShareExtender(client)))
        yield node
