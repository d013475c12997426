"""Environment variables of CUDA frameworks that a session with a share starts with, unless they are set already."""

from __future__ import annotations

from collections.abc import MutableMapping

FRAMEWORK_DEFAULTS = {
    # JAX reserves 75 % of the GPU when it starts
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    # TensorFlow reserves all of it
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}
"""Memory that a framework reserves in advance is memory that the session's other kernels cannot have."""


def choose_frameworks_defaults(environment: MutableMapping[str, str]) -> None:
    """Set the missing variables. A variable that is set keeps its value, even an empty one."""
    for name, value in FRAMEWORK_DEFAULTS.items():
        environment.setdefault(name, value)
