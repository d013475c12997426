"""What a template promises, in sentences for its card."""

from __future__ import annotations

from collections.abc import Callable

from gpushare_spawner.model.quantity import format_bytes, format_seconds, resolve_bytes
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.model.template import Gpu, Idle, Range, Resources, Template
from gpushare_spawner.model.tier import Tier


def guaranteed(gpu: Gpu, memory_bytes: int | None) -> str:
    """What a session has whatever the neighbours do. ``memory_bytes``: of the smallest GPU that would do, if known."""
    share = gpu.share
    if share.units == UNITS_PER_GPU:
        return "One whole GPU" if share.count == 1 else f"{share.count} whole GPUs"
    return f"{share.units} % of one GPU's time and {_guaranteed_memory(gpu, memory_bytes)} of its memory"


def _guaranteed_memory(gpu: Gpu, memory_bytes: int | None) -> str:
    written = gpu.memory.guarantee or f"{gpu.share.units}%"
    if memory_bytes is None:
        return written.replace("%", " %")
    return format_bytes(resolve_bytes(written, memory_bytes))


def burst(gpu: Gpu, memory_bytes: int | None) -> str:
    """What it may use beyond that."""
    if gpu.share.units == UNITS_PER_GPU:
        time = "all of its time, always" if gpu.share.count == 1 else "all of their time, always"
    else:
        time = "all of its time while neighbours are quiet"
    limit = gpu.memory.limit
    shown = (
        limit.replace("%", " % of the GPU's memory")
        if memory_bytes is None
        else format_bytes(resolve_bytes(limit, memory_bytes))
    )
    return f"{time}, and {shown} of memory".replace("memory of memory", "memory")


def memory_note(gpu: Gpu) -> str:
    """What happens when the memory of the GPU is not enough for everybody."""
    if not gpu.memory.oversubscribe:
        return ""
    return "What does not fit on the GPU waits in the machine's memory: slower, but never lost."


def idle_steps(template: Template) -> list[str]:
    """What happens to an idle session, step by step."""
    idle: Idle = template.idle
    steps = []
    share = template.share
    if idle.downgrade_after is not None and share is not None:
        smaller = idle.units(Tier.DOWNGRADED, share) / UNITS_PER_GPU
        steps.append(f"after {format_seconds(idle.downgrade_after)} the share shrinks to {smaller:.2f} GPU")
    if idle.release_after is not None:
        steps.append(f"after {format_seconds(idle.release_after)} it is given away")
    if idle.stop_after is not None:
        steps.append(f"after {format_seconds(idle.stop_after)} the server stops")
    return steps


def idle_comfort(template: Template) -> str:
    """What the person need not fear."""
    idle = template.idle
    if idle.downgrade_after is None and idle.release_after is None:
        return ""
    return "Your kernel keeps running all the while, and your next cell on the GPU brings the whole share back."


def machine(resources: Resources) -> str:
    """CPU and memory beside the GPU."""
    parts = [
        _range(resources.cpu, lambda value: f"{value:g}", "CPU cores", "CPU core"),
        _range(resources.memory, format_bytes, "memory", "memory"),
    ]
    return " · ".join(part for part in parts if part)


def _range(amounts: Range, shown: Callable[[float], str], unit: str, one: str) -> str:
    guarantee, limit = getattr(amounts, "guarantee", None), getattr(amounts, "limit", None)
    if guarantee is None and limit is None:
        return ""
    if guarantee is None:
        return f"up to {shown(limit)} {one if limit == 1 else unit}"
    if limit is None or limit == guarantee:
        return f"{shown(guarantee)} {one if guarantee == 1 else unit}"
    return f"{shown(guarantee)} to {shown(limit)} {unit}"
