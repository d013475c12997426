"""GPUs that other sharing layers than ours give out, as the queue and the form's cards look at them.

No agent reports these GPUs and no ledger has them: the scheduler of their layer places servers. The hub keeps a spawn
in the queue until, by what the layer publishes, its server can start.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.layers.mig import MigProfile
from gpushare_spawner.model.template import Template
from gpushare_spawner.sharing.base import LayerRequest, Tenant
from gpushare_spawner.spawner.queue.inventory import GpuKind


class Outcome(Enum):
    """What a placement request meets."""

    NOW = "now"
    """It can be placed."""
    WAIT = "wait"
    """It cannot be placed now; a wait can help."""
    NEVER = "never"
    """No wait would help."""


@dataclass(frozen=True)
class AskedServer:
    """A server that a layer is to place."""

    template: Template
    tenant: Tenant
    node: str = ""
    """The only node that will do; empty: any."""
    ineligible: frozenset[str] = frozenset()
    """Nodes that cannot take it whatever is free there."""

    def can_be_on(self, node: str) -> bool:
        """Return whether a node will do."""
        return self.node in ("", node) and node not in self.ineligible


@dataclass(frozen=True)
class LayerOffer:
    """Nodes whose GPUs one layer shares in one way."""

    layer: LayerName
    request: LayerRequest
    """What the layer is asked for, on these nodes."""
    kept_off: frozenset[str] = frozenset()
    """Nodes among these that are kept for earlier spawns: the pod must not go there."""


@dataclass(frozen=True)
class LayerVerdict:
    """What a server of a template meets on the GPUs of other layers."""

    outcome: Outcome
    offer: LayerOffer | None = None
    """NOW: where the server can start. Otherwise where it could: the first that there is."""
    why: str = ""
    """WAIT and NEVER: the reason, as a sentence."""
    known: bool = True
    """NOW: whether what is free is known; False: the layer's scheduler decides."""
    gpus: tuple[GpuKind, ...] = ()
    """GPUs that would do, free or not, as far as they are known."""
    profile: MigProfile | None = None
    """NOW and WAIT: that of the MIG device that the server gets; None: it gets none."""
    able: frozenset[str] = frozenset()
    """NOW: the nodes on which the server can be placed. WAIT: those on which it could be if less ran there; empty where
    something else than nodes is short."""


@dataclass(frozen=True)
class Kept:
    """The nodes that are kept for spawns in the queue, as one of these spawns sees it."""

    for_others: frozenset[str] = frozenset()
    """Kept for spawns before it: its server must not go there."""
    own: str = ""
    """Kept for it; empty: none is."""


NOTHING_KEPT = Kept()


class OtherLayers(Protocol):
    """What other layers have, at one instant, less what this hub's spawns in flight will take."""

    def names(self, template: Template) -> tuple[LayerName, ...]:
        """Return the other layers that can serve a template, in the order in which they are tried; empty: none."""

    def native(self, template: Template) -> bool:
        """Return whether GPUs with an agent can serve a template."""

    def verdict(self, asked: AskedServer, kept: Kept = NOTHING_KEPT) -> LayerVerdict:
        """Return what a server meets."""

    def starts_by(self, asked: AskedServer, servers: int) -> float | None:
        """Return when so many such servers could have been placed if all announced stops happen: seconds since the
        epoch; None where nothing is known of it."""

    def least_used(self, nodes: Set[str]) -> str:
        """Return the node of at least one on which the hub's sessions have the smallest part of the GPUs."""

    @property
    def gpus(self) -> int:
        """The physical GPUs of other layers, as far as they are known."""
