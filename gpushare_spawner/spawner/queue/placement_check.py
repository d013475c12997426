"""Whether a share can be placed now, later or never, on one snapshot: for queued spawns and for the form's cards.

Does not change the queue or the ledger: see `placer`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.placement import Placement
from gpushare_spawner.model.share import Share
from gpushare_spawner.placement import (
    Ledger,
    PlacementRequest,
    PreparedStrategy,
    Reason,
    Strategy,
    Unplaceable,
    looking_for_claim,
)
from gpushare_spawner.spawner.queue.other_layers import Outcome
from gpushare_spawner.spawner.queue.snapshot import GpuSnapshot
from gpushare_spawner.wording.spawn import layers, refusals
from gpushare_spawner.wording.spawn.queue import EARLIER_FIRST

NODES_AT_ONCE = 20
"""Nodes that are looked at without a break for the event loop: 1 to 2 ms."""


@dataclass(frozen=True)
class Verdict:
    """The outcome for one share."""

    outcome: Outcome
    placement: Placement | None = None
    """NOW: the place."""
    why: str = ""
    """WAIT and NEVER: the reason, as a sentence."""
    unsuitable: bool = False
    """NEVER: no GPU is of a suitable model."""
    left_out: bool = False
    """WAIT: only nodes that did not admit a pod of this request have a place."""
    ineligible: bool = False
    """NEVER: the taints or labels that the nodes have now keep the pod out."""


@dataclass(frozen=True)
class PlacementCheck:
    """Checks shares against one snapshot and its ledger.

    ``counted`` returns a share as the ledger counts it, where GPUs are given out in coarser steps than 1 %.
    """

    snapshot: GpuSnapshot
    ledger: Ledger
    strategy: Strategy
    counted: Callable[[Share], Share] = field(default=lambda share: share)
    nodes_are_added: bool = False
    """Nodes that are added later may do for what no node of now can take."""

    def verdict(self, request: PlacementRequest) -> Verdict:
        """Return whether a request can be placed, beside what is kept for spawns that wait."""
        placement = self.ledger.place(self.counted_request(request), self.strategy)
        if placement is not None:
            return Verdict(Outcome.NOW, placement)
        unplaceable: Unplaceable = self.ledger.why_unplaceable(request)
        why = self._no_instance(request) or self._native_there(request, unplaceable) or refusals.capacity(unplaceable)
        if not unplaceable.may_pass:
            if self.snapshot.awaited:
                return Verdict(Outcome.WAIT, why=self.snapshot.awaited)
            if self.nodes_are_added:
                return Verdict(Outcome.WAIT, why=why)
            unsuitable = not request.models or unplaceable.reason in (Reason.NO_MODEL, Reason.NO_GPUS)
            ineligible = unplaceable.reason is Reason.INELIGIBLE
            return Verdict(Outcome.NEVER, why=why, unsuitable=unsuitable, ineligible=ineligible)
        if self.fits_without(request, self.ledger.claims.keys()):
            return Verdict(Outcome.WAIT, why=EARLIER_FIRST)
        return Verdict(Outcome.WAIT, why=why, left_out=unplaceable.reason is Reason.NOT_ADMITTED)

    def _no_instance(self, request: PlacementRequest) -> str:
        """Return why no MIG instance will ever do; empty: one would, or none is asked for."""
        if request.layer is not LayerName.MIG or request.models:
            return ""
        profiles = [kind.mig.profile.name for kind in self.snapshot.kinds if kind.mig is not None]
        return layers.no_instance(request.share, profiles)

    def _native_there(self, request: PlacementRequest, why: Unplaceable) -> str:
        """Return that sessions of the native layer keep MPS from GPUs with enough free units; empty: that is not so."""
        if request.layer is not LayerName.MPS or why.reason is not Reason.FULL:
            return ""
        native = replace(self.counted_request(request), layer=LayerName.NATIVE)
        return layers.layer_taken(request.share) if self.ledger.place(native, self.strategy) is not None else ""

    def fits_without(self, request: PlacementRequest, claims: Collection[str]) -> bool:
        """Whether a request would fit on a node of these claims if they were not there."""
        return self.ledger.fits_without(self.counted_request(request), claims)

    def counted_request(self, request: PlacementRequest) -> PlacementRequest:
        """Return the request with its share as the ledger counts it."""
        share = self.counted(request.share)
        return request if share == request.share else replace(request, share=share)

    def preparing(self, request: PlacementRequest) -> Iterator[None]:
        """Do in pieces what `verdict` needs: on a large cluster its first answer for a kind of request takes long."""
        counted = self.counted_request(request)
        if request.node:
            return  # one node is looked at
        if isinstance(self.strategy, PreparedStrategy):
            while self.strategy.prepare(counted, self.ledger.capacity, NODES_AT_ONCE):
                yield
        if self.ledger.place(counted, self.strategy) is None:
            while self.ledger.capacity.prepare_obstacles(request.demand, NODES_AT_ONCE):
                yield
            # for its position and its claim
            yield from looking_for_claim(self.ledger.capacity, counted)
