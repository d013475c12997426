"""One node of a cluster as an agent for the culler: reports from a ConfigMap, idle actions as patches of pods."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import aiohttp
from kubernetes_asyncio.client import ApiException, CoreV1Api
from kubernetes_asyncio.config import ConfigException

from gpushare_spawner.model.control import (
    AgentUnreachable,
    AnswerRequest,
    ControlRefused,
    ControlsRequest,
    CordonRequest,
    Failure,
    MessageRequest,
    NoticeRequest,
    ResizeRequest,
    TierRequest,
)
from gpushare_spawner.model.kubernetes.annotations import (
    ShareChange,
    ShareChangeAnswer,
    answers_patch,
    borrowed_patch,
    controls_patch,
    messages_patch,
    notice_patch,
    resize_patch,
    tier_patch,
)
from gpushare_spawner.model.kubernetes.objects import cordon_name, report_name
from gpushare_spawner.model.layers import LAYERS, IdleReach
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.share import Tier, voids_idle_action
from gpushare_spawner.service.kubernetes.pod_sessions import SessionPod
from gpushare_spawner.service.reports import KnownReport
from gpushare_spawner.wording.actions import out_of_reach
from gpushare_spawner.wording.amounts import http_status, reason

PATCH_TIMEOUT = 10.0
"""Seconds for one patch."""
DECIDED_WITHIN = 10.0
"""Seconds that an agent has to decide on a change of a share or tier: its watch brings it within a second."""
POLL_EVERY = 0.1
"""Seconds between two checks for news of the watches."""


class ClusterObjects(Protocol):
    """Reports and pods, as the watches have them now."""

    @property
    def namespace(self) -> str:
        """The namespace of the reports."""

    def report_version(self, node: str) -> str:
        """Return the resourceVersion of the node's report; empty: there is none."""

    def patched_report(self, item: dict[str, Any], before: str) -> None:
        """Apply the API server's answer to a patch of a report's ConfigMap of that version."""

    def reported(self, node: str, session: str) -> SessionReport | None:
        """Return the session as the agent reports it; its pod's annotations can differ. None: not reported."""

    def report(self, node: str) -> tuple[KnownReport, float]:
        """Return the report, joined with the pods, and its age in seconds. Raises AgentUnreachable."""

    def pods(self, node: str) -> Mapping[str, SessionPod]:
        """Return the node's pods by session id."""

    def patched(self, pod: SessionPod, item: dict[str, Any]) -> None:
        """Apply the API server's answer to a patch of a pod, before the watch brings it."""


