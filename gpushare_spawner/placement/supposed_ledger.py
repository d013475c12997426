"""What would be free on some nodes if announced idle actions happened, and whom that would fit first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.placement.claim import Claim
from gpushare_spawner.placement.ledger import Ledger
from gpushare_spawner.placement.obstacle import fits
from gpushare_spawner.placement.request import PlacementRequest

SESSIONS_AT_ONCE = 100
"""Sessions whose nodes are found in one piece: less than 1 ms."""


class SupposedLedger:
    """Copies of the nodes for which something is supposed. The ledger that they are copied from does not change."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._nodes: dict[str, Ledger] = {}

    def happens(self, session: str, announced: Notice) -> str | None:
        """Count the units that an idle action frees; return their node, None where it frees none."""
        name = self._ledger.node_of(session)
        if name is None:
            return None
        node = self._node(name)
        allocation = node.allocations.get(session)
        if allocation is None:
            return None
        if announced.tier is Tier.STOPPED:
            node.remove(session)
        elif announced.effective_units < allocation.effective_units:
            node.replace(allocation.with_effective(announced.effective_units))
        else:
            return None
        return name

    def yielding(self, kept: Mapping[str, int], node: str) -> None:
        """Count that sessions give up all but so many units of each of their GPUs, which others can then own."""
        ledger = self._node(node)
        ledger.change([ledger.allocations[session].yielding(units) for session, units in kept.items()])

    def lending(self, kept: Mapping[str, int], node: str) -> None:
        """Count that idle sessions keep only so many units of each of their GPUs, and lend the others."""
        ledger = self._node(node)
        ledger.change([ledger.allocations[session].with_effective(units) for session, units in kept.items()])

    def copy_of(self, node: str) -> SupposedLedger:
        """Return a ledger of one node, as it is supposed to be, to suppose more there."""
        return SupposedLedger(self._node(node))

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes for which something is supposed."""
        return frozenset(self._nodes)

    def place(self, name: str, request: PlacementRequest, node: str) -> Claim | None:
        """Count a request as placed on one node, instead of what this name claims.

        Return where; None where it does not fit there.
        """
        if request.node not in ("", node) or node in request.left_out:
            return None
        ledger = self._node(node)
        claim = ledger.claims.get(name)
        ledger.claim(name, None)
        placement = None
        if fits(request.demand, ledger.capacity.nodes[node]):
            placement = ledger.place(replace(request, node=node))
        if placement is None:
            ledger.claim(name, claim)
            return None
        found = Claim.of(request, node, placement.gpus)
        ledger.claim(name, found)
        return found

    def _node(self, name: str) -> Ledger:
        if name not in self._nodes:
            self._nodes[name] = self._ledger.of_node(name)
        return self._nodes[name]


def helpful_actions(
    ledger: Ledger, requests: Iterable[PlacementRequest], announced: Iterable[tuple[str, Notice]]
) -> Iterator[list[tuple[str, Notice]]]:
    """Yield the idle actions on nodes where one of the requests may fit after them, node by node; in small pieces.

    ``announced``: the actions by their sessions. An empty list is a piece of work that found none. Claims are not
    looked at: a request does not meet its own. This is counted without a copy of the node. Between two pieces the
    ledger may change.
    """
    on_node: dict[str, list[tuple[str, Notice]]] = {}
    for number, (session, action) in enumerate(announced):
        node = ledger.node_of(session)
        if node is not None:
            on_node.setdefault(node, []).append((session, action))
        if number % SESSIONS_AT_ONCE == 0:
            yield []
    asked = {(request.demand, request.left_out, request.node): request for request in requests}.values()
    for name, actions in on_node.items():
        yield actions if _may_fit(ledger, asked, name, actions) else []


def first_to_fit(
    ledger: Ledger, request: PlacementRequest, helpful: Iterable[tuple[str, Notice]]
) -> Iterator[Claim | None]:
    """Yield the GPUs that fit a request first if announced idle actions happen; nothing where these do not help it.

    Before that None for each action that does not help: the work can be done in pieces. ``helpful``: the actions by
    their sessions, see `helpful_actions`.
    """
    supposed = SupposedLedger(ledger)
    for session, action in sorted(helpful, key=lambda known: known[1].at):
        there = supposed.happens(session, action)
        claim = supposed.place("", request, there) if there is not None else None
        yield claim
        if claim is not None:
            return


def _may_fit(
    ledger: Ledger, requests: Iterable[PlacementRequest], name: str, actions: Iterable[tuple[str, Notice]]
) -> bool:
    """Whether enough units would be free on a node for one of the requests if nothing were claimed there."""
    node = ledger.capacity.nodes.get(name)
    if node is None:
        return False
    free = {gpu.uuid: gpu.free for gpu in node.gpus}
    for session, action in actions:
        allocation = ledger.allocations.get(session)
        if allocation is not None:
            kept = 0 if action.tier is Tier.STOPPED else action.effective_units
            _add(free, allocation.gpus, max(0, allocation.effective_units - kept))
    for claim in ledger.claims.values():
        if claim.node == name:
            _add(free, claim.gpus, claim.units)
    return any(
        request.node in ("", name)
        and name not in request.left_out
        and request.share.count
        <= sum(
            free[gpu.uuid] >= request.share.units
            and request.demand.accepts(gpu.model)
            and gpu.can_have(request.demand.layer_on(gpu.model))
            for gpu in node.gpus
        )
        for request in requests
    )


def _add(free: dict[str, int], gpus: Iterable[str], units: int) -> None:
    for uuid in gpus:
        if uuid in free:
            free[uuid] += units
