"""``gpushare smi``: shows the share in the server's terminal like nvidia-smi, as if it were a separate GPU.

Memory figures are as CUDA and NVML report them to the session's programs: the memory of all its processes, with its
limit as the total. `driver_figures` adds NVML's figures for the session's GPUs, if NVML is available.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import SQUARE
from rich.console import Console
from rich.table import Table

from gpushare_spawner.model.share_status import GpuStatus, ProcessMemory, ShareStatus
from gpushare_spawner.notebook.client import ask
from gpushare_spawner.wording.amounts import gpu_share, memory, plural
from gpushare_spawner.wording.layers import other_layer
from gpushare_spawner.wording.share_status import page

NVML_VARIABLE = "GPUSHARE_NVML"
"""Variable that decides whether NVML shows the share, see docs/reference/library.md."""


@dataclass(frozen=True)
class GpuFigures:
    """Figures of one GPU, including the work of all sessions on it; None if the driver has no figure."""

    name: str = ""
    utilisation: float | None = None
    """Fraction of the last sample period in which the GPU computed, from 0 to 1."""
    temperature_celsius: float | None = None
    power_watts: float | None = None


@dataclass(frozen=True)
class DriverFigures:
    """The driver, and its GPUs by UUID."""

    driver_version: str = ""
    cuda_version: str = ""
    gpus: Mapping[str, GpuFigures] = field(default_factory=dict)


def driver_figures(uuids: Iterable[str]) -> DriverFigures:
    """Read NVML's figures for these GPUs. Raises nothing: without a driver, all figures are unknown."""
    # not at the top: other commands start faster without it
    import pynvml

    def value_of(ask: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return ask(*arguments)
        except pynvml.NVMLError:
            return None

    def of_gpu(uuid: str) -> GpuFigures:
        handle = value_of(pynvml.nvmlDeviceGetHandleByUUID, uuid)
        if handle is None:
            return GpuFigures()
        rates = value_of(pynvml.nvmlDeviceGetUtilizationRates, handle)
        milliwatts = value_of(pynvml.nvmlDeviceGetPowerUsage, handle)
        return GpuFigures(
            name=value_of(pynvml.nvmlDeviceGetName, handle) or "",
            utilisation=None if rates is None else min(1.0, rates.gpu / 100),
            temperature_celsius=value_of(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
            power_watts=None if milliwatts is None else milliwatts / 1000,
        )

    try:
        with _of_the_whole_gpu():
            pynvml.nvmlInit()
    except pynvml.NVMLError:
        return DriverFigures()
    try:
        number = value_of(pynvml.nvmlSystemGetCudaDriverVersion_v2)
        return DriverFigures(
            driver_version=value_of(pynvml.nvmlSystemGetDriverVersion) or "",
            # NVML's number is 1000 times the major version plus 10 times the minor version
            cuda_version="" if number is None else f"{number // 1000}.{number % 1000 // 10}",
            gpus={uuid: of_gpu(uuid) for uuid in uuids},
        )
    finally:
        value_of(pynvml.nvmlShutdown)


@contextmanager
def _of_the_whole_gpu() -> Iterator[None]:
    """Make NVML show the whole GPU instead of the share.

    libgpushare.so reads the setting when NVML is first used.
    """
    before = os.environ.get(NVML_VARIABLE)
    os.environ[NVML_VARIABLE] = "driver"
    try:
        yield
    finally:
        del os.environ[NVML_VARIABLE]
        if before is not None:
            os.environ[NVML_VARIABLE] = before


_LEASE = {
    "held": "this session has the lease",
    "waiting": "this session waits for the lease",
    "none": "this session has no GPU work",
}
WIDTH = 100
"""Columns of output that is not written to a terminal."""


@dataclass(frozen=True)
class ShownGpu:
    """The share on one GPU."""

    index: int
    """CUDA's index of the GPU in this server."""
    uuid: str
    memory_total_bytes: int
    """The session's memory limit."""
    memory_used_bytes: int
    """Memory allocated by all processes of the session."""
    memory_free_bytes: int
    memory_on_gpu_bytes: int
    """The part of the used memory that is on the GPU; the rest is paged out or has not been touched yet."""
    utilisation: float | None
    """Fraction of the GPU's time that this session had in the last second, from 0 to 1; None: not reported."""
    lease: str
    """none, waiting or held."""
    other_sessions: int
    other_sessions_with_work: int
    driver: GpuFigures
    """Figures of the whole GPU."""
    processes: tuple[ProcessMemory, ...]
    """Processes of this session only, largest first."""


@dataclass(frozen=True)
class ShownShare:
    """The share on all its GPUs."""

    share_units: int
    last_units: int
    """Units on the last GPU if these are fewer; 0: as many."""
    effective_units: int
    guaranteed_units: int
    tier: str
    layer: str
    """The sharing layer that provides the GPUs; empty: ours."""
    driver_version: str
    cuda_version: str
    gpus: tuple[ShownGpu, ...]


def shown_share(status: ShareStatus, driver: DriverFigures) -> ShownShare:
    """Return the figures to show for a known status."""
    return ShownShare(
        share_units=status.share_units,
        last_units=status.last_units,
        effective_units=status.effective_units,
        guaranteed_units=status.guaranteed_units,
        tier=status.tier.value,
        layer=status.layer,
        driver_version=driver.driver_version,
        cuda_version=driver.cuda_version,
        gpus=tuple(
            _shown_gpu(index, gpu, status, driver.gpus.get(gpu.uuid, GpuFigures()))
            for index, gpu in enumerate(status.gpus)
        ),
    )


def _shown_gpu(index: int, gpu: GpuStatus, status: ShareStatus, driver: GpuFigures) -> ShownGpu:
    here = [process for process in status.processes if process.gpu == gpu.uuid]
    return ShownGpu(
        index=index,
        uuid=gpu.uuid,
        memory_total_bytes=gpu.limit_bytes,
        memory_used_bytes=gpu.memory_bytes,
        memory_free_bytes=max(0, gpu.limit_bytes - gpu.memory_bytes),
        memory_on_gpu_bytes=gpu.resident_bytes,
        utilisation=gpu.utilisation,
        lease=gpu.lease,
        other_sessions=max(0, gpu.sessions - 1),
        # the count includes this session
        other_sessions_with_work=max(0, gpu.sessions_with_work - _counts_itself(gpu, status)),
        driver=driver,
        processes=tuple(sorted(here, key=lambda process: (-process.memory_bytes, process.pid))),
    )


def _counts_itself(gpu: GpuStatus, status: ShareStatus) -> bool:
    """Return whether the session counts among the sessions with work on the GPU.

    Under another layer, a session needs no lease.
    """
    return status.works_now if status.layer else gpu.lease != "none"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument("--socket", metavar="PATH", help="the session's socket (default: $GPUSHARE_SOCKET)")


def run(options: argparse.Namespace) -> int:
    """Print the share. Return 0 if it is known or there is no share, 1 if the agent is unavailable."""
    status = ask(options.socket)
    readable = status.known and (status.measured or options.json)
    share = shown_share(status, driver_figures(gpu.uuid for gpu in status.gpus)) if readable else None
    if options.json:
        figures = asdict(share) if share is not None else {}
        print(json.dumps({"shared": status.shared, "problem": status.problem, **figures}))
    elif share is None:
        print(page(status, time.time()))
    else:
        draw(share, Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDTH))
    return 1 if status.problem else 0


def draw(share: ShownShare, out: Console) -> None:
    """Print the tables."""
    versions = [("driver", share.driver_version), ("CUDA", share.cuda_version)]
    full, now = (
        gpu_share(units, len(share.gpus), share.last_units) for units in (share.share_units, share.effective_units)
    )
    held = f", {now} now" if share.effective_units != share.share_units else ""
    layer = other_layer(share.layer)
    parts = [f"{full} ({layer.title if layer else share.tier}{held})"]
    out.print(", ".join(parts + [f"{name} {version}" for name, version in versions if version]))
    out.print(_gpu_table(share))
    out.print(_process_table(share))
    for gpu in share.gpus:
        others = plural(gpu.other_sessions, "other session") if gpu.other_sessions else "no other session"
        working = f", {gpu.other_sessions_with_work} with work now" if gpu.other_sessions else ""
        lease = "" if layer else f"{_LEASE[gpu.lease]}; "
        out.print(f"On GPU {gpu.index}: {lease}{others}{working}.")
    out.print("util: the part of the GPU's time that this session had in the last second.")
    out.print("GPU util, temp and power: of the whole GPU.")


def _gpu_table(share: ShownShare) -> Table:
    table = Table(box=SQUARE)
    table.add_column("GPU")
    table.add_column("name")
    for name in ("used", "total", "on GPU", "util", "GPU\nutil", "temp", "power"):
        # a narrow terminal wraps the name, but not the figures
        table.add_column(name, justify="right", no_wrap=True)
    for gpu in share.gpus:
        driver = gpu.driver
        table.add_row(
            str(gpu.index),
            driver.name or gpu.uuid,
            memory(gpu.memory_used_bytes),
            memory(gpu.memory_total_bytes),
            memory(gpu.memory_on_gpu_bytes),
            _figure(gpu.utilisation, 100, " %"),
            _figure(driver.utilisation, 100, " %"),
            _figure(driver.temperature_celsius, 1, " °C"),
            _figure(driver.power_watts, 1, " W"),
        )
    return table


def _process_table(share: ShownShare) -> Table:
    table = Table(box=SQUARE)
    for name in ("GPU", "PID", "process of this session"):
        table.add_column(name)
    table.add_column("memory", justify="right")
    table.add_column("util", justify="right")
    for gpu in share.gpus:
        for process in gpu.processes:
            table.add_row(
                str(gpu.index),
                str(process.pid),
                process.name,
                memory(process.memory_bytes),
                _figure(process.utilisation, 100, " %"),
            )
    if not table.rows:
        table.add_row("", "", "no process with GPU memory", "", "")
    return table


def _figure(value: float | None, scale: float, unit: str) -> str:
    return f"{value * scale:.0f}{unit}" if value is not None else "?"
