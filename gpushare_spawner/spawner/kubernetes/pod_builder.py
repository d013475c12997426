"""A start's third step: the pod, with its share in it, made and deleted by an API server that may fail for a moment."""

from __future__ import annotations

from typing import Any

from aiohttp import ClientError
from kubernetes_asyncio.client.models import V1Pod
from kubernetes_asyncio.client.rest import ApiException

from gpushare_spawner.model.kubernetes import HOSTNAME_LABEL, HUB
from gpushare_spawner.sharing.native_pod import NativePodLayer
from gpushare_spawner.spawner.kubernetes.api_errors import may_pass, worded
from gpushare_spawner.spawner.kubernetes.placing import PlacingSpawner
from gpushare_spawner.spawner.kubernetes.pod_manifest import RESERVATION, fragment, put_back
from gpushare_spawner.spawner.kubernetes.reservations import PodShare
from gpushare_spawner.spawner.refusal import StartRefused

_WITHOUT_GPU = {"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": "-1"}
"""A server whose template has no GPU must not see those of its node because its image says "all". (NVIDIA Container
Toolkit, environment variables: void is "as if there were no GPU".)"""


class CreatingSpawner(PlacingSpawner):
    """KubeSpawner's manifest and requests; what differs is only for pods with a share."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._perhaps_created = False
        """The reservation's pod may exist."""

    def _reserved(self, reservation: PodShare) -> None:
        super()._reserved(reservation)
        self._perhaps_created = False

    def _give_back_place(self) -> None:
        """The start has failed, or the server is gone: its place is free, once no pod can have it any more."""
        reservation, self._reservation = self._reservation, None
        if reservation is None:
            return
        if not self._perhaps_created:
            self.reservations.give_back(reservation)
            return
        self._perhaps_created = False
        self.reservations.perhaps_created(reservation)
        self.reservations.in_background(self._remove_late_pod(reservation.token))

    async def _remove_late_pod(self, token: str) -> None:
        """Remove the pod of a failed start when it shows: the hub stops only what the reflector has seen by then."""
        async for pod in self.reservations.late_pods(token):
            await self._remove_pod(pod["metadata"], "its start has failed")

    async def get_pod_manifest(self) -> V1Pod:
        """KubeSpawner's manifest, and the share in it."""
        pod = await super().get_pod_manifest()
        reservation = self._reservation
        if reservation is None:
            return pod
        placed, pinned = reservation.placement.node, (pod.spec.node_selector or {}).get(HOSTNAME_LABEL)
        if pinned not in (None, placed):
            raise StartRefused(
                f"The server is placed on node {placed}, and its settings pin it to {pinned}. Tell the admin to set "
                f"{HOSTNAME_LABEL} in node_selector, where it is seen before a place is looked for.",
                reason="bad-template",
                status=500,
            )
        layer = NativePodLayer({gpu.uuid: gpu.index for gpu in reservation.gpus}, self.share_unit_size)
        bare = fragment(pod)
        wish = reservation.wish
        changed = await layer.grant(wish.tenant, wish.template, reservation.placement, bare)
        changed["metadata"]["annotations"].update({RESERVATION: reservation.token, HUB: self.hub.api_url})
        return put_back(pod, changed)

    def get_env(self) -> dict[str, Any]:
        """KubeSpawner's environment; a template without a GPU hides those of the node."""
        environment: dict[str, Any] = super().get_env()
        if self._hidden_gpus and not (self.extra_resource_limits or self.extra_resource_guarantees):
            return {**_WITHOUT_GPU, **environment}
        return environment

    async def _make_create_pod_request(self, pod: Any, request_timeout: float) -> bool:
        """KubeSpawner's; for a pod with a share, an API server that fails for a moment is asked again."""
        if self._reservation is None:
            created: bool = await super()._make_create_pod_request(pod, request_timeout)
            return created
        self._perhaps_created = True
        try:
            created = await super()._make_create_pod_request(pod, request_timeout)
        except (ApiException, ClientError) as error:
            if not may_pass(error):
                raise
            self.log.warning("Pod %s is not created yet: %s", self.pod_name, worded(error))
            return False
        return created

    async def _make_delete_pod_request(self, *args: Any, **kwargs: Any) -> bool:
        """KubeSpawner's; for a server with a share, an API server that fails for a moment is asked again."""
        try:
            deleted: bool = await super()._make_delete_pod_request(*args, **kwargs)
        except (ApiException, ClientError) as error:
            if not self._profile_slug or not may_pass(error):
                raise
            self.log.warning("Pod %s is not deleted yet: %s", self.pod_name, worded(error))
            return False
        return deleted

    def _let_go(self) -> None:
        self._give_back_place()
        super()._let_go()
