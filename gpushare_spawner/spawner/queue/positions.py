"""Positions in the queue: how many earlier spawns could use the same GPUs as a spawn.

One object for one pass over the queue, on its snapshot. The order of the queue stands in `queue`.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement import Demand, PlacementRequest, able_nodes
from gpushare_spawner.spawner.queue.placement_check import PlacementCheck
from gpushare_spawner.spawner.queue.queue import SpawnQueue, Ticket

_Kind = tuple[Demand, str]
"""What a request needs of a node, and the only node that will do; empty: any."""


class Positions:
    """Counts the spawns ahead: models, taints and labels, and the size of nodes say which spawns compete.

    What it asks for is prepared by `PlacementCheck.preparing`.
    """

    def __init__(self, check: PlacementCheck, queue: SpawnQueue) -> None:
        self._check = check
        self._queue = queue
        self._by_template: dict[int, tuple[Template, Set[LayerName]]] = {}
        self._requests: dict[Ticket, PlacementRequest] = {}
        self._compete: dict[tuple[_Kind, _Kind], bool] = {}

    def ahead_of(self, request: PlacementRequest, ticket: Ticket | None = None) -> int:
        """Return how many earlier tickets compete with a request; all of them where no ticket is given."""
        asked = self._check.counted_request(request)
        snapshot = self._check.snapshot
        return self._queue.ahead_of(
            lambda other: snapshot.native(other.request.template) and self._competes(asked, self._request(other)),
            ticket,
        )

    def ahead_of_template(self, template: Template, ticket: Ticket | None = None) -> int:
        """Return how many earlier tickets have a layer in common with a template, as `ahead_of` does for a request."""
        return self._queue.ahead_of(self._meets(template), ticket)

    def is_full(self, template: Template) -> bool:
        """Return whether as many spawns wait as may, of those that have a layer in common with a template.

        Spawns that wait for one layer take no place in the queue of another one.
        """
        return self._queue.is_full(self._meets(template))

    def _meets(self, template: Template) -> Callable[[Ticket], bool]:
        layers = self._layers(template)
        return lambda other: not layers.isdisjoint(self._layers(other.request.template))

    def _layers(self, template: Template) -> Set[LayerName]:
        found = self._by_template.get(id(template))
        if found is None:
            snapshot = self._check.snapshot
            others = snapshot.layers.names(template) if snapshot.layers is not None else ()
            names = {*others, *([LayerName.NATIVE] if snapshot.native(template) else [])}
            # the template is kept beside it, so that no other has its identity
            found = self._by_template[id(template)] = (template, names)
        return found[1]

    def _request(self, ticket: Ticket) -> PlacementRequest:
        known = self._requests.get(ticket)
        if known is None:
            asked = ticket.request.placement(self._check.snapshot)
            known = self._requests[ticket] = self._check.counted_request(asked)
        return known

    def _competes(self, one: PlacementRequest, other: PlacementRequest) -> bool:
        key = ((one.demand, one.node), (other.demand, other.node))
        known = self._compete.get(key)
        if known is None:
            known = self._compete[key] = self._share_gpus(one, other)
        return known

    def _share_gpus(self, one: PlacementRequest, other: PlacementRequest) -> bool:
        if one.models is not None and other.models is not None and one.models.isdisjoint(other.models):
            return False
        these, those = self._able(one), self._able(other)
        # none: it waits for GPUs to become healthy, or for nodes that are not there
        return not (these and those) or not these.isdisjoint(those)

    def _able(self, request: PlacementRequest) -> Set[str]:
        return able_nodes(self._check.ledger.capacity, request)