class NodeAgent:
    """The agent of one node, by its last report.

    Decisions use the last answer of `report`; an idle action is refused if the session has changed since. Each round
    has its own NodeAgent, so that no other reader changes the basis of a decision.
    """

    def __init__(
        self, node: str, cluster: ClusterObjects, api: CoreV1Api, clock: Callable[[], float] = time.time
    ) -> None:
        self.node = node
        self._cluster = cluster
        self._api = api
        self._clock = clock
        self._decided_on: Mapping[str, SessionPod] = {}
        self._age = float("inf")
        self._reported_before = ""

    async def report(self) -> KnownReport:
        """Return the node's report, with tiers from the pods' annotations."""
        report, self._age = self._cluster.report(self.node)
        self._decided_on = self._cluster.pods(self.node)
        return report

    def report_age(self) -> float:
        """Return the age in seconds of the last answer of `report`; later events are not in it."""
        return self._age

    async def tier(self, request: TierRequest) -> None:
        """Write the tier to the pod. The agent applies it within seconds, or undoes it after new GPU work."""
        pod = self._unchanged(request.id)
        needed = IdleReach.RELEASE if request.tier is Tier.RELEASED else IdleReach.DOWNGRADE
        _check_reach(pod, needed)
        current = self._cluster.report(self.node)[0].session(request.id)
        if current is not None and voids_idle_action(
            current.gpu_busy or current.waiting,
            current.last_gpu_activity,
            current.gpu_seconds,
            request.if_idle_since,
            request.if_gpu_seconds,
        ):
            raise _refusal("busy", f"session {request.id} has worked on the GPU in the meantime")
        patch = tier_patch(
            request.tier,
            self._clock(),
            request.effective_units,
            request.if_idle_since,
            request.yields_until,
            request.if_gpu_seconds,
            request.use,
        )
        if request.yields_until is not None:
            # in the same patch: otherwise a spawn that is placed before the agent's own patch would borrow the units
            lost = pod.session.share_units - request.effective_units
            patch |= borrowed_patch(max(pod.session.borrowed_units, lost))
        self._reported_before = self._cluster.report_version(self.node)
        await self._patch(request.id, pod, patch)

    async def carried_out(self, request: TierRequest) -> bool:
        """Wait until the agent reports the tier, or has undone it in the pod's annotations."""
        requested = (request.tier, request.effective_units)
        until = time.monotonic() + DECIDED_WITHIN
        while True:
            pod = self._cluster.pods(self.node).get(request.id)
            if pod is None:
                raise _refusal("unknown-session", f"the pod of session {request.id} is gone")
            if (pod.session.tier, pod.session.effective_units) != requested:
                raise _refusal("busy", f"session {request.id} has worked on the GPU in the meantime")
            # an older report, from before work restored the share, can have the same tier
            if self._cluster.report_version(self.node) != self._reported_before:
                reported = self._cluster.reported(self.node, request.id)
                if reported is not None and (reported.tier, reported.effective_units) == requested:
                    return True
            if time.monotonic() > until:
                return False
            await asyncio.sleep(POLL_EVERY)

    async def resize(self, request: ResizeRequest) -> None:
        """Request another share in the pod's annotations, and wait for the agent's decision."""
        pod = self._unchanged(request.id)
        _check_reach(pod, IdleReach.RESIZE)
        change = ShareChange(
            number=max(1, round(self._clock() * 1000)),
            share_units=request.share_units,
            memory_limit=request.memory_limit,
            reason=request.reason,
        )
        await self._patch(request.id, pod, resize_patch(change))
        until = time.monotonic() + DECIDED_WITHIN
        while (answer := self._answer_to(request.id, change)) is None:
            if time.monotonic() > until:
                await self._withdraw(request.id, change)
                raise AgentUnreachable(
                    f"the agent of node {self.node} did not decide on the change within {DECIDED_WITHIN:g} s"
                )
            await asyncio.sleep(POLL_EVERY)
        if answer.refused is not None:
            raise ControlRefused(answer.refused)

    def _answer_to(self, session: str, change: ShareChange) -> ShareChangeAnswer | None:
        pod = self._cluster.pods(self.node).get(session)
        if pod is None:
            raise _refusal("unknown-session", f"the pod of session {session} is gone")
        answer = pod.session.resized
        return answer if answer is not None and answer.number == change.number else None

    async def _withdraw(self, session: str, change: ShareChange) -> None:
        """Withdraw the request. If that fails the agent can still change the share, and the report will show it."""
        pod = self._cluster.pods(self.node).get(session)
        if pod is not None and pod.session.resize == change:
            with contextlib.suppress(ControlRefused, AgentUnreachable):
                await self._patch(session, pod, resize_patch(None))

    async def notify(self, request: NoticeRequest) -> None:
        """Write a notice to the pod, or remove it."""
        patch = notice_patch(request.notice)
        await self._patch(request.id, self._unchanged(request.id), patch)

    async def controls(self, request: ControlsRequest) -> None:
        """Write keep and exemption to the pod, with the answer to the ask behind them."""
        pod = self._unchanged(request.id)
        patch = controls_patch(request.controls)
        if request.answer is not None:
            patch |= answers_patch(pod.session.answers, request.answer)
        await self._patch(request.id, pod, patch)

    async def message(self, request: MessageRequest) -> None:
        """Write a message to the pod, or remove one."""
        pod = self._unchanged(request.id)
        await self._patch(request.id, pod, messages_patch(request.messages(pod.session.messages)))

    async def answer(self, request: AnswerRequest) -> None:
        """Write the answer to an ask to the pod."""
        pod = self._unchanged(request.id)
        await self._patch(request.id, pod, answers_patch(pod.session.answers, request.answer))

    async def cordon(self, request: CordonRequest) -> None:
        """Write a cordon to the report's ConfigMap, or remove it."""
        uuids = [gpu.uuid for gpu in self._cluster.report(self.node)[0].gpus]
        if request.gpu and request.gpu not in uuids:
            raise _refusal("unknown-gpu", f"node {self.node} has no GPU {request.gpu}; it has {', '.join(uuids)}")
        text = None if request.cordon is None else request.cordon.model_dump_json(exclude_defaults=True)
        metadata: dict[str, Any] = {"annotations": {cordon_name(request.gpu): text}}
        before = self._cluster.report_version(self.node)
        try:
            # no owner until the agent has read it: the cluster removes the ConfigMap with the agent's pod
            self._cluster.patched_report(await self._patch_report({**metadata, "ownerReferences": None}), before)
        except ApiException as error:
            if error.status != 403:
                raise self._failed(error) from None
            try:
                # some clusters require the right to delete an object for a change of its owners
                self._cluster.patched_report(await self._patch_report(metadata), before)
            except ApiException as again:
                raise self._failed(again) from None
        except (aiohttp.ClientError, ConfigException, OSError) as error:
            raise AgentUnreachable(f"the API server cannot be reached for a cordon: {reason(error)}") from None

    async def _patch_report(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        # the client's types leave out `_content_type`, which its generated code reads
        patched = await self._api.patch_namespaced_config_map(  # type: ignore[call-arg]
            report_name(self.node),
            self._cluster.namespace,
            {"metadata": metadata},
            _content_type="application/merge-patch+json",
            _request_timeout=PATCH_TIMEOUT,
        )
        # the client's types leave out `api_client`
        item: dict[str, Any] = self._api.api_client.sanitize_for_serialization(patched)  # type: ignore[attr-defined]
        return item

    def _failed(self, error: ApiException) -> ControlRefused | AgentUnreachable:
        what = f"a cordon of node {self.node}"
        if error.status in (401, 403):
            answer = http_status(error.status, error.reason)
            return _refusal("internal", f"the service may not patch ConfigMaps in {self._cluster.namespace}: {answer}")
        return AgentUnreachable(f"the API server answers {error.status} to {what}")

    def _unchanged(self, session: str) -> SessionPod:
        """Return the session's pod, if its annotations have not changed since the decision."""
        now, then = self._cluster.pods(self.node).get(session), self._decided_on.get(session)
        if now is None or then is None or now.name != then.name or not now.runs:
            raise _refusal("unknown-session", f"there is no running pod of session {session} on node {self.node}")
        if now.session != then.session:
            raise _refusal("busy", f"session {session} has changed in the meantime")
        return now

    async def _patch(self, session: str, pod: SessionPod, annotations: Mapping[str, str | None]) -> None:
        try:
            self._cluster.patched(pod, await patch_annotations(self._api, pod, annotations))
        except ApiException as error:
            if error.status == 409:
                raise _refusal("busy", f"session {session} has changed in the meantime") from None
            if error.status == 404:
                raise _refusal("unknown-session", f"the pod {pod.name} of session {session} is gone") from None
            if error.status in (401, 403):
                raise _refusal(
                    "internal",
                    f"the service may not patch pods in the namespace {pod.namespace}: "
                    f"{http_status(error.status, error.reason)}",
                ) from None
            raise AgentUnreachable(f"the API server answers {error.status} to a patch of pod {pod.name}") from None
        except (aiohttp.ClientError, ConfigException, OSError) as error:
            raise AgentUnreachable(
                f"the API server cannot be reached for a patch of pod {pod.name}: {reason(error)}"
            ) from None


async def patch_annotations(api: CoreV1Api, pod: SessionPod, annotations: Mapping[str, str | None]) -> dict[str, Any]:
    """Merge annotations into a pod's, and return the patched pod of the API server.

    Raises the client's errors; ApiException 409 if the pod has changed since this version, for example by the agent.
    """
    body = {"metadata": {"resourceVersion": pod.version, "annotations": dict(annotations)}}
    # the client's types leave out `_content_type`, which its generated code reads
    patched = await api.patch_namespaced_pod(  # type: ignore[call-arg]
        pod.name,
        pod.namespace,
        body,
        _content_type="application/merge-patch+json",
        _request_timeout=PATCH_TIMEOUT,
    )
    # the client's types leave out `api_client`
    item: dict[str, Any] = api.api_client.sanitize_for_serialization(patched)  # type: ignore[attr-defined]
    return item


def _check_reach(pod: SessionPod, needed: IdleReach) -> None:
    """Raise ControlRefused if the session's sharing layer does not support this."""
    layer = LAYERS[pod.layer]
    if needed not in layer.reach:
        raise _refusal("bad-request", out_of_reach(layer))


def _refusal(code: str, message: str) -> ControlRefused:
    return ControlRefused(Failure.model_validate({"code": code, "message": message}))
