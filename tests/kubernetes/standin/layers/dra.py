"""NVIDIA's DRA driver: its ResourceSlice and DeviceClass, and the cluster's controller of claim templates.

Source: kubernetes-sigs/dra-driver-nvidia-gpu 9593204, cmd/gpu-kubelet-plugin; kubernetes 1.36,
pkg/controller/resourceclaim.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from gpushare_spawner.agent.kubernetes.claims.plugin import SUPPORTED
from gpushare_spawner.agent.kubernetes.kubelet import dra_health_pb2 as health_messages
from gpushare_spawner.agent.kubernetes.kubelet import dra_health_pb2_grpc as health
from gpushare_spawner.agent.kubernetes.kubelet import dra_pb2 as messages
from gpushare_spawner.agent.kubernetes.kubelet import dra_pb2_grpc as services
from gpushare_spawner.agent.kubernetes.kubelet import pluginregistration_pb2 as registration_messages
from gpushare_spawner.agent.kubernetes.kubelet import pluginregistration_pb2_grpc as registration

from ..client import ApiStatus, Credentials, KubeClient, path
from ..cluster import Cluster
from ..kubelet import StandInKubelet
from ..programs import Listeners

GROUP = "resource.k8s.io/v1"
DRIVER = "gpu.nvidia.com"
MEMORY = "81920Mi"


def shared_gpu(index: int, shares: int = 100) -> dict[str, Any]:
    """A GPU as the driver publishes it with --consumable-shares."""
    policy = {"default": "1", "validRange": {"min": "1", "step": "1"}}
    memory = {"default": "1Mi", "validRange": {"min": "1Mi", "step": "1Mi"}}
    return {
        "name": f"gpu-{index}",
        "allowMultipleAllocations": True,
        "attributes": {
            "type": {"string": "gpu"},
            "uuid": {"string": f"GPU-dra-{index}"},
            "productName": {"string": "NVIDIA A100-SXM4-80GB"},
        },
        "capacity": {
            "memory": {"value": MEMORY, "requestPolicy": memory},
            "shares": {"value": str(shares), "requestPolicy": policy},
        },
    }


class SmallDriver(services.DRAPluginServicer, registration.RegistrationServicer, health.DRAResourceHealthServicer):
    """Prepares every claim. Start with ``async with``."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "plugins_registry" / "nvidia-reg.sock"
        self._server = grpc.aio.server()

    async def __aenter__(self) -> SmallDriver:
        services.add_DRAPluginServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        registration.add_RegistrationServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        health.add_DRAResourceHealthServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(f"unix:{self._socket}")
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(grace=None)

    async def GetInfo(self, request: Any, context: Any) -> registration_messages.PluginInfo:
        return registration_messages.PluginInfo(
            type="DRAPlugin", name=DRIVER, endpoint=str(self._socket), supported_versions=SUPPORTED
        )

    async def NotifyRegistrationStatus(
        self, request: Any, context: Any
    ) -> registration_messages.RegistrationStatusResponse:
        return registration_messages.RegistrationStatusResponse()

    async def NodeWatchResources(
        self, request: Any, context: Any
    ) -> AsyncIterator[health_messages.NodeWatchResourcesResponse]:
        yield health_messages.NodeWatchResourcesResponse()
        await asyncio.Event().wait()

    async def NodePrepareResources(self, request: Any, context: Any) -> messages.NodePrepareResourcesResponse:
        done = {claim.uid: messages.NodePrepareResourceResponse() for claim in request.claims}
        return messages.NodePrepareResourcesResponse(claims=done)

    async def NodeUnprepareResources(self, request: Any, context: Any) -> messages.NodeUnprepareResourcesResponse:
        done = {claim.uid: messages.NodeUnprepareResourceResponse() for claim in request.claims}
        return messages.NodeUnprepareResourcesResponse(claims=done)


async def _make_claims(client: KubeClient, namespace: str) -> None:
    """Make a claim of each template that a pod names, as the resource claim controller does."""

    async def listed(pods: list[dict[str, Any]]) -> None:
        for pod in pods:
            await changed("ADDED", pod)

    async def changed(what: str, pod: dict[str, Any]) -> None:
        made = {one["name"] for one in pod["status"].get("resourceClaimStatuses") or []}
        asked = [one for one in pod["spec"].get("resourceClaims") or [] if one.get("resourceClaimTemplateName")]
        if what == "DELETED" or pod["metadata"].get("deletionTimestamp") or all(one["name"] in made for one in asked):
            return
        name, statuses = pod["metadata"]["name"], []
        owner = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": pod["metadata"]["uid"], "controller": True}
        for one in asked:
            where = path("resourceclaimtemplates", namespace, one["resourceClaimTemplateName"], group=GROUP)
            spec = (await client.get(where))["spec"]["spec"]
            claim = {"metadata": {"generateName": f"{name}-{one['name']}-", "ownerReferences": [owner]}, "spec": spec}
            created = await client.create(path("resourceclaims", namespace, group=GROUP), claim)
            statuses.append({"name": one["name"], "resourceClaimName": created["metadata"]["name"]})
        status = {"status": {"resourceClaimStatuses": statuses}}
        with contextlib.suppress(ApiStatus):
            await client.patch(path("pods", namespace, name, "status"), status)

    await client.follow(path("pods", namespace), listed, changed)


@contextlib.asynccontextmanager
async def dra(cluster: Cluster, devices: list[dict[str, Any]]) -> AsyncIterator[StandInKubelet]:
    """A node with these devices, the driver's DeviceClass, and the controller."""
    device_class = {
        "metadata": {"name": DRIVER},
        "spec": {"selectors": [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}]},
    }
    async with contextlib.AsyncExitStack() as stack:
        node = await cluster.make_node(programs=Listeners())
        await stack.enter_async_context(SmallDriver(node.folder))
        pool = {"name": node.name, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": DRIVER, "nodeName": node.name, "pool": pool, "devices": devices}
        await cluster.make_cluster_wide("deviceclasses", GROUP, device_class)
        await cluster.make_cluster_wide(
            "resourceslices", GROUP, {"metadata": {"name": f"{node.name}-dra"}, "spec": spec}
        )
        client = await stack.enter_async_context(KubeClient(Credentials(cluster.url, cluster.admin_token)))
        controller = asyncio.create_task(_make_claims(client, cluster.namespace))
        try:
            yield node
        finally:
            controller.cancel()
            await asyncio.gather(controller, return_exceptions=True)
