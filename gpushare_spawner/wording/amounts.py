"""Amounts as people read them: GPU shares, memory, durations, instants.

What admins write ("4Gi", "15m") is read in `model.quantity`.
"""

from __future__ import annotations

import re
from datetime import datetime

from gpushare_spawner.model.share import UNITS_PER_GPU

GIB = 2**30


def clock(at: float) -> str:
    """Return an instant (seconds since the epoch) as local time: 14:05."""
    return datetime.fromtimestamp(at).strftime("%H:%M")


def gpu_share(units: int, gpus: int = 1) -> str:
    """Return units of 1 % on each of some GPUs as a share: 25 -> "0.25 GPU"; 100 on each of 2 -> "2 GPUs"."""
    count = units * gpus / UNITS_PER_GPU
    if count == round(count):
        return f"{count:.0f} GPU" if count <= 1 else f"{count:.0f} GPUs"
    return f"{count:.2f} GPU"


def memory(size: int) -> str:
    """Return bytes in the unit that is easiest to read: "3.1 GiB", "256 MiB"; 0 is "0 GiB"."""
    if size == 0:
        return "0 GiB"
    if size < GIB:
        return f"{max(round(size / 2**20), 1)} MiB"
    return f"{size / GIB:.1f}".removesuffix(".0") + " GiB"


def memory_of(size: int, total: int) -> str:
    """Return a part of a total, both in bytes: "3.1 of 16 GiB", "256 MiB of 16 GiB"."""
    part, whole = memory(size), memory(total)
    number, unit = part.split(" ")
    return f"{number} of {whole}" if whole.endswith(unit) else f"{part} of {whole}"


def duration(seconds: float) -> str:
    """Return seconds in at most two units: 75 -> "1 min", 4000 -> "1 h 6 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    hours, minutes = divmod(minutes, 60)
    return " ".join([f"{hours} h"] * bool(hours) + [f"{minutes} min"] * bool(minutes or not hours))


def unbroken(text: str) -> str:
    """Return the text with no-break spaces between numbers and their units, for pages that break lines."""
    return re.sub(r"(?<=\d) (?=(?:[KMGT]iB|min|h|s|%|GPUs?)\b|%)", "\u00a0", text)


def plural(count: int, one: str, more: str | None = None) -> str:
    """Return a number with its noun: 1 -> "1 session", 2 -> "2 sessions"."""
    return f"{count} {one if count == 1 else more or one + 's'}"
