"""MIG profiles on Kubernetes: how much of its GPU each one is.

What is read, and where: on one machine the agent reads all sizes from NVML (`agent.gpus.mig_instances`), and nothing
here is used. On Kubernetes a profile's name tells its compute slices; its memory, and that of the GPU, stand in labels
of NVIDIA's GPU feature discovery, or in ResourceSlices; where they do not, the name counts. How many compute slices the
whole GPU has is said nowhere but by a profile with all of the GPU's memory, which ResourceSlices have where the driver
makes MIG devices itself. No label has it: hence the table by GPU model.
(NVIDIA MIG user guide, "Partitioning"; go-nvlib pkg/nvlib/device/mig_profile.go; k8s-device-plugin internal/lm.)
"""

from __future__ import annotations

import re
from fractions import Fraction

from gpushare_spawner.model.layers.mig import MEMORY_SLICES, MigProfile

_PROFILE = re.compile(r"(?P<slices>[1-7])g\.(?P<gb>[1-9]\d*)gb(?P<suffix>[.+-][a-z0-9.+-]+)?")
_COMPUTE_SLICES = {"A30": 4, "RTX PRO 6000": 4, "RTX PRO 4500": 2}
"""Compute slices by a part of the GPU model's name, where they are not 7. (NVIDIA MIG user guide, "Supported MIG
Profiles"; NVIDIA AI Enterprise, "Blackwell Architecture vGPU Types".) Of a model with fewer that is not here a profile
seems smaller than it is, never larger."""
_MOST_COMPUTE_SLICES = 7
_LEAST_OF_NAME = Fraction(7, 8)
"""A profile has less memory than its name says: 1g.18gb of an H200 has 16 GiB. (NVIDIA MIG user guide.)"""


def profile(
    name: str, model: str, gpu_memory_bytes: int | None, memory_bytes: int | None = None, of_slices: int | None = None
) -> MigProfile | None:
    """Return the profile of that name on a GPU model; None for one that is no isolated part of a GPU.

    ``gpu_memory_bytes``: of the whole GPU; None: it is taken to be so large that the profile is as small a part of it
    as a profile of that name can be. ``memory_bytes``: what a node's label says of the profile; None: its name counts.
    ``of_slices``: compute slices of the whole GPU; None: they are not known, and the model's name counts.
    """
    found = _PROFILE.fullmatch(name)
    if found is None:
        # "1c.3g.20gb" is a part of an instance, and shares its memory with other parts
        return None
    slices, gigabytes = int(found["slices"]), int(found["gb"])
    whole = gpu_memory_bytes if gpu_memory_bytes is not None else _whole_memory(slices, gigabytes)
    own = memory_bytes if memory_bytes is not None else int(gigabytes * 2**30 * _LEAST_OF_NAME)
    eighths = Fraction((memory_bytes if memory_bytes is not None else gigabytes * 2**30) * MEMORY_SLICES, whole)
    of_slices = of_slices if of_slices is not None else compute_slices(model)
    return MigProfile(name, slices, of_slices, max(1, min(MEMORY_SLICES, round(eighths))), own)


def slices_of(name: str) -> int | None:
    """Return the compute slices that a profile's name tells; None for other names."""
    found = _PROFILE.fullmatch(name)
    return int(found["slices"]) if found is not None else None


def is_whole(memory_bytes: int | None, gpu_memory_bytes: int | None) -> bool:
    """Return whether a MIG device is all of its GPU, by the memory of both; None: not known."""
    if memory_bytes is None or gpu_memory_bytes is None:
        return False
    return memory_bytes >= gpu_memory_bytes * _LEAST_OF_NAME


def compute_slices(model: str) -> int:
    """Return the compute slices of a GPU model."""
    plain = model.upper().replace("-", " ")
    return next((slices for part, slices in _COMPUTE_SLICES.items() if part in plain), _MOST_COMPUTE_SLICES)


def _whole_memory(slices: int, gigabytes: int) -> int:
    """Return the memory of a GPU of which only one profile's name is known, in bytes.

    Profiles with 1, 2, 3, 4 and 7 compute slices have 1, 2, 4, 4 and 8 memory slices, or more.
    """
    usual = {1: 1, 2: 2, 3: 4, 4: 4}.get(slices, MEMORY_SLICES)
    return gigabytes * 2**30 * MEMORY_SLICES // usual
