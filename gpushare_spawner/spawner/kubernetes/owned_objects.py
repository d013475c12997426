"""Creates a pod's objects, which are the claim for its share and the Secret with its server's token, and removes pods.

The pod is created first and owns these objects, so that an aborted start leaves none. The scheduler waits for the
claims that a pod names, and the kubelet for the Secrets. `PodObjects` also creates a layer's objects in the server's
namespace before the pod, such as a ResourceClaimTemplate, and removes pods of an earlier or failed start and pods of
servers that the hub no longer knows.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kubernetes_asyncio.client import V1EnvVar, V1EnvVarSource, V1Pod, V1SecretKeySelector

from gpushare_spawner.background import pauses
from gpushare_spawner.clients.api import ApiFailure, ClusterApi
from gpushare_spawner.model.kubernetes.annotations import LAYER
from gpushare_spawner.model.kubernetes.objects import CLAIMS_API, claim_name
from gpushare_spawner.model.layers import LAYERS, LayerName
from gpushare_spawner.spawner.hub import SpawnRefused
from gpushare_spawner.spawner.kubernetes.cluster.layers import POD_LAYERS
from gpushare_spawner.spawner.kubernetes.cluster.pods import holds_share, orphans
from gpushare_spawner.spawner.kubernetes.pod import claim_layer
from gpushare_spawner.spawner.kubernetes.reservations import PodReservation, PodReservations
from gpushare_spawner.spawner.queue.snapshot import LayerOffer
from gpushare_spawner.wording import spawn_form as words

PAUSES = 0.1, 2.0
"""Seconds between attempts: the first pause and the longest pause."""
ASK_AGAIN_SECONDS = 300.0
"""Seconds until the permission to create Secrets is checked again, because permissions can change. Our value: the same
as `cluster.node_resources.ASK_AGAIN_SECONDS`.
"""
_TRIES = 3
"""Number of attempts for an object that another client deletes as soon as it exists."""
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_APIS = {"Pod": "/api/v1", "Secret": "/api/v1", "ResourceClaim": CLAIMS_API, "ResourceClaimTemplate": CLAIMS_API}
"""The API of each kind."""

Object = dict[str, Any]
OfOwner = Callable[[str], Object]
"""Function that returns the manifest of an object for the uid of the pod that owns it."""


def token_secret(pod: V1Pod, token: str) -> OfOwner | None:
    """Move the variables that contain the server's token from the pod's containers to a new Secret. Return the Secret.

    Otherwise every user with the right to read pods could read the values. JupyterHub writes the token into two
    variables. Returns None if no variable contains it, or if the pod's layer replaces the pod, because the Secret would
    be deleted with it. The same values in an admin's containers are moved too.
    """
    layer = (pod.metadata.labels or {}).get(LAYER)
    if layer is not None and LAYERS[LayerName(layer)].replaces_pods:
        return None
    name, values = claim_name(pod.metadata.name, secrets.token_hex(4)), dict[str, str]()
    for container in [*(pod.spec.init_containers or ()), *pod.spec.containers]:
        # additions by an admin's hooks and settings are dicts
        env = (container.get("env") if isinstance(container, Mapping) else container.env) or []
        for index, variable in enumerate(env):
            current = variable if isinstance(variable, Mapping) else {"name": variable.name, "value": variable.value}
            value = str(current.get("value") or "")
            if token and token in value and values.setdefault(current["name"], value) == value:
                selector = V1SecretKeySelector(name=name, key=current["name"])
                env[index] = V1EnvVar(name=current["name"], value_from=V1EnvVarSource(secret_key_ref=selector))

    def of_owner(uid: str) -> Object:
        owner = {"apiVersion": "v1", "kind": "Pod", "name": pod.metadata.name, "uid": uid}
        metadata = {"name": name, "ownerReferences": [owner]}
        return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": values}

    return of_owner if values else None


def claim_of(share: PodReservation | None, pod: str, namespace: str) -> OfOwner | None:
    """Return the claim for the pod of a share, if its node allocates GPUs by claims."""
    layer = claim_layer(share, time.time(), pod, namespace) if share is not None else None
    return None if layer is None else lambda uid: layer.manifest(pod, uid)


def _path(namespace: str, kind: str, name: str = "") -> str:
    """Return the path of an object; without a name, the path of all objects of its kind."""
    return f"{_APIS[kind]}/namespaces/{namespace}/{kind.lower()}s" + (f"/{name}" if name else "")


def _owners(item: Object) -> list[str]:
    """Return the uids of an object's owners."""
    return [owner["uid"] for owner in item["metadata"].get("ownerReferences") or []]


