"""Lowers the CPU and memory requests of released sessions' pods, and restores them when the sessions work again.

All state is in the pods, so a service that is killed at any moment continues from them. The annotation `REQUESTS`
records the template's requests; it is written before the requests are lowered. `ResizeApi` detects whether the API
server can resize running pods in place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from gpushare_spawner.background import Background, set_within
from gpushare_spawner.clients.api import STRATEGIC_MERGE_PATCH, ApiFailure, ClusterApi
from gpushare_spawner.model.control import AgentUnreachable
from gpushare_spawner.model.kubernetes.container_requests import ContainerRequests, Requests, requests_patch
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.kubernetes.cluster import Cluster, patch_annotations
from gpushare_spawner.service.kubernetes.pod_sessions import SessionPod
from gpushare_spawner.wording import pod_requests as words

RESIZE = "pods/resize"
ASK_AGAIN_AFTER = 600.0
"""Seconds until the next request to an API server without pods/resize, which may have been upgraded."""
PROBE_AGAIN_AFTER = 10.0
"""Seconds until the next request to an API server that did not answer."""


class ResizeApi:
    """Discovery of pods/resize. The request is repeated while the API server has no pods/resize or does not answer."""

    def __init__(self, api: ClusterApi, clock: Callable[[], float], log: logging.Logger) -> None:
        """Create it. ``clock``: seconds on a monotonic clock."""
        self._api = api
        self._clock = clock
        self._log = log
        self._has_resize: bool | None = None
        """Whether the API server has pods/resize; None before the first answer."""
        self._ask_at = 0.0
        self._trouble = ""
        """The logged reason for a missing answer; empty: there was an answer."""

    async def available(self) -> bool:
        """Return whether the API server has pods/resize; False if unknown."""
        if self._has_resize or self._clock() < self._ask_at:
            return self._has_resize is True
        try:
            answer = await self._api.get("/api/v1")
        except ApiFailure as failure:
            return self._failed(str(failure))
        if self._trouble:
            self._log.info("%s", words.DISCOVERY_WORKS)
            self._trouble = ""
        has_resize = any(resource["name"] == RESIZE for resource in answer["resources"])
        if not has_resize and self._has_resize is None:
            self._log.warning("%s", words.RESIZE_UNKNOWN)
        self._has_resize, self._ask_at = has_resize, self._clock() + ASK_AGAIN_AFTER
        return has_resize

    def _failed(self, why: str) -> bool:
        if why != self._trouble:
            self._log.warning("%s", words.discovery_failed(why))
        self._trouble, self._ask_at = why, self._clock() + PROBE_AGAIN_AFTER
        return False


log = logging.getLogger("gpushare.service.requests")

POLL_EVERY = 10.0
"""Seconds between checks of all pods without new data from a watch, because use and templates also change."""
SHORTEST_PAUSE = 0.2
"""Minimum seconds between checks, so that many simultaneous changes cause one check."""
RETRY_AFTER = 30.0
"""Seconds until a change that the API server refused is repeated, because a quota may be larger by then."""


class ReleasedRequests(Background):
    """The requests of released sessions' pods. Call `changed` after new data from a watch."""

    def __init__(
        self,
        nodes: Cluster,
        templates: Callable[[], Mapping[str, Template]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create it. ``templates`` returns the valid templates by name; ``clock``: seconds on a monotonic clock."""
        self._nodes = nodes
        self._templates = templates
        self._clock = clock
        self._woken = asyncio.Event()
        self._resize_api = ResizeApi(nodes.api, clock, log)
        self._without_effect: set[tuple[str, str]] = set()
        """Templates, each with the reason why its release_resources has no effect on a pod, which is logged once."""
        self._done: dict[str, str] = {}
        """The version for which a patch was sent, by pod. While it is unchanged, the watch lacks the result."""
        self._refused: dict[str, tuple[str, float]] = {}
        """The reason for a refused change and the time of the next attempt, by pod. An entry remains until the node has
        granted the change, so that the same reason is logged only once."""

    def changed(self) -> None:
        """Check the pods soon."""
        self._woken.set()

    async def _run(self) -> None:
        while True:
            self._woken.clear()
            try:
                await self.poll()
            except Exception:
                log.exception("Cannot check the requests of released sessions; retrying")
            await asyncio.sleep(SHORTEST_PAUSE)
            await set_within(self._woken, POLL_EVERY)

    async def poll(self) -> None:
        """Change each pod's requests to those of its session's tier."""
        templates = self._templates()
        running = [pod for pod in self._nodes.all_pods() if pod.runs]
        for pod in running:
            self._log_without_effect(pod, templates.get(pod.session.template))
        due = [(pod, pod.requests) for pod in running if pod.requests is not None]
        names = {_name(pod) for pod, _ in due}
        self._done = {name: version for name, version in self._done.items() if name in names}
        self._refused = {name: refusal for name, refusal in self._refused.items() if name in names}
        for pod, now in due:
            desired = self._desired(pod, now, templates.get(pod.session.template))
            if desired is None or self._done.get(_name(pod)) == pod.version:
                continue
            refused = desired == now.requested and bool(now.infeasible)
            if (
                desired == now.requested
                and not refused
                and not (now.restored and pod.session.tier is not Tier.RELEASED)
            ):
                if not now.lacking:
                    self._refused.pop(_name(pod), None)
                continue
            if _name(pod) in self._refused and self._clock() < self._refused[_name(pod)][1]:
                continue
            if not await self._resize_api.available():
                return
            if refused:
                # the kubelet does not retry such a resize; since 1.36 the API server rejects it instead
                await self._change(pod, now, now.granted)
                self._refuse(_name(pod), words.requests_refused(desired, now.infeasible))
            else:
                await self._change(pod, now, desired)

    def _desired(self, pod: SessionPod, now: ContainerRequests, template: Template | None) -> Requests | None:
        """Return the requests that the pod should have; None: no change."""
        if pod.session.tier is not Tier.RELEASED:
            return now.whole
        kept = template.idle.release_resources if template is not None else None
        if kept is None or not now.changeable:
            return now.whole
        used = self._used(pod)
        if used is None:
            return None
        return now.released(None if kept.cpu is None else round(kept.cpu * 1000), kept.memory, used)

    def _used(self, pod: SessionPod) -> Requests | None:
        """Return the pod's use as reported by its node's agent; None: unknown.

        The result is also None while the agent is unavailable, because the kubelet grants no change then.
        """
        try:
            session = self._nodes.report(pod.node)[0].session(pod.session.session)
        except AgentUnreachable:
            return None
        use = session.host_use if session is not None and session.tier is Tier.RELEASED else None
        return None if use is None else Requests(use.cpu_millicores, use.memory_bytes)

    async def _change(self, pod: SessionPod, now: ContainerRequests, desired: Requests) -> None:
        name, version = _name(pod), pod.version
        try:
            if desired != now.requested:
                if now.full is None:
                    patched = await patch_annotations(self._nodes.api, pod, requests_patch(now.requested))
                    version = patched["metadata"]["resourceVersion"]
                await self._nodes.api.patch(f"{pod.path}/resize", now.patch(desired, version), STRATEGIC_MERGE_PATCH)
                log.info("Pod %s (%s) now requests %s", name, pod.session.tier, words.requests(desired))
            else:
                await patch_annotations(self._nodes.api, pod, requests_patch(None))
        except ApiFailure as failure:
            if failure.status in (404, 409):
                return  # removed or changed in the meantime; the watch delivers the change
            why = words.requests_refused if failure.status else words.requests_not_sent
            self._refuse(name, why(desired, str(failure)))
        else:
            if name in self._refused:
                self._refused[name] = self._refused[name][0], 0.0
            self._done[name] = pod.version

    def _refuse(self, name: str, why: str) -> None:
        if self._refused.get(name, ("", 0.0))[0] != why:
            log.warning("Pod %s: %s", name, why)
        self._refused[name] = why, self._clock() + RETRY_AFTER

    def _log_without_effect(self, pod: SessionPod, template: Template | None) -> None:
        """Log once per template that Kubernetes cannot lower its pods' requests."""
        if template is None or template.idle.release_resources is None:
            return
        if pod.requests is None:
            why = words.not_requested(pod.not_requested) if pod.not_requested else words.REQUESTS_UNREADABLE
        elif not pod.requests.changeable:
            why = words.GUARANTEED
        else:
            return
        if (template.name, why) not in self._without_effect:
            self._without_effect.add((template.name, why))
            log.warning("%s", words.without_effect(_name(pod), template.name, why))


def _name(pod: SessionPod) -> str:
    return f"{pod.namespace}/{pod.name}"
