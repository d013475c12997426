"""Where a share lies."""

from __future__ import annotations

from dataclasses import dataclass

from gpushare_spawner.model.layers import LayerName


@dataclass(frozen=True)
class Placement:
    """The GPUs that a share was given.

    ``borrowed`` is the number of the share's units (of 1 %, per GPU) that idle neighbours have lent: they go back
    first
    when the owner returns.
    """

    node: str
    gpus: tuple[str, ...]
    """UUIDs, as NVML writes them."""
    borrowed: int = 0
    layer: LayerName = LayerName.NATIVE
    """The sharing layer of the GPUs."""
