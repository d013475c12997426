"""Where a share lies.

How device memory of a session leaves the GPU: the memory engine of its template.

Environment variables of CUDA frameworks that a session with a share starts with, unless they are set already.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from enum import StrEnum

from gpushare_spawner.model.layers import LayerName


@dataclass(frozen=True)
class Placement:
    """The node and GPUs of a share.

    ``borrowed``: units of the share (of 1 %, on each GPU) that idle sessions have lent. Their owners reclaim them when
    they work again.
    """

    node: str
    gpus: tuple[str, ...]
    """UUIDs, in NVML's form."""
    borrowed: int = 0
    layer: LayerName = LayerName.NATIVE
    """The sharing layer of the GPUs."""


ENGINE_VARIABLE = "GPUSHARE_ENGINE"
"""The variable that tells libgpushare.so the engine."""


OBSERVES = {ENGINE_VARIABLE: "observe"}
"""The variable's value if another layer shares the GPU: the library only reports GPU work."""


class MemoryEngine(StrEnum):
    """How sessions together can allocate more memory than the GPU has."""

    MANAGED = "managed"
    """Device memory becomes CUDA managed memory. Its pages move one by one, while the session works too."""
    SUSPEND = "suspend"
    """Device memory stays as the program allocates it. The driver moves all memory of a session at once, with its CUDA
    contexts, while the session is suspended."""


def engine_environment(engine: MemoryEngine) -> dict[str, str]:
    """Return the variables that tell libgpushare.so the engine; none for `managed`, its default."""
    return {} if engine is MemoryEngine.MANAGED else {ENGINE_VARIABLE: engine.value}


FRAMEWORK_DEFAULTS = {
    # JAX reserves 75 % of the GPU when it starts
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    # TensorFlow reserves all of it
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}
"""Other kernels of the session cannot use memory that a framework reserves in advance."""


def choose_frameworks_defaults(environment: MutableMapping[str, str]) -> None:
    """Set the missing variables. A variable that is set keeps its value, even if it is empty."""
    for name, value in FRAMEWORK_DEFAULTS.items():
        environment.setdefault(name, value)
