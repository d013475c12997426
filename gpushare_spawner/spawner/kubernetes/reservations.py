"""Shares in flight in a cluster, from their placement until a pod's annotations contain the share.

After that, and after a restart of the hub, `cluster.snapshot` counts the pod.

`Exclusions` contains the nodes that one server's spawns avoid for minutes because they did not admit its pod.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from gpushare_spawner.model.layers import Placement
from gpushare_spawner.model.report import ClaimsReport
from gpushare_spawner.model.share import Share
from gpushare_spawner.placement.node import NOTHING, Allocation, Requested
from gpushare_spawner.spawner.kubernetes.cluster.layers import Pending
from gpushare_spawner.spawner.kubernetes.cluster.pods import RESERVATION, annotation, holds_share
from gpushare_spawner.spawner.kubernetes.cluster.reflectors import SnapshotStale
from gpushare_spawner.spawner.kubernetes.cluster.snapshot import ClusterSnapshots, allocation_elsewhere
from gpushare_spawner.spawner.queue.queue import LoopBreaks, Reservation, Ticket
from gpushare_spawner.spawner.queue.reservations import Reservations
from gpushare_spawner.spawner.queue.snapshot import GpuSnapshot, LayerOffer, SpawnRequest
from gpushare_spawner.wording import spawn_failures

LEFT_OUT_SECONDS = 180.0
"""Seconds for which a node is excluded. Our value: a user's retry after a failed spawn gets another node, and a node
that has become free is soon used again.
"""


@dataclass
class Exclusions:
    """Avoided nodes by server and template; the node may admit another server that requests less."""

    clock: Callable[[], float] = time.monotonic
    _left_out: dict[tuple[str, str, str], tuple[float, str]] = field(default_factory=dict, init=False)
    """The end of the exclusion and the missing resource, by session, template and node."""

    def leave_out(self, request: SpawnRequest, node: str, missing: str) -> None:
        """Avoid a node for this request. ``missing``: the node's missing resource, as a phrase."""
        key = (request.session, request.template.name, node)
        self._left_out[key] = (self.clock() + LEFT_OUT_SECONDS, missing)

    def of(self, request: SpawnRequest) -> Mapping[str, str]:
        """Return the nodes that this request avoids now, each with its missing resource."""
        now, server = self.clock(), (request.session, request.template.name)
        self._left_out = {key: entry for key, entry in self._left_out.items() if entry[0] > now}
        return {key[2]: missing for key, (_, missing) in self._left_out.items() if key[:2] == server}


LINGER_SECONDS = 20.0
"""Seconds for which a place is kept if its pod may have been created but has not been seen: the API server finishes a
request with a lost response within its own time limits, and the reflector shows a new pod within a second.
"""
SHOWN_SECONDS = 5.0
"""Seconds for which a place is kept after its late pod was seen; longer than reading the pods of a large cluster."""
_POLL_SECONDS = 0.5


class NoNodeNow(SnapshotStale):
    """Fresh data according to which no node can run a server. ``str()`` is a sentence for the user."""


@dataclass(frozen=True)
class PodReservation(Reservation):
    """A share that is reserved for a pod. ``token``: the pod annotation that identifies the reservation."""

    token: str
    claims: ClaimsReport | None = None
    """The node's report on claims; None if the node allocates GPUs as extended resources."""
    observed: bool = True
    """Whether the pod may request an observer's library, if it uses another layer. A node whose agent is starting
    refuses such a pod.
    """


