"""Pods with a share on this node, kept up to date by a watch: our pods, or the pods of other layers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

from gpushare_spawner.agent.kubernetes.api import ApiFailure, ClusterApi, Json
from gpushare_spawner.background import Background
from gpushare_spawner.log_once import LogOnce
from gpushare_spawner.model.kubernetes.annotations import (
    SESSION_SELECTOR,
    AnnotationProblem,
    LayerSession,
    PodSession,
    layer_session,
    pod_session,
)
from gpushare_spawner.model.kubernetes.container_requests import ContainerRequests, container_requests
from gpushare_spawner.model.kubernetes.objects import is_mirror

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0
"""Seconds between tries while the API server does not answer."""
TRIES_OF_A_WATCH = 5
"""Consecutive failures after which the pods are listed again."""
LIST_AGAIN_AFTER = 5.0
"""Seconds between lists for pods that the watch has not shown. Our value: a list costs the API server more than a
watch, and an answer takes less time."""
_ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True)
class Pod:
    """A pod with a share, as the API server shows it."""

    namespace: str
    name: str
    uid: str
    annotations: dict[str, str]
    created: float
    """Seconds since the epoch."""
    ended: bool
    """All its containers have ended and none will start again: the kubelet has taken its devices back."""
    requests: ContainerRequests | None = None
    """None if its container with the share does not request both CPU and memory."""
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
            ended=(item.get("status") or {}).get("phase") in _ENDED,
            requests=container_requests(item),
        )

    @cached_property
    def annotated_session(self) -> PodSession | AnnotationProblem:
        """The session in its annotations, or their problem."""
        try:
            return pod_session(self.annotations)
        except AnnotationProblem as problem:
            return problem

    @cached_property
    def layer_session(self) -> LayerSession | AnnotationProblem:
        """The session of another layer in its labels and annotations, or their problem."""
        try:
            return layer_session(self.labels, self.annotations)
        except AnnotationProblem as problem:
            return problem

    @property
    def path(self) -> str:
        """Its path in the API."""
        return f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"


class Pods(Background):
    """The list and watch of pods. It keeps its state while the API server is unavailable.

    Mirror pods of the node are left out: they are not servers of users, whatever their labels are.
    """

    def __init__(
        self,
        api: ClusterApi,
        namespace: str,
        node: str,
        changed: Callable[[], None],
        selector: str = SESSION_SELECTOR,
    ) -> None:
        """`namespace`: that of the notebooks' pods; empty: all. `changed` is called after each change.

        `selector`: the selector of the pods' labels.
        """
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/pods" if namespace else "/api/v1/pods"
        self._query = {"labelSelector": selector, "fieldSelector": f"spec.nodeName={node}"}
        self._changed = changed
        self._pods: dict[str, Pod] = {}
        self._trouble = LogOnce(
            log, "cannot read the pods of this node; retrying", "the pods of this node are read again"
        )
        self.listed = False
        """Whether the pods have been listed. Before that, a pod that is missing here can exist."""
        self.listed_at = -math.inf
        """Start of the last list that was answered (event loop's time): it shows every pod that existed then."""
        self._listed_again_at = -math.inf
        self._listing = False

    def list_again(self) -> None:
        """List the pods again soon, at most every `LIST_AGAIN_AFTER` seconds.

        Does nothing while a list is under way: with a slow API server no list would ever end.
        """
        now = asyncio.get_running_loop().time()
        if self._task is not None and not self._listing and now - self._listed_again_at >= LIST_AGAIN_AFTER:
            self._listed_again_at = now
            self._task.cancel()
            self.start()

    def get(self, uid: str) -> Pod | None:
        """Return the pod with that uid; None if it does not exist or has ended."""
        pod = self._pods.get(uid)
        return pod if pod is not None and not pod.ended else None

    def all(self) -> Iterator[Pod]:
        """Return the pods that have not ended."""
        return (pod for pod in self._pods.values() if not pod.ended)

    def named(self, namespace: str, name: str) -> Pod | None:
        """Return the pod with that name; None if it does not exist or has ended."""
        for pod in self._pods.values():
            if (pod.namespace, pod.name) == (namespace, name) and not pod.ended:
                return pod
        return None

    def put(self, item: Json) -> None:
        """Take a pod from the answer to a patch: it is newer than the watch's."""
        if item["metadata"]["uid"] in self._pods:
            self._enter(item)

    async def _run(self) -> None:
        version, pause, failures, too_old = "", FIRST_PAUSE, 0, False
        while True:
            try:
                if not version:
                    version = await self._list()
                async for event in self._api.watch(self._path, version, **self._query):
                    version = event["object"]["metadata"]["resourceVersion"]
                    self._heard(event["type"], event["object"])
                    pause, failures, too_old = FIRST_PAUSE, 0, False
                self._trouble.settled()
                pause, failures, too_old = FIRST_PAUSE, 0, False
                # do not flood a server that ends each watch at once
                await asyncio.sleep(0.05)
                continue
            except ApiFailure as failure:
                failures += 1
                if failure.status == 410 and not too_old:
                    # Do this only once, so as not to flood a server that rejects every version as too old.
                    version, too_old = "", True
                    continue
                # A list is expensive for a server in trouble. After a failure that does not concern the version, the
                # watch continues from its version for some tries.
                if not _may_pass(failure) or failures >= TRIES_OF_A_WATCH:
                    version = ""
                self._trouble.about(failure)
            except Exception:
                log.exception("watching pods failed")
                version, pause = "", LONGEST_PAUSE
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _list(self) -> str:
        began = asyncio.get_running_loop().time()
        self._listing = True
        try:
            answer = await self._api.list(self._path, **self._query)
        finally:
            self._listing = False
        self._pods = {}
        for item in answer["items"]:
            self._enter(item)
        self.listed, self.listed_at = True, began
        self._trouble.settled()
        self._changed()
        return str(answer["metadata"]["resourceVersion"])

    def _heard(self, kind: str, item: dict[str, Any]) -> None:
        if kind == "BOOKMARK":
            return
        if kind == "DELETED":
            self._pods.pop(item["metadata"]["uid"], None)
        else:
            self._enter(item)
        self._changed()

    def _enter(self, item: Json) -> None:
        with contextlib.suppress(KeyError, ValueError):
            if is_mirror(item["metadata"]):
                return
            pod = Pod.of(item)
            self._pods[pod.uid] = pod


def _may_pass(failure: ApiFailure) -> bool:
    """Return whether the same watch can succeed later: no answer, too many requests, or a server error."""
    return failure.status in (0, 429) or failure.status >= 500
