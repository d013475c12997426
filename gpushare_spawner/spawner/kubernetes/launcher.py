"""Starts the pod of one spawn, and tries again after a refusal by a node or a failure of the cluster's API.

In every case, a pod's annotations have the share, or it is free again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from aiohttp import ClientError
from kubernetes_asyncio.client.rest import ApiException

from gpushare_spawner.spawner.hub import SpawnRefused
from gpushare_spawner.spawner.kubernetes.attempt import (
    NotAdmitted,
    PodAdmission,
    PodAttempt,
    api_refused,
    may_pass,
    worded,
)
from gpushare_spawner.spawner.kubernetes.cluster.capacity import why_waiting
from gpushare_spawner.spawner.kubernetes.cluster.reflectors import SnapshotStale
from gpushare_spawner.spawner.kubernetes.reservations import PodReservations, PodShare
from gpushare_spawner.wording import spawn_failures


class PodLauncher:
    """The tries of one spawn.

    ``reserve`` reserves another share, ``start_pod`` makes the pod of the attempt's share and waits until it runs,
    ``remove_pod`` removes it again, ``pod`` returns it from the watch. ``tries``: limit of refusals by nodes and
    failures of the API; refusals by the scheduler do not count, as each leaves one node less. ``start_timeout``:
    seconds for all tries. ``scaling`` returns whether the cluster adds a node for the pod, ``events`` the pod's events.
    """

    def __init__(
        self,
        attempt: PodAttempt,
        reservations: PodReservations,
        *,
        reserve: Callable[[], Awaitable[PodShare]],
        start_pod: Callable[[], Awaitable[Any]],
        remove_pod: Callable[[], Awaitable[None]],
        pod: Callable[[], Mapping[str, Any] | None],
        tries: int,
        start_timeout: float,
        log: logging.Logger,
        name: str,
        scaling: Callable[[], bool] = lambda: False,
        events: Callable[[], Iterable[Mapping[str, Any]]] = tuple,
    ) -> None:
        self._attempt = attempt
        self._reservations = reservations
        self._reserve = reserve
        self._start_pod = start_pod
        self._remove_pod = remove_pod
        self._pod = pod
        self._tries = tries
        self._start_timeout = start_timeout
        self._log = log
        self._name = name
        self._scaling = scaling
        self._events = events
        self._refused: dict[str, str] = {}
        """The missing resources of the nodes that refused the pod."""

    async def launch(self) -> Any:
        """Return the server's address. Raises SpawnRefused and KubeSpawner's errors; then the share is free again.

        It ends a moment before the hub's own limit, for a clear error.
        """
        limit = asyncio.timeout(self._start_timeout - min(1.0, 0.05 * self._start_timeout))
        try:
            async with limit:
                address = await self._start_somewhere()
            self._let_arrive()
            return address
        except BaseException as error:
            self._attempt.give_back()
            if isinstance(error, TimeoutError):
                raise self._too_slow(str(error) if not limit.expired() else "") from None
            raise
        finally:
            self._attempt.admission = None

    async def _start_somewhere(self) -> Any:
        failures = 0
        while True:
            share = self._attempt.reservation
            if share is None:
                # a pod that a node refused is tried again without optional parts
                share = replace(await self._reserve_elsewhere(), observed=not failures)
                self._attempt.reserved(share)
            # another layer's scheduler can keep a pod waiting without limit
            scaling = self._scaling if share.offer is None else lambda: True
            self._attempt.admission = PodAdmission(
                share.token, share.placement.node, scaling=scaling, events=self._events
            )
            try:
                return await self._start_pod()
            except NotAdmitted as error:
                failures += error.distrust
                await self._leave(error, share, last=failures >= self._tries)
            except (ApiException, ClientError, SnapshotStale) as error:
                failures += 1
                if not may_pass(error) or failures >= self._tries:
                    raise api_refused(error) from error
                self._log.warning("%s: the cluster's API failed: %s; trying again", self._name, worded(error))
                await asyncio.sleep(0.1 * 2**failures)

    async def _reserve_elsewhere(self) -> PodShare:
        try:
            return await self._reserve()
        except SpawnRefused as refusal:
            if not self._refused:
                raise
            message = refusal.jupyterhub_message
            if spawn_failures.refused_by_nodes(self._refused) not in message:
                message = spawn_failures.no_node_left(self._refused, message)
            raise SpawnRefused(message, reason="not-admitted", status=503, retry_after=60) from refusal

    async def _leave(self, error: NotAdmitted, share: PodShare, last: bool) -> None:
        """Remove a pod that its node did not admit, and free its place; the caller reserves another place."""
        self._log.warning("%s: %s%s", self._name, error, f" ({error.detail})" if error.detail else "")
        node = share.placement.node
        if error.elsewhere and node:
            self._refused[node] = error.missing
            self._reservations.exclusions.leave_out(share.request, node, error.missing)
        if error.distrust and node:
            self._reservations.cluster.distrust(node)
        self._reservations.give_back(share)
        self._attempt.forget_reservation()
        # if that fails, the creation of the next pod sees this pod and retries
        await self._remove_pod()
        if last or not error.elsewhere:
            raise SpawnRefused(
                spawn_failures.not_admitted(str(error), self._tries if last else None),
                reason="not-admitted",
                status=503,
                retry_after=60,
            )
        self._attempt.retries.tell(spawn_failures.another_place(str(error)))

    def _let_arrive(self) -> None:
        share = self._attempt.reservation
        if share is None:
            return
        if self._reservations.arrived(share, self._pod()):
            self._attempt.forget_reservation()
        else:
            # it stays reserved until the server stops, so that no unit is allocated twice while this hub runs
            self._log.error(
                "The pod of %s has lost the annotations or the label of its GPU share; does a modify_pod_hook replace "
                "them?",
                self._name,
            )

    def _too_slow(self, text: str) -> SpawnRefused:
        pod = self._pod()
        why = (why_waiting(pod) if pod is not None else "") or text or ("" if pod else spawn_failures.POD_NOT_SEEN)
        return SpawnRefused(spawn_failures.too_slow(self._start_timeout, why), reason="too-slow", status=503)
