"""A whole start: a place, a pod, and another place where the first node does not take it; at the end it has arrived."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientError
from kubernetes_asyncio.client.rest import ApiException
from traitlets import Integer

from gpushare_spawner.model.template import Template
from gpushare_spawner.spawner.base import GPUShareBase
from gpushare_spawner.spawner.kubernetes.api_errors import api_refused, may_pass, worded
from gpushare_spawner.spawner.kubernetes.pod_builder import CreatingSpawner
from gpushare_spawner.spawner.kubernetes.pod_manifest import RESERVATION, annotation
from gpushare_spawner.spawner.kubernetes.pods import (
    UNSCHEDULABLE,
    Ended,
    NotAdmitted,
    ended_by_node,
    lacks_units,
    why_waiting,
)
from gpushare_spawner.spawner.kubernetes.reflectors import ViewStale
from gpushare_spawner.spawner.progress import Story
from gpushare_spawner.spawner.refusal import StartRefused

SCHEDULED_WITHIN = 15.0
"""Seconds that the units of a pod may be missing on its node: units that idle neighbours have lent reach the node's
status within 10 s (the kubelet's ``nodeStatusUpdateFrequency``)."""


@dataclass(frozen=True)
class _Missed:
    """The scheduler's words where it does not find a pod's units, and since when it does not (monotonic clock)."""

    said: str
    since: float


class StartingSpawner(CreatingSpawner):
    """Starts a server with a share; whatever happens, the share ends up in a pod's annotations or is free again."""

    start_attempts = Integer(
        4,
        min=1,
        help="""
        How often a server with a share is tried at most when a node does not admit its pod, or the cluster's API
        fails.

        A node may be given a pod on what it said a moment ago: its GPU went away, or was given to somebody. Each
        attempt looks at the GPUs anew, and leaves the node that refused alone for 10 s. All of them together are part
        of ``Spawner.start_timeout``.
        """,
    ).tag(config=True)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._retries = Story()
        self._looked_at: Any = None
        self._missed: _Missed | None = None

    async def _start(self) -> Any:
        """KubeSpawner's start, on a node that has room; on another one if the first does not admit the pod."""
        self._story.end()
        try:
            with self._refusals_told():
                if not self._settled:
                    await self._settle_without_hub()
                template = self._profile.template if self._settled and self._profile is not None else None
                if template is None or template.gpu is None:
                    return await super()._start()
                return await self._start_with_share(template)
        finally:
            self._retries.end()
            # the next start is checked anew
            self._settled = False

    async def _start_with_share(self, template: Template) -> Any:
        self._starting = True
        limit = asyncio.timeout(self.start_timeout - min(1.0, 0.05 * self.start_timeout))
        try:
            async with limit:
                url = await self._start_somewhere(template)
            self._let_arrive()
            return url
        except BaseException as error:
            self._give_back_place()
            if isinstance(error, TimeoutError):
                raise self._too_slow(str(error) if not limit.expired() else "") from None
            raise
        finally:
            self._starting = False

    async def _start_somewhere(self, template: Template) -> Any:
        attempt = 0
        while True:
            attempt += 1
            if self._reservation is None:
                await self._place(template, min(self.queue_timeout, self.start_timeout / 2), self._retries)
            try:
                self._looked_at = self._missed = None
                return await super()._start()
            except NotAdmitted as error:
                await self._leave(error, last=attempt >= self.start_attempts)
            except (ApiException, ClientError, ViewStale) as error:
                if not may_pass(error) or attempt >= self.start_attempts:
                    raise api_refused(error) from error
                self.log.warning("%s: the cluster's API failed: %s; trying again", self._log_name, worded(error))
                await asyncio.sleep(0.1 * 2**attempt)

    async def _leave(self, error: NotAdmitted, last: bool) -> None:
        """The node did not take the pod: it goes, its place is free, and another one is looked for."""
        ended, reservation = error.ended, self._reservation
        self.log.warning("%s: %s", self._log_name, ended)
        if reservation is not None:
            self.reservations.cluster.distrust(reservation.placement.node)
            self.reservations.give_back(reservation)
            self._reservation = None
        try:
            await super(GPUShareBase, self).stop(now=True)
        except Exception as failure:
            # creating the next one finds it and tries again
            self.log.warning("Pod %s is not removed yet: %s", self.pod_name, failure)
        if last:
            raise StartRefused(
                f"{ended}. This was the last of {self.start_attempts} attempts; nothing is reserved for you. "
                "Try again in a minute; tell the admin if it stays so.",
                reason="not-admitted",
                status=503,
                retry_after=60,
            )
        self._retries.tell(f"{ended}. Looking for another place.")

    def _too_slow(self, said: str) -> StartRefused:
        pod = self._pod()
        why = (why_waiting(pod) if pod is not None else "") or said or ("" if pod else "its pod never showed")
        return StartRefused(
            f"The server did not start within {self.start_timeout} seconds{f' ({why})' if why else ''}. Try again, or "
            "tell the admin.",
            reason="too-slow",
            status=503,
        )

    def _let_arrive(self) -> None:
        if self._reservation is None:
            return
        if self.reservations.arrived(self._reservation, self._pod()):
            self._reservation = None
        else:
            # it stays put aside until the server stops, so nothing is given away twice while this hub runs
            self.log.error(
                "Pod %s has lost the annotations or the label of its GPU share; does a modify_pod_hook replace them?",
                self.pod_name,
            )

    def is_pod_running(self, pod: Any) -> bool:
        """KubeSpawner's. While a server with a share starts, a pod that its node has refused is noticed at once.

        So is one whose units the scheduler does not find on the node, after a while.
        """
        if self._starting and pod is not None and pod is self._looked_at and self._missed is None:
            # asked for again and again, and the same until the watch brings another
            return False
        running: bool = super().is_pod_running(pod)
        reservation = self._reservation
        if running or not self._starting or reservation is None or pod is None:
            return running
        if pod is not self._looked_at:
            self._looked_at = pod
            ours = annotation(pod, RESERVATION) == reservation.token
            ended = ended_by_node(pod) if ours else None
            if ended is not None:
                raise NotAdmitted(ended)
            self._misses_units(lacks_units(pod) if ours else "")
        if self._missed is not None and time.monotonic() - self._missed.since >= SCHEDULED_WITHIN:
            raise NotAdmitted(Ended(UNSCHEDULABLE, self._missed.said, reservation.placement.node))
        return running

    def _misses_units(self, said: str) -> None:
        """What the agent reports and what the node offers differ: somebody else was quicker, or the plugin is away."""
        since = self._missed.since if self._missed is not None else time.monotonic()
        self._missed = _Missed(said, since) if said else None

    def _let_go(self) -> None:
        if self._placing is None:
            self._retries.end()
            self._retries = Story()
        super()._let_go()
