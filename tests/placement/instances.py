"""MIG instances made up for tests, by the profiles of the MIG user guide."""

from __future__ import annotations

from gpushare_spawner.model.layers_file import MigInstance, MigProfile
from gpushare_spawner.model.report import GpuReport

A100 = "NVIDIA A100-SXM4-80GB"
GIB = 2**30
PROFILES = {
    name: MigProfile(name, slices, 7, eighths, round(eighths * 9.5 * GIB))
    for name, slices, eighths in (
        ("1g.10gb", 1, 1),
        ("1g.20gb", 1, 2),
        ("2g.20gb", 2, 2),
        ("3g.40gb", 3, 4),
        ("4g.40gb", 4, 4),
        ("7g.80gb", 7, 8),
    )
}


def instance(uuid: str, profile: str, gpu: str = "GPU-a", index: int = 0, healthy: bool = True) -> GpuReport:
    """An instance of an A100, as an agent reports it."""
    found = PROFILES[profile]
    return GpuReport(
        index=index,
        uuid=uuid,
        model=f"{A100} MIG {profile}",
        memory_bytes=found.memory_bytes,
        capacity_units=found.units,
        healthy=healthy,
        mig=MigInstance(gpu, A100, found),
    )