class PodReservations(Reservations[PodReservation]):
    """The shares that this hub process has reserved for pods, and the queue.

    They exist only in the hub's memory. The annotations of a created pod contain its allocation, so a hub that is
    killed at any point loses only places without a pod.
    """

    where: ClassVar[str] = "this cluster"
    unavailable: ClassVar[str] = spawn_failures.ALLOCATIONS_UNKNOWN
    unreachable: ClassVar[tuple[type[Exception], ...]] = (SnapshotStale,)

    def __init__(self, cluster: ClusterSnapshots, log: logging.Logger, **settings: Any) -> None:
        super().__init__(log, feed=cluster.feed, **settings)
        self.cluster = cluster
        self.exclusions = Exclusions()
        self._in_flight: dict[str, Allocation] = {}
        self._lingering: dict[str, tuple[float, Allocation]] = {}
        self._elsewhere: dict[str, Pending] = {}
        """The reservations on the GPUs of other sharing layers."""
        if cluster.layers is not None:
            cluster.layers.pending = self._pending

    async def snapshot(self, max_age: float = 0.0) -> GpuSnapshot:
        """Update the ledger from reports and pods. Raises SnapshotStale."""
        return await self.cluster.snapshot(max_age, lambda: self._in_flight, self.in_flight)

    def counted(self, share: Share) -> Share:
        """Return the share in whole devices."""
        return self.cluster.counted(share)

    def in_flight(self) -> Iterable[Allocation]:
        """Return the places of pods that are not confirmed to run or may still appear."""
        self._drop_lingering()
        reserved = {**self._in_flight, **{token: allocation for token, (_, allocation) in self._lingering.items()}}
        counted = self.cluster.node_resources.bound()
        return [
            replace(allocation, uncounted=NOTHING) if token in counted else allocation
            for token, allocation in reserved.items()
        ]

    async def _remove_obstacles(self, snapshot: GpuSnapshot) -> GpuSnapshot:
        if not len(snapshot.inventory) and snapshot.layers is None:
            # no spawn can be placed, for a reason that applies to all spawns
            raise NoNodeNow(snapshot.awaited)
        return snapshot

    def _why_nothing_is_placed(self, error: Exception) -> str:
        return str(error) if isinstance(error, NoNodeNow) else super()._why_nothing_is_placed(error)

    async def _reserve_on(self, ticket: Ticket, placement: Placement, snapshot: GpuSnapshot) -> Allocation | None:
        token = secrets.token_hex(8)
        if ticket.offer is not None:
            return self._reserve_by_layer(ticket, ticket.offer, placement, token)
        share = self.counted(ticket.request.share)
        request = ticket.request.placement_request(snapshot)
        allocation = Allocation(
            session=f"{ticket.request.session}#{token}",
            gpus=placement.gpus,
            share_units=share.units,
            last_units=share.last_units,
            borrowed_units=placement.borrowed,
            effective_units=share.units,
            opened_at=time.time(),
            user=ticket.request.tenant.user,
            quota=ticket.request.tenant.quota,
            template=ticket.request.template.name,
            uncounted=Requested(request.cpu, request.memory, pods=1),
            neighbours=request.conditions.neighbours,
        )
        gpus = tuple(snapshot.gpus[gpu] for gpu in placement.gpus)
        self._in_flight[token] = allocation
        # the user's share may be smaller than the devices that it takes
        placement = replace(placement, borrowed=min(placement.borrowed, ticket.request.share.units))
        ticket.result.set_result(
            PodReservation(ticket.request, placement, gpus, token, claims=self.cluster.claims_of(placement.node))
        )
        return allocation

    def _reserve_by_layer(self, ticket: Ticket, offer: LayerOffer, placement: Placement, token: str) -> Allocation:
        """Reserve GPUs of another layer, which count in quotas and in the layer's free capacity."""
        request = ticket.request
        self._in_flight[token] = allocation_elsewhere(
            f"{request.session}#{token}", request.share, request.tenant, request.template.name, time.time()
        )
        self._elsewhere[token] = Pending(offer.layer, request.share.total_units, offer.excluded_nodes)
        ticket.result.set_result(PodReservation(request, placement, (), token, offer=offer))
        return self._in_flight[token]

    def _pending(self) -> Mapping[str, Pending]:
        """Return the reservations on GPUs of other layers, by the annotation of their pods."""
        self._drop_lingering()
        tokens = self._in_flight.keys() | self._lingering.keys()
        self._elsewhere = {token: pending for token, pending in self._elsewhere.items() if token in tokens}
        return self._elsewhere

    def give_back(self, reservation: PodReservation) -> None:
        """Cancel a reservation without a pod."""
        if self._in_flight.pop(reservation.token, None) is not None:
            self.place_soon()

    def keep_place_of(self, reservation: PodReservation) -> None:
        """Keep the place of a failed start, because its pod may exist. Once the pod appears, its annotations count."""
        allocation = self._in_flight.pop(reservation.token, None)
        if allocation is not None:
            self._lingering[reservation.token] = (time.monotonic() + LINGER_SECONDS, allocation)
            self._drop_lingering()
            self.place_soon()

    async def late_pods(self, token: str) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the pods of a reservation after a failed start, repeatedly until they are being deleted."""
        until = time.monotonic() + LINGER_SECONDS
        breaks = LoopBreaks()
        while time.monotonic() < until:
            for pod in list(self.cluster.pods()):
                await breaks.pause_if_due()
                if annotation(pod, RESERVATION) == token:
                    self._has_shown(token)
                if annotation(pod, RESERVATION) == token and not pod["metadata"].get("deletionTimestamp"):
                    yield pod
            await asyncio.sleep(_POLL_SECONDS)

    def _has_shown(self, token: str) -> None:
        """Shorten the wait for a late pod that has appeared; the next read counts the pod unless it was deleted."""
        if token in self._lingering:
            until, allocation = self._lingering[token]
            self._lingering[token] = (min(until, time.monotonic() + SHOWN_SECONDS), allocation)

    def arrived(self, reservation: PodReservation, pod: Mapping[str, Any] | None) -> bool:
        """Count a running pod by its annotations from now on. False if they are missing; the share stays reserved."""
        if pod is None or not holds_share(pod) or annotation(pod, RESERVATION) != reservation.token:
            return False
        self._in_flight.pop(reservation.token, None)
        return True

    def _drop_lingering(self) -> None:
        """Remove places that waited for a pod which is now counted or can no longer appear."""
        now = time.monotonic()
        for token, (until, _) in list(self._lingering.items()):
            if now >= until or self.cluster.shows(token):
                del self._lingering[token]
