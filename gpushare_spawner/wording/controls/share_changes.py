"""Changes of a running session's share: what was done, and why one is refused."""

from __future__ import annotations

from collections.abc import Iterable

from gpushare_spawner.model.tier import Tier
from gpushare_spawner.wording.amounts import gpu_share, guarantee, memory, plural
from gpushare_spawner.wording.controls.session_controls import because

NO_FRACTION = "A share is a fraction of one GPU, from 0.01 to 1 in steps of 0.01, like 0.25."
WHOLE_GPUS = (
    "A share of several GPUs cannot be changed while the server runs. Restart the server with another template."
)
MAKES_WAY = "This session makes way for servers within their quota. Its share cannot be changed now."


def same(units: int) -> str:
    """Return that a session has this share already."""
    return f"The share is already {gpu_share(units)}."


def changed(before: int, units: int, borrowed: int, tier: Tier, memory_limit: int | None) -> str:
    """Return that a share was changed. ``borrowed``: units of the new share; ``memory_limit``: bytes, None: as before.

    Units are of 1 % of each of the session's GPUs.
    """
    said = f"The share is {gpu_share(units)} now (before: {gpu_share(before)})."
    if borrowed:
        owned = gpu_share(units - borrowed) if units > borrowed else ""
        said += f" Guaranteed: {guarantee(owned, gpu_share(units))}."
    if memory_limit is not None:
        said += f" The server's programs can allocate {memory(memory_limit)} of GPU memory."
    return said if tier is Tier.ACTIVE else f"{said} It is {tier}: some seconds of GPU time restore it."


def not_allowed(choices: Iterable[int]) -> str:
    """Return which shares a user may change to, in units of 1 %."""
    shares = [gpu_share(units) for units in sorted(set(choices))]
    if not shares:
        return "No template that you may use has another share of this kind of GPU. Ask the admin."
    listed = " or ".join([", ".join(shares[:-1]), shares[-1]]) if len(shares) > 1 else shares[0]
    return f"You can change this share to {listed}, as your templates say. Ask the admin for another share."


def too_many(title: str, most: int) -> str:
    """Return that a user has as many servers with a template's share as the template allows."""
    return f"You can have {plural(most, 'server')} with the share of {title} at a time. Stop one first."


def no_capacity(more: int, template: str | None) -> str:
    """Return that a session's GPU has not enough free units. ``template``: the title of one with the wanted share."""
    return f"The session's GPU does not have {gpu_share(more)} more free now. Try again later{_or_queue(template)}"


def others_wait(spawns: int, template: str | None) -> str:
    """Return that spawns wait, which get free units first."""
    waiting = f"{plural(spawns, 'server')} {'waits' if spawns == 1 else 'wait'}"
    return f"{waiting} for this kind of GPU, and free units go to the queue first. Try again later{_or_queue(template)}"


def changed_by(actor: str, before: int, units: int, reason: str = "") -> str:
    """Return who changed a share, and why. ``reason``: what the actor says; empty: nothing."""
    return f"{actor} changed the share from {gpu_share(before)} to {gpu_share(units)}{because(reason)}"


def _or_queue(template: str | None) -> str:
    if template is None:
        return "."
    return f", or restart the server with {template}: then it waits in the queue, and its kernels end."
