"""KAI Scheduler 0.17: its admission webhook, its scheduler and binder, reservation pods and queues.

Source: kai-scheduler/KAI-Scheduler d5bc503, pkg/admission/webhook/v1alpha2/gpusharing, pkg/binder/binding.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from ..client import ApiStatus, Credentials, KubeClient, path
from ..cluster import Cluster
from ..errors import forbidden
from ..kubelet import StandInKubelet
from ..quantities import quantity
from ..scheduler import Extender, Scheduler
from .nvidia import discovered, node_with_devices

NAME = "kai-scheduler"
GROUP = "scheduling.run.ai/v2"
GPU = "nvidia.com/gpu"
FRACTION = "gpu-fraction"
LABEL = "runai-gpu-group"
QUEUE = "kai.scheduler/queue"


def webhook(pod: dict[str, Any]) -> None:
    """Refuse what KAI refuses: a fraction of 1 or more, beside whole GPUs, or beside memory."""
    given = pod["metadata"].get("annotations") or {}
    asked = any(
        GPU in ((container.get("resources") or {}).get("limits") or {}) for container in pod["spec"]["containers"]
    )
    denied = 'admission webhook "binder.admission.kai" denied the request: '
    if FRACTION not in given and "gpu-memory" not in given:
        return
    if asked:
        raise forbidden(f"{denied}cannot have both GPU fraction request and whole GPU resource request/limit")
    if FRACTION in given and "gpu-memory" in given:
        raise forbidden(f"{denied}cannot request both GPU fraction and GPU memory")
    if FRACTION in given and not 0 < float(given[FRACTION]) < 1:
        raise forbidden(f"{denied}gpu-fraction annotation value must be a positive number smaller than 1.0")


class KaiExtender(Extender):
    """Places fractions on GPUs, and holds a whole GPU of the node for each group by a pod."""

    def __init__(self, client: KubeClient, reservations: str) -> None:
        self._client = client
        self._reservations = reservations
        self._groups = 0

    def against(self, pod: dict[str, Any], node: dict[str, Any], pods: Sequence[dict[str, Any]]) -> Iterator[str]:
        if QUEUE not in (pod["metadata"].get("labels") or {}):
            yield "the pod has no queue"
        asked = _fraction(pod)
        if asked and self._group_for(asked, node, pods) is None and self._whole(node, pods) < 1:
            yield "node(s) didn't have enough resources: GPUs"

    async def chosen(self, pod: dict[str, Any], node: dict[str, Any], pods: Sequence[dict[str, Any]]) -> bool:
        asked = _fraction(pod)
        if not asked:
            return True
        group = self._group_for(asked, node, pods)
        if group is None:
            self._groups += 1
            group = f"group-{self._groups}"
            await self._reserve(group, node["metadata"]["name"])
        where = path("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])
        annotations = {"received-resource-type": "Fraction"}
        await self._client.patch(where, {"metadata": {"labels": {LABEL: group}, "annotations": annotations}})
        return True

    async def look(self, pods: Sequence[dict[str, Any]]) -> None:
        """Let go of GPUs whose pods are gone, and write what queues have."""
        alive = {_group(pod) for pod in pods if self._shares(pod)}
        for pod in pods:
            if pod["metadata"]["namespace"] == self._reservations and _group(pod) not in alive:
                with contextlib.suppress(ApiStatus):
                    await self._client.delete(path("pods", self._reservations, pod["metadata"]["name"]), grace=0)
        for queue in await self._client.list(path("queues", group=GROUP)):
            name = queue["metadata"]["name"]
            gpus = sum(_fraction(pod) for pod in pods if self._shares(pod) and pod["metadata"]["labels"][QUEUE] == name)
            has = {GPU: str(round(gpus, 2))}
            if (queue.get("status") or {}).get("allocated") != has:
                status = {"status": {"allocated": has, "allocatedNonPreemptible": has}}
                await self._client.patch(path("queues", name=name, group=GROUP, subresource="status"), status)

    def _shares(self, pod: dict[str, Any]) -> bool:
        bound = pod["spec"].get("nodeName") and pod["status"].get("phase") not in ("Succeeded", "Failed")
        return bool(bound and _group(pod) and pod["metadata"]["namespace"] != self._reservations)

    def _group_for(self, asked: float, node: dict[str, Any], pods: Sequence[dict[str, Any]]) -> str | None:
        used: dict[str, float] = {}
        for pod in pods:
            if self._shares(pod) and pod["spec"]["nodeName"] == node["metadata"]["name"]:
                used[_group(pod)] = used.get(_group(pod), 0.0) + _fraction(pod)
        return next((group for group, part in used.items() if part + asked <= 1.0001), None)

    def _whole(self, node: dict[str, Any], pods: Sequence[dict[str, Any]]) -> int:
        here = [pod for pod in pods if pod["spec"].get("nodeName") == node["metadata"]["name"]]
        taken = sum(
            int(quantity(((container.get("resources") or {}).get("requests") or {}).get(GPU, 0)))
            for pod in here
            for container in pod["spec"]["containers"]
        )
        return int(quantity(node["status"]["allocatable"].get(GPU, 0))) - taken

    async def _reserve(self, group: str, node: str) -> None:
        container = {"name": "reservation", "image": "standin/pause:1", "resources": {"limits": {GPU: "1"}}}
        name = f"gpu-reservation-{group}"
        metadata = {"name": name, "labels": {LABEL: group}, "annotations": {"run.ai/reserve_for_gpu_index": "0"}}
        pod = {"metadata": metadata, "spec": {"containers": [container], "nodeName": node}}
        await self._client.create(path("pods", self._reservations), pod)


def _fraction(pod: dict[str, Any]) -> float:
    return float((pod["metadata"].get("annotations") or {}).get(FRACTION, 0))


def _group(pod: dict[str, Any]) -> str:
    return str((pod["metadata"].get("labels") or {}).get(LABEL, ""))


@contextlib.asynccontextmanager
async def kai(cluster: Cluster, reservations: str, gpus: int = 1) -> AsyncIterator[StandInKubelet]:
    """A node with GPUs, KAI's webhook and its scheduler. ``reservations``: the namespace of its own pods."""
    if cluster.server is not None:
        cluster.server.pod_webhooks.append(webhook)
    ids = [f"GPU-kai-{gpu}" for gpu in range(gpus)]
    labels = discovered("NVIDIA-A100", gpus, replicas="1", sharing_strategy="none")
    async with contextlib.AsyncExitStack() as stack:
        node = await stack.enter_async_context(node_with_devices(cluster, {GPU: ids}, labels))
        client = await stack.enter_async_context(KubeClient(Credentials(cluster.url, cluster.admin_token)))
        await stack.enter_async_context(Scheduler(client, name=NAME, extender=KaiExtender(client, reservations)))
        yield node
