"""Pods with a share on this node, kept up to date by a watch: our pods, or the pods of other layers."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property

from gpushare_spawner.agent.session_records import PodOwner
from gpushare_spawner.clients.api import ClusterApi, Json
from gpushare_spawner.clients.object_watch import Watched, key
from gpushare_spawner.model.control import OpenRequest
from gpushare_spawner.model.kubernetes.annotations import (
    SESSION_SELECTOR,
    AnnotationProblem,
    SessionAnnotations,
    pod_session,
)
from gpushare_spawner.model.kubernetes.container_requests import ContainerRequests, container_requests
from gpushare_spawner.model.kubernetes.objects import FINISHED, is_mirror
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import shared_fields
from gpushare_spawner.model.share import split_session_id

log = logging.getLogger(__name__)

LIST_AGAIN_AFTER = 5.0
"""Seconds between lists for pods that the watch has not shown.

Our choice: a list costs the API server more than a watch, and an answer takes less time than this.
"""


@dataclass(frozen=True)
class Pod:
    """A pod with a share, as shown by the API server."""

    namespace: str
    name: str
    uid: str
    annotations: dict[str, str]
    created: float
    """Seconds since the epoch."""
    requests: ContainerRequests | None = None
    """Its requests; None if its container with the share does not request both CPU and memory."""
    labels: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, item: Json) -> Pod:
        """Return the pod of an API object. Raises KeyError or ValueError for any other object."""
        metadata = item["metadata"]
        return cls(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            annotations=dict(metadata.get("annotations") or {}),
            labels=dict(metadata.get("labels") or {}),
            created=datetime.fromisoformat(metadata["creationTimestamp"]).timestamp(),
            requests=container_requests(item),
        )

    @cached_property
    def session(self) -> SessionAnnotations | AnnotationProblem:
        """The session in its labels and annotations, or the problem with them."""
        try:
            return pod_session(self.annotations, self.labels)
        except AnnotationProblem as problem:
            return problem

    @property
    def path(self) -> str:
        """The pod's path in the API."""
        return f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"


def open_request(annotated: SessionAnnotations, gpus: tuple[str, ...]) -> OpenRequest:
    """Return the request that opens the session of a pod. `gpus`: UUIDs."""
    user, server = split_session_id(annotated.session)
    own = {"id": annotated.session, "user": user, "server": server, "uid": 0, "gpus": gpus, "layer": LayerName.NATIVE}
    if gpus != annotated.gpus:
        own |= {"last_units": 0}  # the GPU with fewer units is unknown
    return OpenRequest(**shared_fields(annotated, OpenRequest) | own)


class Pods(Watched[Pod]):
    """The watched pods of a node: pods that have not ended and are not mirror pods.

    Mirror pods are not users' servers, regardless of their labels.
    """

    def __init__(
        self, api: ClusterApi, namespace: str, node: str, changed: Callable[[], None], selector: str = SESSION_SELECTOR
    ) -> None:
        """`namespace`: the namespace of the notebooks' pods; empty: all. `changed` is called after each change.

        `selector`: the label selector for the pods.
        """
        path = f"/api/v1/namespaces/{namespace}/pods" if namespace else "/api/v1/pods"
        query = {"labelSelector": selector, "fieldSelector": f"spec.nodeName={node}"}
        # not cached: a list must show every pod that exists, see `listed_at`
        super().__init__(api, path, "the pods of this node", _session_pod, query, changed, log, cached=False)
        self._listed_again_at = -math.inf

    def list_again(self) -> None:
        """List the pods again soon, at most every `LIST_AGAIN_AFTER` seconds.

        Does nothing while a list is in progress: with a slow API server, no list would ever finish.
        """
        now = time.monotonic()
        if self._task is not None and not self.listing and now - self._listed_again_at >= LIST_AGAIN_AFTER:
            self._listed_again_at = now
            self._task.cancel()
            self.start()

    def of(self, owner: PodOwner) -> Pod | None:
        """Return a session's pod; None if it does not exist or has ended."""
        pod = self.named(*owner.key)
        return pod if pod is not None and pod.uid == owner.uid else None

    def named(self, namespace: str, name: str) -> Pod | None:
        """Return the pod with that name; None if it does not exist or has ended."""
        return self.objects.get(f"{namespace}/{name}")

    def put(self, item: Json) -> None:
        """Store a pod from the answer to a patch: it is newer than the watch's version."""
        current = self.objects.get(key(item))
        if current is not None and current.uid == item["metadata"]["uid"]:
            self.enter(item)


def _session_pod(item: Json) -> Pod | None:
    """Return the pod of an API object; None for a mirror pod of the node or a pod that has ended."""
    if is_mirror(item["metadata"]) or (item.get("status") or {}).get("phase") in FINISHED:
        return None
    return Pod.of(item)
