"""Checks of the NVIDIA driver: NVML, the GPUs, the device files of CUDA and unified memory (UVM), the CUDA driver."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pynvml

from gpushare_spawner.agent.gpus.nvml import Gpu, NoGpu, Nvml
from gpushare_spawner.agent.suspend.checkpoints import DriverCheckpoints
from gpushare_spawner.agent.suspend.progress import may_attach, why_not
from gpushare_spawner.doctor.finding import Finding, Machine, note, ok, problem, skipped
from gpushare_spawner.wording.amounts import memory
from gpushare_spawner.wording.spawn_form import instance_time

_CUDA = """
import ctypes, json, sys
cuda = ctypes.CDLL("libcuda.so.1")
value, failed = ctypes.c_int(), lambda call, code: code and sys.exit(f"{call} fails with CUDA error {code}")
failed("cuInit", cuda.cuInit(0))
failed("cuDriverGetVersion", cuda.cuDriverGetVersion(ctypes.byref(value)))
version = value.value
failed("cuDeviceGetCount", cuda.cuDeviceGetCount(ctypes.byref(value)))
paging = []
for device in range(value.value):
    # CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS
    failed("cuDeviceGetAttribute", cuda.cuDeviceGetAttribute(ctypes.byref(value), 89, device))
    paging.append(bool(value.value))
print(json.dumps([version, paging]))
"""
_UNHEALTHY = "See `nvidia-smi` and the kernel's log (`dmesg | grep -i xid`). No new session is placed on this GPU."
_TIMEOUT = 60.0
"""Timeout in seconds; a driver without persistence mode takes up to 10 s to initialize many GPUs."""


@dataclass(frozen=True)
class DriverFacts:
    """Facts that the probe has read."""

    no_gpu: str | None = None
    """Why there is no GPU to share; None if there is one."""
    version: str = ""
    gpus: tuple[Gpu, ...] = ()
    trouble: Mapping[str, str] = field(default_factory=dict)
    """UUID -> the problem, for unhealthy GPUs."""
    left_out: tuple[str, ...] = ()
    """Sentences on GPUs that are not shared."""
    devices: Mapping[str, str] = field(default_factory=dict)
    """Path of a device file -> its problem, or ""."""
    cuda_error: str = ""
    cuda_version: int = 0
    """1000 * major + 10 * minor, as returned by cuDriverGetVersion."""
    no_suspend: str | None = None
    """Why processes cannot be suspended, as a sentence; None if they can."""
    paging: tuple[bool, ...] = ()
    """For each CUDA device: whether it pages managed memory while kernels run."""


def check(machine: Machine) -> tuple[list[Finding], tuple[Gpu, ...]]:
    """Return the findings, and the GPUs for other checks, MIG instances included."""
    facts = probe(machine.path(Path("/dev")))
    return findings(facts), facts.gpus


def probe(dev: Path) -> DriverFacts:
    """Read the facts. Takes some seconds if the driver must initialize the GPUs."""
    version = ""
    with _warnings_of(Nvml.__module__) as left_out:
        try:
            with contextlib.closing(Nvml()) as nvml:
                version = str(pynvml.nvmlSystemGetDriverVersion())
                gpus = nvml.gpus(mig=True)
                states = {gpu.uuid: nvml.state(gpu) for gpu in gpus}
        except NoGpu as error:
            return DriverFacts(no_gpu=str(error), version=version, left_out=tuple(left_out))
    cuda_error, cuda_version, paging = _cuda()
    return DriverFacts(
        version=version,
        gpus=gpus,
        trouble={uuid: state.trouble for uuid, state in states.items() if not state.healthy},
        left_out=tuple(left_out),
        devices=_devices(dev, gpus),
        cuda_error=cuda_error,
        cuda_version=cuda_version,
        paging=paging,
        no_suspend=asyncio.run(_no_suspend()) if not cuda_error else None,
    )


@contextlib.contextmanager
def _warnings_of(module: str) -> Iterator[list[str]]:
    """Collect the agent's log messages on GPUs that it does not share."""
    sentences: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: sentences.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger(module)
    log.addHandler(handler)
    try:
        yield sentences
    finally:
        log.removeHandler(handler)


