"""The MIG instances of a GPU, as NVML tells: which there are, and how large each is.

An instance here is a GPU instance with one compute instance, as `nvidia-smi mig -cgi ... -C` makes it. A GPU instance
that is split further is left out: its parts share memory. The agent makes no instances and destroys none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pynvml

from gpushare_spawner.model.layers.mig import MEMORY_SLICES, MigInstance, MigProfile

MARK = " MIG "
"""Stands in a MIG device's name between the GPU's name and that of the profile: "NVIDIA A100-SXM4-80GB MIG 1g.10gb"."""
OLD_UUID = "MIG-GPU-"
"""How the UUIDs of MIG devices begin that older drivers make of those of GPU and instance. (NVIDIA MIG user guide.)"""
MOST_COMPUTE_SLICES = 7
"""Of a GPU whose profiles the driver does not tell: an instance is then taken for smaller than it is, never larger."""
_MEBIBYTE = 2**20


@dataclass(frozen=True)
class FoundInstance:
    """One MIG instance."""

    uuid: str
    model: str
    memory_bytes: int
    instance: MigInstance


@dataclass(frozen=True)
class _Whole:
    """What all instances of a GPU divide."""

    slices: int
    memory_mib: int


def in_mig_mode(handle: Any) -> bool:
    """Return whether a GPU is in MIG mode; False for one that has none, and for a MIG device."""
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:
        return False
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def instances(handle: Any, gpu: str, model: str, memory_bytes: int) -> tuple[list[FoundInstance], list[str]]:
    """Return the instances of a GPU in MIG mode, and why some are left out, in sentences.

    ``gpu``: its UUID; ``memory_bytes``: of all of it.
    """
    found, skipped = [], []
    whole = _whole(handle, memory_bytes)
    for device in _devices(handle):
        try:
            uuid, name = str(pynvml.nvmlDeviceGetUUID(device)), str(pynvml.nvmlDeviceGetName(device))
            attributes = pynvml.nvmlDeviceGetAttributes(device)
            memory = int(pynvml.nvmlDeviceGetMemoryInfo(device).total)
        except pynvml.NVMLError as error:
            # it can be destroyed between two questions
            skipped.append(f"a MIG device of GPU {gpu} does not answer and is left out: {error}")
            continue
        if uuid.startswith(OLD_UUID):
            skipped.append(f"MIG device {uuid} is left out: it has a UUID of its own from driver 470 on")
            continue
        slices = int(attributes.gpuInstanceSliceCount)
        if int(attributes.computeInstanceSliceCount) < slices:
            skipped.append(f"MIG device {uuid} is left out: it shares the memory of its GPU instance with others")
            continue
        profile = _profile(name, slices, int(attributes.memorySizeMB), memory, whole)
        found.append(FoundInstance(uuid, f"{model}{MARK}{profile.name}", memory, MigInstance(gpu, model, profile)))
    return found, skipped


def _devices(handle: Any) -> Iterator[Any]:
    try:
        most = int(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle))
    except pynvml.NVMLError:
        return
    for index in range(most):
        # instances can have any of the indices
        try:
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except pynvml.NVMLError:
            continue


def _whole(handle: Any, memory_bytes: int) -> _Whole:
    """Return what the largest profile of the GPU has, which is all of it."""
    slices, memory_mib = 0, 0
    for number in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            found = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number)
        except pynvml.NVMLError:
            continue  # this GPU has no such profile
        slices, memory_mib = max(slices, int(found.sliceCount)), max(memory_mib, int(found.memorySizeMB))
    return _Whole(slices or MOST_COMPUTE_SLICES, memory_mib or memory_bytes // _MEBIBYTE)


def _profile(name: str, slices: int, memory_mib: int, memory_bytes: int, whole: _Whole) -> MigProfile:
    eighths = round(memory_mib * MEMORY_SLICES / max(1, whole.memory_mib))
    _, mark, own = name.partition(MARK)
    # "1g.10gb+me" is written "1g.10gb.me" on Kubernetes
    called = own.strip().replace("+", ".") if mark else f"{slices}g.{round(memory_mib / 1024)}gb"
    return MigProfile(
        name=called,
        slices=slices,
        compute_slices=whole.slices,
        memory_slices=max(1, min(MEMORY_SLICES, eighths)),
        memory_bytes=memory_bytes,
    )
