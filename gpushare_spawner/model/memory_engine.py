"""How device memory of a session leaves the GPU: the memory engine of its template."""

from __future__ import annotations

from enum import StrEnum

ENGINE_VARIABLE = "GPUSHARE_ENGINE"
"""By which libgpushare.so knows the engine."""
OBSERVES = {ENGINE_VARIABLE: "observe"}
"""The variable where another layer shares the GPU: the library only reports GPU work."""


class MemoryEngine(StrEnum):
    """How sessions together can allocate more memory than the GPU has."""

    MANAGED = "managed"
    """Device memory becomes CUDA managed memory. Its pages move one by one, while the session works too."""
    SUSPEND = "suspend"
    """Device memory stays as the program allocates it. The driver moves all memory of a session at once, with its CUDA
    contexts, while the session is suspended."""


def engine_environment(engine: MemoryEngine) -> dict[str, str]:
    """Return the variables by which libgpushare.so knows the engine; none for `managed`, its default."""
    return {} if engine is MemoryEngine.MANAGED else {ENGINE_VARIABLE: engine.value}
