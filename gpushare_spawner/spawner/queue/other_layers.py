"""GPUs that other sharing layers than ours give out, as the queue and the form's cards look at them.

No agent reports these GPUs and no ledger has them: the scheduler of their layer places servers. The hub keeps a spawn
in the queue until, by what the layer publishes, its server can start.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from gpushare_spawner.model.layers import LayerName
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
class LayerOffer:
    """Nodes whose GPUs one layer shares in one way."""

    layer: LayerName
    request: LayerRequest
    """What the layer is asked for, on these nodes."""


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


class OtherLayers(Protocol):
    """What other layers have, at one instant, less what this hub's spawns in flight will take."""

    def names(self, template: Template) -> tuple[LayerName, ...]:
        """Return the other layers that can serve a template, in the order in which they are tried; empty: none."""

    def native(self, template: Template) -> bool:
        """Return whether GPUs with an agent can serve a template."""

    def verdict(self, template: Template, tenant: Tenant, node: str, ineligible: frozenset[str]) -> LayerVerdict:
        """Return what a server meets. ``node``: the only one that will do, empty: any; ``ineligible``: nodes that
        cannot take it whatever is free there."""

    @property
    def gpus(self) -> int:
        """The physical GPUs of other layers, as far as they are known."""