ORPHANS_EVERY = 60.0
"""Minimum time in seconds between two searches for pods without a server."""
ORPHAN_AGE = 120.0
"""Seconds for which a new pod without a server is not removed."""


@dataclass
class PodObjects:
    """The objects that pods own or need, and the pods that obstruct a spawn. One instance for each hub."""

    api: ClusterApi
    reservations: PodReservations
    log: logging.Logger
    _rights: dict[str, tuple[bool, float]] = field(default_factory=dict, init=False)
    """By namespace: whether the hub may create Secrets, and when to check again (monotonic clock, seconds)."""
    _searched_at: float = field(default=-ORPHANS_EVERY, init=False)
    """Time of the last search for pods without a server (monotonic clock, seconds)."""

    async def may_make_secrets(self, namespace: str) -> bool:
        """Return whether the hub may create Secrets in a namespace. Raises ApiFailure.

        Repeats the check from time to time, and logs when the permission becomes missing.
        """
        before, ask_at = self._rights.get(namespace, (True, 0.0))
        if time.monotonic() < ask_at:
            return before
        what = {"resourceAttributes": {"namespace": namespace, "verb": "create", "resource": "secrets"}}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": what}
        allowed = bool((await self.api.create(_REVIEWS, review))["status"]["allowed"])
        self._rights[namespace] = (allowed, time.monotonic() + ASK_AGAIN_SECONDS)
        if before and not allowed:
            self.log.warning(
                "The hub may not create Secrets in the namespace %s, so servers' tokens are in their pods, where "
                "every user who may read pods can read them. Give the hub's service account get, create and delete on "
                "secrets there.",
                namespace,
            )
        return allowed

    async def make(self, pod: str, namespace: str, *objects: OfOwner | None) -> None:
        """Create the objects of a new pod; None is skipped.

        After temporary failures of the API, retries until it succeeds or is cancelled. Raises ApiFailure for other
        failures.
        """
        missing = [of_owner for of_owner in objects if of_owner is not None]
        if not missing:
            return
        for pause in pauses(*PAUSES):
            try:
                uid = (await self.api.get(_path(namespace, "Pod", pod)))["metadata"]["uid"]
                while missing and await self._create(namespace, missing[0](uid), uid):
                    del missing[0]
                if not missing:
                    return
            except ApiFailure as failure:
                if failure.status == 404 and f'pods "{pod}"' in str(failure):
                    return  # the pod was deleted in the meantime, which ends its start
                if not failure.may_pass:
                    raise
                self.log.warning("The objects of pod %s are not created yet: %s", pod, failure)
            await asyncio.sleep(pause)

    async def missing(self, pod: Mapping[str, Any]) -> bool:
        """Return whether a pod names a missing Secret or claim of its own. ``pod``: the API's object.

        In that case the hub ended before it created the object, the token is lost, and the pod can never run. False if
        the API does not answer.
        """
        metadata, spec = pod["metadata"], pod.get("spec") or {}
        containers = [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]
        sources = (variable.get("valueFrom") or {} for item in containers for variable in item.get("env") or ())
        named = {("Secret", (source.get("secretKeyRef") or {}).get("name", "")) for source in sources}
        named |= {("ResourceClaim", claim.get("resourceClaimName", "")) for claim in spec.get("resourceClaims") or ()}
        before_token = claim_name(metadata["name"], "0" * 8).removesuffix("0" * 8)
        try:
            for kind, name in sorted(named):
                if name.startswith(before_token):
                    await self.api.get(_path(metadata["namespace"], kind, name))
        except ApiFailure as failure:
            return failure.status == 404
        return False

    async def _create(self, namespace: str, manifest: Object, uid: str) -> bool:
        """Return whether the object exists and belongs to this pod."""
        existing = await self._existing(namespace, manifest)
        # a response was lost, or the object belongs to an earlier pod of this spawn and awaits garbage collection
        if existing is None or uid in _owners(existing):
            return True
        try:
            await self.api.delete(_path(namespace, manifest["kind"], manifest["metadata"]["name"]))
        except ApiFailure as failure:
            if failure.status != 404:
                raise
        return False

    async def _existing(self, namespace: str, manifest: Object) -> Object | None:
        """Create an object. Return None, or the existing object if the name is taken."""
        kind, tries = manifest["kind"], 0
        while True:
            tries += 1
            try:
                await self.api.create(_path(namespace, kind), manifest)
            except ApiFailure as failure:
                if failure.status != 409:
                    raise
            else:
                return None
            try:
                return await self.api.get(_path(namespace, kind, manifest["metadata"]["name"]))
            except ApiFailure as failure:
                if failure.status != 404 or tries >= _TRIES:
                    raise

    async def make_for_layer(self, namespace: str, offer: LayerOffer) -> None:
        """Create the missing objects of an offer. Its pod does not own them, because other pods use them too.

        Raises SpawnRefused if a name is taken by another object, ApiFailure, and LayerCannot if the layer can no longer
        provide the share.
        """
        layer = POD_LAYERS[offer.layer]
        for manifest in layer.objects(offer.request):
            kind, name = manifest["kind"], manifest["metadata"]["name"]
            existing = await self._existing(namespace, manifest)
            if existing is None:
                self.log.info("Created %s %s in %s", kind, name, namespace)
            elif not layer.same(manifest, existing):
                message = words.other_object(kind, name, namespace)
                raise SpawnRefused(message, reason="other-object", status=409)

    # -- obstructing pods --

    def give_back(self, share: PodReservation, perhaps_created: bool) -> None:
        """Release the share of a failed spawn or an ended server once no pod can hold it any more."""
        if not perhaps_created:
            self.reservations.give_back(share)
            return
        self.reservations.keep_place_of(share)
        self.reservations.in_background(self._remove_late_pod(share.token))

    async def _remove_late_pod(self, token: str) -> None:
        """Remove the late pod of a failed start; the hub stops only a pod that the reflector already shows."""
        async for pod in self.reservations.late_pods(token):
            await self._remove(pod["metadata"], "its start has failed")

    def remove_orphans_soon(self, hub: str, runs: Callable[[str, str], bool]) -> None:
        """Remove the hub's pods that have a share but no server, unless the last search was recent.

        ``hub``: the URL of the hub's API, as in the pods' annotations. ``runs`` returns whether the hub runs a user's
        server.
        """
        now = time.monotonic()
        if now - self._searched_at < ORPHANS_EVERY:
            return
        self._searched_at = now
        for pod in orphans(self.reservations.cluster.pods(), hub, runs, time.time() - ORPHAN_AGE):
            self.reservations.in_background(
                self._remove(pod["metadata"], "it holds a GPU share, and the hub knows no such server")
            )

    async def remove_leftover(self, pod: Mapping[str, Any] | None, stop: Callable[[], Awaitable[None]]) -> None:
        """Remove, with ``stop``, a server's own pod left by an earlier spawn.

        KubeSpawner would remove the pod only when it creates the new pod; until then the old pod would hold capacity
        that the new pod needs.
        """
        if pod is not None and holds_share(pod) and not pod["metadata"].get("deletionTimestamp"):
            self.log.warning("Removing pod %s, left by an earlier spawn of this server", pod["metadata"]["name"])
            await self.remove_own(pod["metadata"]["name"], stop)

    async def remove_own(self, name: str, stop: Callable[[], Awaitable[None]]) -> None:
        """Remove a server's own pod with ``stop``. A failure is logged; the next pod's creation retries it."""
        try:
            await stop()
        except Exception as error:
            self.log.warning("Pod %s is not removed yet: %s", name, error)

    async def _remove(self, metadata: Mapping[str, Any], why: str) -> None:
        name, namespace = metadata["name"], metadata["namespace"]
        self.log.warning("Removing pod %s/%s: %s", namespace, name, why)
        try:
            await self.api.delete(_path(namespace, "Pod", name), {"preconditions": {"uid": metadata["uid"]}})
        except ApiFailure as failure:
            self.log.warning("Pod %s/%s is not removed yet: %s", namespace, name, failure)
