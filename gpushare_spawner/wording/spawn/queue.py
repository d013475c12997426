"""The queue of spawns in words, for the login form's cards and for the page of a spawn that waits or is placed."""

from __future__ import annotations

from collections.abc import Sequence

from gpushare_spawner.model.share import Share
from gpushare_spawner.wording.amounts import duration, gpu_share, guarantee

STARTS_NOW = "Starts now"
STARTS_ON_LENT = "Starts now on lent units"
LENT_DETAIL = (
    "Idle sessions lend these units. When those sessions work again, they reclaim the units, and this share gets "
    "what is left."
)
UNKNOWN = "Unknown"
UNKNOWN_DETAIL = "Free capacity is unknown at the moment."
UNKNOWN_AFTER_ERROR = (
    "Free capacity is unknown because of an internal error; the hub's log has the details. "
    "You can start a server anyway."
)
NO_SUITABLE_GPU = "No suitable GPU"
NO_SUITABLE_NODE = "No suitable node"
WAIT_UNKNOWN = "Estimated wait: unknown."
EARLIER_FIRST = "Earlier spawns are placed first."


def too_large(where: str) -> str:
    """Return that a template can never start at `where`, like "this machine"."""
    return f"Too large for {where}"


def waiting(ahead: int, share: Share, hint: str, minutes: int | None, elsewhere: bool = False) -> str:
    """Return what the page of a waiting spawn says: its position, what it waits for, and when the wait ends.

    ``hint``: why it waits, as a sentence, or empty. ``minutes``: the estimate; None: there is none. ``elsewhere``: only
    other sharing layers can serve it. The text has ``{time}`` in it, for the instant at which the wait ends.
    """
    # most hints name the share: once is enough
    what = "" if str(share) in hint else f", waiting for {share}"
    said = [
        f"{position(ahead)}{what}.",
        hint,
        f"{estimated_wait(minutes)}." if minutes is not None else WAIT_UNKNOWN if elsewhere else "",
        cancelled_unless_started("{time}"),
    ]
    return " ".join(part for part in said if part)


def estimated_wait(minutes: int) -> str:
    """Return an estimate of the wait, without a full stop."""
    return f"Estimated wait: about {duration(minutes * 60)}"


def cancelled_unless_started(time: str) -> str:
    """Return when a spawn that waits is cancelled."""
    return f"If the server cannot start by {time}, the spawn is cancelled."


def template(title: str) -> str:
    """Return which template is started. ``title``: its display name."""
    return f"Template: {title}."


def suitable(gpus: str) -> str:
    """Return the GPUs that a spawn can be placed on, see `cards.gpu_models`; empty where none is known."""
    return f"Suitable GPUs: {gpus}." if gpus else ""


def instead(startable: Sequence[str]) -> str:
    """Return which templates, by their display names, would start now while a spawn waits; empty for none."""
    if not startable:
        return ""
    if len(startable) == 1:
        return f"{startable[0]} would start now. To start it instead, cancel this spawn."
    return f"These templates would start now: {', '.join(startable)}. To start one of them instead, cancel this spawn."


def placed_on(gpus: Sequence[tuple[int, str]], node: str) -> str:
    """Return GPUs, each by its index and model, and the node, if it has a name: "GPU 0 (NVIDIA L4) of node-a"."""
    return " and ".join(f"GPU {index} ({model})" for index, model in gpus) + (f" of {node}" if node else "")


def placed(where: str, share: Share, borrowed: int) -> str:
    """Return that a spawn has its place. ``where``: see `placed_on`; ``borrowed``: units of 1 % of each GPU."""
    if borrowed <= 0:
        return f"Placed on {where}."
    owned = share.units - borrowed
    terms = guarantee(gpu_share(owned, share.count) if owned > 0 else "", gpu_share(share.units, share.count))
    lent = f"idle sessions lend {borrowed} % of each GPU and reclaim it when they work again"
    return f"Placed on {where}; {lent}. Guaranteed: {terms}."


def position(ahead: int) -> str:
    """Return the position in the queue of a spawn with so many spawns ahead of it."""
    return "First in queue" if ahead == 0 else f"Position {ahead + 1} in queue"