async def _no_suspend() -> str | None:
    checkpoints = DriverCheckpoints()
    try:
        return await why_not(checkpoints, may_attach())
    finally:
        await checkpoints.close()


def findings(facts: DriverFacts) -> list[Finding]:
    """Return the findings that follow from the facts."""
    results = [note("NVML", sentence, "Nothing to do if that is intended.") for sentence in facts.left_out]
    if facts.no_gpu is not None:
        remedy = "Install or load the NVIDIA driver: `nvidia-smi` must list the GPUs."
        return [*results, problem("NVML", facts.no_gpu, remedy)]
    results.append(ok("NVML", f"driver {facts.version}"))
    for gpu in facts.gpus:
        where = gpu.label
        if gpu.uuid in facts.trouble:
            what = f"{gpu.model} is unhealthy: it {facts.trouble[gpu.uuid]}"
            results.append(problem(where, what, _UNHEALTHY))
        else:
            part = f", {instance_time(gpu.mig.profile)}" if gpu.mig is not None else ""
            results.append(ok(where, f"{gpu.model}, {memory(gpu.memory_bytes)}{part}, {gpu.uuid}"))
    results += _device_findings(facts)
    results += _cuda_findings(facts)
    if not facts.cuda_error:
        results.append(_suspend_finding(facts))
    return results


def _suspend_finding(facts: DriverFacts) -> Finding:
    if facts.no_suspend is None:
        return ok("engine suspend", "the driver can suspend processes and resume them")
    remedy = "Nothing to do unless a template has `gpu.memory.engine: suspend`: its sessions keep their GPU memory."
    return note("engine suspend", facts.no_suspend, remedy)


def _device_findings(facts: DriverFacts) -> list[Finding]:
    if facts.gpus and all(gpu.simulated for gpu in facts.gpus):
        return [skipped("device files", "simulated GPUs have no device files")]
    wrong = {path: what for path, what in facts.devices.items() if what}
    if not wrong:
        return [ok("device files", ", ".join(facts.devices) + " can be opened")]
    remedies = {
        "is missing": "Run `nvidia-modprobe -c 0 -u` as root. gpushare-agent.service runs it at each start.",
        "cannot be opened": "Give users the right to read and write it: the driver's default is mode 0666 "
        "(NVreg_DeviceFileMode).",
    }
    return [
        problem(path, what, next(text for key, text in remedies.items() if key in what)) for path, what in wrong.items()
    ]


def _cuda_findings(facts: DriverFacts) -> list[Finding]:
    if facts.cuda_error:
        remedy = "It must have the version of the kernel module: restart the machine after an update of the driver."
        return [problem("libcuda.so.1", facts.cuda_error, remedy)]
    version = f"CUDA {facts.cuda_version // 1000}.{facts.cuda_version % 1000 // 10}"
    if all(facts.paging):
        return [ok("libcuda.so.1", f"{version}; managed memory can be paged while kernels run")]
    what = f"{version}; some GPUs cannot page managed memory while kernels run, so they use plain memory"
    remedy = (
        "Use templates whose memory limits add up to the GPU's memory on these GPUs. Paging needs a GPU of the Pascal "
        "generation or later, and with vGPU a profile with unified memory."
    )
    return [note("libcuda.so.1", what, remedy)]


def _devices(dev: Path, gpus: tuple[Gpu, ...]) -> dict[str, str]:
    names = ["nvidiactl", "nvidia-uvm", *(f"nvidia{gpu.minor}" for gpu in gpus if gpu.minor is not None)]
    return {str(dev / name): _device(dev / name) for name in names}


def _device(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be opened: {error.strerror}"
    os.close(descriptor)
    return ""


def _cuda() -> tuple[str, int, tuple[bool, ...]]:
    """Return the error, the version, and the paging of each device. Runs in a separate process: libcuda keeps state."""
    # without libgpushare.so, which is checked separately
    bare = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CUDA], env=bare, capture_output=True, text=True, timeout=_TIMEOUT, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return f"a program that calls cuInit did not end within {_TIMEOUT:g} s", 0, ()
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"a program that calls cuInit ends with status {done.returncode}"]
        return lines[-1], 0, ()
    version, paging = 0, []
    with contextlib.suppress(ValueError):
        version, paging = json.loads(done.stdout)
    return "", version, tuple(paging)
