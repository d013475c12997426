"""What would be free on some nodes if announced idle actions happened, and whom that would fit first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.placement.claim import Claim
from gpushare_spawner.placement.ledger import Ledger
from gpushare_spawner.placement.obstacle import fits
from gpushare_spawner.placement.request import PlacementRequest


class SupposedLedger:
    """Copies of the nodes for which something is supposed. The ledger that they are copied from does not change."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._nodes: dict[str, Ledger] = {}

    def happens(self, session: str, announced: Notice) -> str | None:
        """Count the units that an idle action frees; return their node, None where it frees none."""
        name = _node_of(self._ledger, session)
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


def first_to_fit(ledger: Ledger, request: PlacementRequest, announced: Iterable[tuple[str, Notice]]) -> Claim | None:
    """Return the GPUs that fit a request first if announced idle actions happen; None: these do not help it.

    ``announced``: the actions by their sessions.
    """
    on_node: dict[str, list[tuple[str, Notice]]] = {}
    for session, action in announced:
        node = _node_of(ledger, session)
        if node is not None:
            on_node.setdefault(node, []).append((session, action))
    hopeful = [
        action for node, actions in on_node.items() if _may_fit(ledger, request, node, actions) for action in actions
    ]
    supposed = SupposedLedger(ledger)
    for session, action in sorted(hopeful, key=lambda known: known[1].at):
        there = supposed.happens(session, action)
        claim = supposed.place("", request, there) if there is not None else None
        if claim is not None:
            return claim
    return None


def _node_of(ledger: Ledger, session: str) -> str | None:
    """The node of a session's GPUs; None where the ledger has no allocation of it, or does not know its GPUs."""
    known = ledger.allocations.get(session)
    gpu = ledger.capacity.gpus.get(known.gpus[0]) if known is not None and known.gpus else None
    return gpu.node if gpu is not None else None


def _may_fit(ledger: Ledger, request: PlacementRequest, name: str, actions: Iterable[tuple[str, Notice]]) -> bool:
    """Whether enough units would be free on a node at most, counted without making a copy of it."""
    freed: Counter[str] = Counter()
    for session, action in actions:
        allocation = ledger.allocations[session]
        kept = 0 if action.tier is Tier.STOPPED else action.effective_units
        freed.update(dict.fromkeys(allocation.gpus, max(0, allocation.effective_units - kept)))
    gpus = ledger.capacity.nodes[name].gpus
    enough = [gpu for gpu in gpus if gpu.free + freed[gpu.uuid] >= request.share.units]
    return name not in request.left_out and len(enough) >= request.share.count
