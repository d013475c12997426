"""What a template promises, in sentences for its card."""

from __future__ import annotations

import re
from collections.abc import Callable

from gpushare_spawner.model.quantity import format_bytes, format_seconds, resolve_bytes
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.model.template import Gpu, Idle, Resources, Template
from gpushare_spawner.model.tier import Tier


def tight(text: str) -> str:
    """Numbers stay with their units when a line is broken."""
    return re.sub(r"(?<=\d) (?=(?:[KMGT]iB|min|h|s|%|GPUs?)\b|%)", "\u00a0", text)


def guaranteed(gpu: Gpu, memory_bytes: int | None) -> str:
    """What a session has whatever the neighbours do. ``memory_bytes``: of the smallest GPU that would do, if known."""
    share = gpu.share
    if share.units < UNITS_PER_GPU:
        return (
            f"{share.units} % of one GPU's time and {_memory(gpu.memory.guarantee or f'{share.units}%', memory_bytes)}"
        )
    whole = "one whole GPU" if share.count == 1 else f"{share.count} whole GPUs"
    return f"{whole}, with {_memory(gpu.memory.guarantee or '100%', memory_bytes)}{' each' * (share.count > 1)}"


def burst(gpu: Gpu, memory_bytes: int | None) -> str:
    """What it may use beyond that; nothing where all is guaranteed."""
    if gpu.share.units < UNITS_PER_GPU:
        return f"all of its time while neighbours are quiet, and {_memory(gpu.memory.limit, memory_bytes)}"
    return "" if gpu.memory.limit == "100%" else _memory(gpu.memory.limit, memory_bytes)


def _memory(written: str, memory_bytes: int | None) -> str:
    if memory_bytes is not None:
        return f"{format_bytes(resolve_bytes(written, memory_bytes))} of memory"
    if written == "100%":
        return "all of its memory"
    return f"{written[:-1].strip()} % of its memory" if written.endswith("%") else f"{written} of memory"


def idle_steps(template: Template) -> list[str]:
    """What happens to an idle session, step by step."""
    idle: Idle = template.idle
    steps = []
    share = template.share
    if idle.downgrade_after is not None and share is not None:
        smaller = idle.units(Tier.DOWNGRADED, share) / UNITS_PER_GPU
        steps.append(f"after {format_seconds(idle.downgrade_after)} the share shrinks to {smaller:.2f} GPU")
    if idle.release_after is not None:
        steps.append(f"after {format_seconds(idle.release_after)} the whole share is lent to others")
    if idle.stop_after is not None:
        steps.append(f"after {format_seconds(idle.stop_after)} the server stops")
    return steps


def gives_back(template: Template) -> bool:
    """Whether an idle share is taken, and so given back later."""
    return template.idle.downgrade_after is not None or template.idle.release_after is not None


def machine(resources: Resources) -> str:
    """CPU and memory beside the GPU."""
    cpu, memory = resources.cpu, resources.memory
    parts = [
        _between(cpu.guarantee, cpu.limit, lambda cores: f"{cores:g}", "CPU cores"),
        _between(memory.guarantee, memory.limit, format_bytes, "memory"),
    ]
    return " · ".join(part for part in parts if part)


def _between(guarantee: float | None, limit: float | None, shown: Callable[[float], str], unit: str) -> str:
    if limit is None:
        return f"{shown(guarantee)} {unit}" if guarantee is not None else ""
    if guarantee is None:
        return f"up to {shown(limit)} {unit}"
    return f"{shown(guarantee)} {unit}" if guarantee == limit else f"{shown(guarantee)} to {shown(limit)} {unit}"
