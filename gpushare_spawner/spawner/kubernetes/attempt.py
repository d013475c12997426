"""The state of one spawn of a pod."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from kubernetes_asyncio.client.rest import ApiException

from gpushare_spawner.model.kubernetes import TEMPLATE
from gpushare_spawner.spawner.attempt import SpawnAttempt, SpawnPhase
from gpushare_spawner.spawner.kubernetes.admission import Admission
from gpushare_spawner.spawner.kubernetes.api_errors import asked_again
from gpushare_spawner.spawner.kubernetes.cluster.pods import Ended, annotation, ended_by_node, of_session
from gpushare_spawner.spawner.kubernetes.reservations import PodShare
from gpushare_spawner.spawner.options.overrides import Overrides
from gpushare_spawner.spawner.progress import SpawnProgress, interleaved


class PodAttempt(SpawnAttempt[PodShare]):
    """One spawn of a pod.

    ``give_back`` gets the reservation that is no longer needed, and whether a pod may have been created from it.
    """

    def __init__(self, overrides: Overrides, give_back: Callable[[PodShare, bool], None]) -> None:
        super().__init__(overrides)
        self.retries = SpawnProgress()
        """What the user is told of nodes that did not take the pod, while the pod's own events are told."""
        self.perhaps_created = False
        """Whether the reservation's pod may exist."""
        self.admission: Admission | None = None
        """The pod that is being admitted now; None where none is, or none with a share."""
        self.secret: tuple[object, Callable[[str], dict[str, Any]] | None] = (None, None)
        """A pod's manifest, and the Secret that was made of its values, by the uid of the pod; None: none was."""
        self._give_back = give_back

    def reserved(self, reservation: PodShare) -> None:
        """Note the share that was found; no pod exists for it."""
        self.reservation, self.perhaps_created = reservation, False

    def forget_reservation(self) -> None:
        """The share is accounted for elsewhere: by a pod's annotations, or it was given back."""
        self.reservation = None

    def give_back(self) -> None:
        reservation, self.reservation = self.reservation, None
        if reservation is not None:
            perhaps_created, self.perhaps_created = self.perhaps_created, False
            self._give_back(reservation, perhaps_created)

    async def pod_created(self, request: Awaitable[bool], name: str, log: logging.Logger) -> bool:
        """Return whether the request has created the pod. Of a share: False too where the API failed for a moment.

        ``name``: the pod's, for the log. Raises what will not pass.
        """
        if self.reservation is None:
            return bool(await request)
        before, self.perhaps_created = self.perhaps_created, True
        try:
            return await asked_again(request, f"Pod {name} is not created yet", log)
        except ApiException:
            # refused for good: only an earlier request, whose answer was lost, can have made a pod
            self.perhaps_created = before
            raise

    async def pod_deleted(self, request: Awaitable[bool], name: str, log: logging.Logger) -> bool:
        """Return whether the request has deleted the pod. Of a template: False too where the API failed for a moment.

        ``name``: the pod's, for the log. Raises what will not pass.
        """
        if not self.template_name:
            return bool(await request)
        return await asked_again(request, f"Pod {name} is not deleted yet", log)

    def pod_runs(self, pod: Any, runs: Callable[[Any], bool]) -> bool:
        """Return whether the pod runs, by ``runs``. Raises NotAdmitted where its node does not take a share's pod."""
        return bool(runs(pod)) if self.admission is None else self.admission.runs(pod, runs)

    def ended_by_node(self, pod: Mapping[str, Any] | None) -> Ended | None:
        """Return how the node ended the server's pod; None while the server starts, and where the node did not.

        A hub that was killed before it saved the server's state learns the template from the pod here.
        """
        if pod is None or not of_session(pod):
            return None
        self.template_name = self.template_name or annotation(pod, TEMPLATE)
        return ended_by_node(pod) if self.phase is not SpawnPhase.STARTING else None

    async def events(self, placing: bool, of_pod: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        """The events of the spawn: of its placement if ``placing``, then of the pod and of nodes that refuse it."""
        if placing:
            async for event in self.progress.events():
                yield event
        if self.profile is not None and self.profile.template is not None:
            of_pod = interleaved(of_pod, self.retries.events())
        async for event in of_pod:
            yield event

    def cancel(self) -> None:
        super().cancel()
        self.retries.end()
