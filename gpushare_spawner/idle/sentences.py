"""What users are told about a step. Each sentence holds before and after it, and says what is lost and what is not."""

from __future__ import annotations

from gpushare_spawner.model.quantity import format_seconds
from gpushare_spawner.model.share import UNITS_PER_GPU, Share


def downgrade(share: Share, units: int, after: float) -> str:
    """``units`` of 1 % are left on each GPU after ``after`` seconds."""
    left = f"{units / UNITS_PER_GPU:.2f} GPU" + (f" on each of its {share.count} GPUs" if share.count > 1 else "")
    return (
        f"After {format_seconds(after)} without GPU work this server's share shrinks from {share} to {left}. "
        "Kernels and their data stay; the next GPU work brings the whole share back."
    )


def release(share: Share, after: float) -> str:
    """Nothing is left after ``after`` seconds."""
    return (
        f"After {format_seconds(after)} without GPU work this server's share of {share} is lent to others. "
        "Kernels and their data stay; the next GPU work brings the share back."
    )


def stop(after: float) -> str:
    """The server goes after ``after`` seconds."""
    return (
        f"After {format_seconds(after)} without GPU work, busy kernels or other activity this server is stopped. "
        "Files stay; variables in kernels are lost. Any activity keeps it running."
    )


def too_old(age: float) -> str:
    """The server goes because it is ``age`` seconds old, busy or not."""
    return (
        f"Servers run for {format_seconds(age)} at most, busy or not, and then are stopped. "
        "Files stay; variables in kernels are lost."
    )
