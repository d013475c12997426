"""Writes what sessions are to their pods' annotations, and tries again while the API server does not answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from gpushare_spawner.agent.kubernetes.cluster_api import ApiFailure, Json
from gpushare_spawner.agent.kubernetes.pods.pod_watch import Pod
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.log_once import LogOnce

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0
"""Seconds between tries of a patch."""


class Api(Protocol):
    """What is needed of the API server: cluster_api.ClusterApi."""

    async def patch(self, path: str, patch: Json) -> Json:
        """Apply a merge patch and return the object. Raises ApiFailure."""


class AnnotationWriter:
    """Patches pods, one patch of each session at a time."""

    def __init__(
        self,
        api: Api,
        pod_of: Callable[[Session], Pod | None],
        wanted: Callable[[Session], Mapping[str, str | None]],
        written: Callable[[Session, Json], None],
        ended: Callable[[], None],
    ) -> None:
        """`wanted` gives the patch that a session's pod needs now; empty: none. `written` is given the pod that the API
        server answered with; `ended` is called when a session needs no more patches, or cannot be patched."""
        self._api = api
        self._pod_of = pod_of
        self._wanted = wanted
        self._written = written
        self._ended = ended
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._trouble = LogOnce(
            log,
            "cannot write tiers to the annotations of pods; retrying",
            "tiers are written to the annotations of pods again",
        )

    def look(self, session: Session) -> None:
        """Patch the session's pod if it needs a patch, and none is on its way."""
        if session.id not in self._tasks and self._wanted(session):
            self._tasks[session.id] = asyncio.get_running_loop().create_task(self._patch(session))

    async def close(self) -> None:
        """Give up patches that are on their way."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _patch(self, session: Session) -> None:
        pause = FIRST_PAUSE
        try:
            while (patch := self._wanted(session)) and (pod := self._pod_of(session)) is not None:
                try:
                    # the uid: never into another pod of the same name
                    body = {"metadata": {"uid": pod.uid, "annotations": dict(patch)}}
                    item = await self._api.patch(pod.path, body)
                except ApiFailure as failure:
                    if not _is_of_another_pod(failure):
                        self._trouble.about(failure)
                else:
                    self._trouble.settled()
                    self._written(session, item)
                    if not self._wanted(session):
                        break
                    # it moved on in the meantime; or somebody undoes what is written, whom this must not race
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        except Exception:
            log.exception("the pod of session %s cannot be patched", session.id)
            await asyncio.sleep(LONGEST_PAUSE)
        finally:
            del self._tasks[session.id]
            self._ended()


def _is_of_another_pod(failure: ApiFailure) -> bool:
    """Return whether the pod is gone, or another one has its name; the watch will say so."""
    return failure.status in (404, 409) or (failure.status == 422 and "metadata.uid" in str(failure))
