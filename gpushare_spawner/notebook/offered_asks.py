"""What JupyterLab offers to ask of the service, and why not more. The service decides on what is asked."""

from __future__ import annotations

from gpushare_spawner.model.idle_cause import IdleCause
from gpushare_spawner.model.layers import LAYERS, IdleReach, LayerName
from gpushare_spawner.model.share_status import ControlsStatus, ShareStatus
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.wording.controls.session_controls import out_of_reach
from gpushare_spawner.wording.layers import NO_AGENT, other_layer


def offered_asks(status: ShareStatus) -> list[str]:
    """Return what the user can ask of the service, by the names in POST gpushare/ask."""
    layer = other_layer(status.layer)
    reach = (layer or LAYERS[LayerName.NATIVE]).reach
    decided = status.controls or ControlsStatus()
    if not status.takes_asks:
        return []
    return [
        "keep",
        "end-keep",
        *["release"] * (IdleReach.RELEASE in reach),
        *["share"] * (IdleReach.RESIZE in reach and decided.largest_share_units > 0),
        "stop",
    ]


def missing_asks(status: ShareStatus) -> str:
    """Return why the user cannot ask for everything; empty: the user can, or nothing more is known of it."""
    layer = other_layer(status.layer)
    if layer is None:
        return ""
    if not status.takes_asks:
        return NO_AGENT
    return out_of_reach(layer) if not layer.reach.issuperset(IdleReach) else ""


def notice_asks(status: ShareStatus) -> list[str]:
    """Return what the user may ask for instead of the announced idle action: a keep, a release at once.

    A keep holds neither against the greatest age nor against spawns in quota.
    """
    action = status.announced
    if action is None or action.cause is not IdleCause.IDLE:
        return []
    useful = {"keep"} if action.tier is Tier.STOPPED else {"keep", "release"}
    return [name for name in offered_asks(status) if name in useful]
