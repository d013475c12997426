"""Makes the objects of a pod, the claim of its share and the Secret with its server's token, and removes pods.

The pod exists first: it owns these objects, so that an aborted start leaves none. The scheduler waits for the claims
that a pod names, and the kubelet for the Secrets. `PodObjects` also makes a layer's objects in the server's namespace
before the pod, like a ResourceClaimTemplate, and it removes pods of an earlier or a failed start, and of servers that
the hub has forgotten.
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
from gpushare_spawner.spawner.kubernetes.cluster.capacity import holds_share, orphans
from gpushare_spawner.spawner.kubernetes.cluster.layers import POD_LAYERS
from gpushare_spawner.spawner.kubernetes.pod import claim_layer
from gpushare_spawner.spawner.kubernetes.reservations import PodReservations, PodShare
from gpushare_spawner.spawner.queue.snapshot import LayerOffer
from gpushare_spawner.wording import spawn_form as words

PAUSES = 0.1, 2.0
"""Seconds between tries: the first, and the longest."""
ASK_AGAIN_SECONDS = 300.0
"""Seconds until the right to make Secrets is checked again: rights can change. Our value: as
`cluster.capacity.ASK_AGAIN_SECONDS`.
"""
_TRIES = 3
"""Tries for an object that another client deletes as soon as it exists."""
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_APIS = {"Pod": "/api/v1", "Secret": "/api/v1", "ResourceClaim": CLAIMS_API, "ResourceClaimTemplate": CLAIMS_API}
"""The API of each kind."""

Object = dict[str, Any]
OfOwner = Callable[[str], Object]
"""Returns the manifest of an object for the uid of the pod that owns it."""


def token_secret(pod: V1Pod, token: str) -> OfOwner | None:
    """Move the variables with the server's token in the pod's containers to a Secret of a new name. Return the Secret.

    Every user with the right to read pods could read the values. JupyterHub writes the token into two variables. None
    if no variable has it, or the pod's layer replaces the pod, and the Secret would be deleted with it. The same values
    in an admin's containers are moved too.
    """
    layer = (pod.metadata.labels or {}).get(LAYER)
    if layer is not None and LAYERS[LayerName(layer)].replaces_pods:
        return None
    name, values = claim_name(pod.metadata.name, secrets.token_hex(4)), dict[str, str]()
    for container in [*(pod.spec.init_containers or ()), *pod.spec.containers]:
        # the additions of an admin's hooks and settings are dicts
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


def claim_of(share: PodShare | None, pod: str, namespace: str) -> OfOwner | None:
    """Return the claim of the pod of a share, if its node gives GPUs by claims."""
    layer = claim_layer(share, time.time(), pod, namespace) if share is not None else None
    return None if layer is None else lambda uid: layer.manifest(pod, uid)


def _path(namespace: str, kind: str, name: str = "") -> str:
    """Return the path of an object; without a name, of all objects of its kind."""
    return f"{_APIS[kind]}/namespaces/{namespace}/{kind.lower()}s" + (f"/{name}" if name else "")


def _owners(item: Object) -> list[str]:
    """Return the uids of an object's owners."""
    return [owner["uid"] for owner in item["metadata"].get("ownerReferences") or []]


ORPHANS_EVERY = 60.0
"""Minimum seconds between two searches for pods without a server."""
ORPHAN_AGE = 120.0
"""Seconds for which a new pod without a server is left alone."""


@dataclass
class PodObjects:
    """The objects that pods own or need, and the pods that are in the way. One object for a hub."""

    api: ClusterApi
    reservations: PodReservations
    log: logging.Logger
    _rights: dict[str, tuple[bool, float]] = field(default_factory=dict, init=False)
    """By namespace: whether the hub may make Secrets, and when to check it again (monotonic clock, seconds)."""
    _searched_at: float = field(default=-ORPHANS_EVERY, init=False)
    """Time of the last search for pods without a server (monotonic clock, seconds)."""

    async def may_make_secrets(self, namespace: str) -> bool:
        """Return whether the hub may make Secrets in a namespace. Raises ApiFailure.

        Checks again later, and logs the start of a refusal.
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
                "The hub may not create Secrets in the namespace %s, so the tokens of servers stand in their pods, "
                "where whoever may read pods reads them. Give the hub's service account get, create and delete on "
                "secrets there.",
                namespace,
            )
        return allowed

    async def make(self, pod: str, namespace: str, *objects: OfOwner | None) -> None:
        """Make the objects of a new pod; None is left out.

        Retries until it is done or cancelled, after failures of the API that can pass. Raises ApiFailure for others.
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
                    return  # the pod was deleted meanwhile, and its start ends by that
                if not failure.may_pass:
                    raise
                self.log.warning("What belongs to pod %s is not made yet: %s", pod, failure)
            await asyncio.sleep(pause)

    async def missing(self, pod: Mapping[str, Any]) -> bool:
        """Return whether a pod names a missing Secret or claim of its own. ``pod``: the API's object.

        The hub ended before it had made the object, and the token is lost: the pod can never run. False if the API does
        not answer.
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
        # an answer was lost, or the object belongs to an earlier pod of this spawn and awaits the garbage collector
        if existing is None or uid in _owners(existing):
            return True
        try:
            await self.api.delete(_path(namespace, manifest["kind"], manifest["metadata"]["name"]))
        except ApiFailure as failure:
            if failure.status != 404:
                raise
        return False

    async def _existing(self, namespace: str, manifest: Object) -> Object | None:
        """Create an object. Return the existing object of its name; None if it was created."""
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
        """Create the objects of an offer that do not exist yet: its pod is not their owner, other pods use them too.

        Raises SpawnRefused if another object has the name of one of them, ApiFailure, and LayerCannot if the layer can
        no longer give the share.
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

    # -- pods that are in the way --

    def give_back(self, share: PodShare, perhaps_created: bool) -> None:
        """Give back the share of a failed spawn or an ended server, once no pod can have it any more."""
        if not perhaps_created:
            self.reservations.give_back(share)
            return
        self.reservations.perhaps_created(share)
        self.reservations.in_background(self._remove_late_pod(share.token))

    async def _remove_late_pod(self, token: str) -> None:
        """Remove the late pod of a failed start: the hub stops only a pod that the reflector has shown by then."""
        async for pod in self.reservations.late_pods(token):
            await self._remove(pod["metadata"], "its start has failed")

    def remove_orphans_soon(self, hub: str, runs: Callable[[str, str], bool]) -> None:
        """Remove the hub's pods with a share but without a server, unless the last search was recent.

        ``hub``: the URL of its API, as in the pods' annotations. ``runs`` returns whether the hub runs a user's server.
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
        """Remove a server's own pod that an earlier spawn left, with ``stop``.

        KubeSpawner would remove it when it creates the new pod; until then it would hold capacity that the new pod
        needs.
        """
        if pod is not None and holds_share(pod) and not pod["metadata"].get("deletionTimestamp"):
            self.log.warning("Removing pod %s, which an earlier spawn of this server left", pod["metadata"]["name"])
            await self.remove_own(pod["metadata"]["name"], stop)

    async def remove_own(self, name: str, stop: Callable[[], Awaitable[None]]) -> None:
        """Remove a server's own pod with ``stop``. A failure is logged: the creation of the next pod tries again."""
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
