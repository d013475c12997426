"""What the driver says about the session's GPUs, as far as NVML is here and answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

NVML_VARIABLE = "GPUSHARE_NVML"
"""Whether NVML shows the share, see docs/reference/library.md."""


@dataclass(frozen=True)
class GpuFigures:
    """One GPU, with the work of all sessions on it; None: the driver does not say."""

    name: str = ""
    utilisation: float | None = None
    """Part of the last sample period in which the GPU computed, from 0 to 1."""
    temperature_celsius: float | None = None
    power_watts: float | None = None
    uuid: str = ""
    """As the driver writes it: that of a MIG instance begins with MIG-."""


@dataclass(frozen=True)
class DriverFigures:
    """The driver, and its GPUs by UUID."""

    driver_version: str = ""
    cuda_version: str = ""
    gpus: Mapping[str, GpuFigures] = field(default_factory=dict)


def driver_figures(uuids: Iterable[str]) -> DriverFigures:
    """Ask NVML about these GPUs. Raises nothing: without a driver all figures are unknown."""
    # not at the top: a command that does not need it starts sooner
    import pynvml

    def said(ask: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return ask(*arguments)
        except pynvml.NVMLError:
            return None

    def of_gpu(uuid: str) -> GpuFigures:
        handle = said(pynvml.nvmlDeviceGetHandleByUUID, uuid)
        if handle is None:
            # a frame has the 16 bytes of a UUID alone, without what it begins with
            uuid = f"MIG-{uuid.removeprefix('GPU-')}"
            handle = said(pynvml.nvmlDeviceGetHandleByUUID, uuid)
        if handle is None:
            return GpuFigures()
        rates = said(pynvml.nvmlDeviceGetUtilizationRates, handle)
        milliwatts = said(pynvml.nvmlDeviceGetPowerUsage, handle)
        return GpuFigures(
            name=said(pynvml.nvmlDeviceGetName, handle) or "",
            uuid=uuid,
            utilisation=None if rates is None else min(1.0, rates.gpu / 100),
            temperature_celsius=said(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
            power_watts=None if milliwatts is None else milliwatts / 1000,
        )

    try:
        with _of_the_whole_gpu():
            pynvml.nvmlInit()
    except pynvml.NVMLError:
        return DriverFigures()
    try:
        number = said(pynvml.nvmlSystemGetCudaDriverVersion_v2)
        return DriverFigures(
            driver_version=said(pynvml.nvmlSystemGetDriverVersion) or "",
            # NVML's number is 1000 times the major version and 10 times the minor one
            cuda_version="" if number is None else f"{number // 1000}.{number % 1000 // 10}",
            gpus={uuid: of_gpu(uuid) for uuid in uuids},
        )
    finally:
        said(pynvml.nvmlShutdown)


@contextmanager
def _of_the_whole_gpu() -> Iterator[None]:
    """Have NVML show the whole GPU rather than the share: libgpushare.so reads the setting when NVML is first used."""
    before = os.environ.get(NVML_VARIABLE)
    os.environ[NVML_VARIABLE] = "driver"
    try:
        yield
    finally:
        del os.environ[NVML_VARIABLE]
        if before is not None:
            os.environ[NVML_VARIABLE] = before
