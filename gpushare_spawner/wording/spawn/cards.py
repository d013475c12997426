"""What a template promises, in short phrases for its card on the login form, and why free capacity is unknown."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from gpushare_spawner.model.layers import LAYERS, IdleReach, LayerName
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.share import UNITS_PER_GPU, Share
from gpushare_spawner.model.template import Gpu, Idle, Resources, Template
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.wording.amounts import duration, gpu_share, guarantee, memory

AGENT_SILENT = "the GPU agent of this machine does not answer"
CLUSTER_UNREADABLE = "the hub cannot read the cluster's GPUs and pods"
"""Why free capacity is unknown, as half a sentence for the form."""


def guaranteed(gpu: Gpu, memory_bytes: int | None, borrowed: int = 0) -> str:
    """Return what a session has while others work. ``memory_bytes``: of the smallest suitable GPU; None: unknown.

    ``borrowed``: units of each GPU that idle sessions would lend to it. Their owners have them guaranteed, and the
    memory that belongs to them.
    """
    share = gpu.share
    full = _whole_gpus(gpu, memory_bytes) if share.units == UNITS_PER_GPU else _part(gpu, share.units, memory_bytes)
    if borrowed <= 0:
        return full
    owned = share.units - borrowed
    return guarantee(_part(gpu, owned, memory_bytes) if owned > 0 else "", full)


def _part(gpu: Gpu, units: int, memory_bytes: int | None) -> str:
    written = gpu.memory.guarantee if units == gpu.share.units and gpu.memory.guarantee else f"{units}%"
    gpus, each = ("one GPU's time", "") if gpu.share.count == 1 else (f"the time of {gpu.share.count} GPUs", " each")
    return f"{units} % of {gpus} and {_memory(written, memory_bytes)}{each}"


def _whole_gpus(gpu: Gpu, memory_bytes: int | None) -> str:
    share = gpu.share
    whole = "one whole GPU" if share.count == 1 else f"{share.count} whole GPUs"
    return f"{whole}, with {_memory(gpu.memory.guarantee or '100%', memory_bytes)}{' each' * (share.count > 1)}"


def maximum(gpu: Gpu, memory_bytes: int | None) -> str:
    """Return what a session can use at most; empty where all of it is guaranteed."""
    if gpu.share.units < UNITS_PER_GPU:
        return f"100 % of one GPU's time while others are idle, and {_memory(gpu.memory.limit, memory_bytes)}"
    return "" if gpu.memory.limit == "100%" else _memory(gpu.memory.limit, memory_bytes)


def _memory(written: str, memory_bytes: int | None) -> str:
    if memory_bytes is not None:
        return f"{memory(resolve_bytes(written, memory_bytes))} of memory"
    if written == "100%":
        return "all of its memory"
    return f"{written[:-1].strip()} % of its memory" if written.endswith("%") else f"{written} of memory"


_WHOLE_REACH = LAYERS[LayerName.NATIVE].reach


def idle_actions(template: Template, reach: Collection[IdleReach] = _WHOLE_REACH) -> list[str]:
    """Return what happens to an idle session, one phrase for each action; empty: nothing.

    ``reach``: what the sharing layer of its GPU can do to it.
    """
    idle: Idle = template.idle
    if idle.dry_run:
        return []
    actions = []
    share = template.share
    waits = " if a spawn waits for it" if idle.when == "pressure" else ""
    if idle.downgrade_after is not None and share is not None and IdleReach.DOWNGRADE in reach:
        smaller = gpu_share(idle.units(Tier.DOWNGRADED, share))
        actions.append(f"after {duration(idle.downgrade_after)}, downgraded to {smaller}{waits}")
    if idle.release_after is not None and IdleReach.RELEASE in reach:
        actions.append(f"after {duration(idle.release_after)}, released and lent{waits}")
    if idle.stop_after is not None:
        actions.append(f"after {duration(idle.stop_after)}, the server is stopped")
    return actions


def takes_idle_share(template: Template, reach: Collection[IdleReach] = _WHOLE_REACH) -> bool:
    """Return whether an idle session loses units, and gets them back when it uses the GPU. ``reach``: see
    `idle_actions`."""
    idle = template.idle
    downgraded = idle.downgrade_after is not None and IdleReach.DOWNGRADE in reach
    released = idle.release_after is not None and IdleReach.RELEASE in reach
    return not idle.dry_run and (downgraded or released)


def machine(resources: Resources) -> str:
    """Return CPU and memory of the server, beside the GPU."""
    cpu, host = resources.cpu, resources.memory
    parts = [
        _between(cpu.guarantee, cpu.limit, lambda cores: f"{cores:g}", "CPU cores"),
        _between(host.guarantee, host.limit, memory, "memory"),
    ]
    return " · ".join(part for part in parts if part)


def _between(guarantee: float | None, limit: float | None, shown: Callable[[float], str], unit: str) -> str:
    if limit is None:
        return f"{shown(guarantee)} {unit}" if guarantee is not None else ""
    if guarantee is None:
        return f"up to {shown(limit)} {unit}"
    return f"{shown(guarantee)} {unit}" if guarantee == limit else f"{shown(guarantee)} to {shown(limit)} {unit}"


def gpu_models(share: Share, found: Mapping[str, int]) -> str:
    """Return which GPUs the share is placed on: "1 of 2 × NVIDIA L4". ``found``: suitable GPUs here, by model."""
    return ", ".join(
        f"{share.count} of {count} × {model}" if count > share.count else model for model, count in found.items()
    )
