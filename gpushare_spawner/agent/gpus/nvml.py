"""The machine's GPUs and their MIG instances, read through NVML.

`XidEvents` collects a GPU's errors (Xids) that do not prevent NVML from answering. Source of the numbers: NVIDIA, "Xid
Errors" (docs.nvidia.com/deploy/xid-errors).

`RecordedGpus` stores this machine's GPUs on disk: a lost GPU is unhealthy and stays listed when the agent restarts.
Without this record, an agent that lost its only GPU could not start, and its sessions and tiers would be lost.

Here, a MIG instance is a GPU instance with one compute instance, as created by `nvidia-smi mig -cgi ... -C`. GPU
instances with several compute instances are omitted, because these share memory. The agent neither creates nor destroys
instances. agent/periodic.py tracks which MIG instances sessions use.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import pynvml
from pydantic import BaseModel, ConfigDict, ValidationError

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.session_records import regular_content, replace_file
from gpushare_spawner.model.layers_file import MEMORY_SLICES, MigInstance, MigProfile, gpu_label

log = logging.getLogger(__name__)


HARMLESS = frozenset({13, 31, 43, 45, 63, 68, 94, 109})
"""Xids after which the GPU continues to work normally.

Errors in a program: 13 (exception in a kernel), 31 (address fault), 43 (its channel was reset), 45 (it was killed), 68
(video), 109 (a context switch took too long). Errors that the GPU has handled: 63 (a memory row is replaced at the next
reset), 94 (a memory error that ended one program).
"""
MAX_AT_ONCE = 100


class XidEvents:
    """Collector of Xids. Calls take at most milliseconds. A driver without events never reports an Xid."""

    def __init__(self, uuids: Iterable[str]) -> None:
        self.last: dict[str, int] = {}
        """Fatal Xids, keyed by GPU UUID. An entry stays: the GPU needs a reset, which ends all of its work."""
        self._events: object | None = None
        uuids = sorted(uuids)
        if not uuids:
            return
        try:
            self._events = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError as error:
            log.info("the driver does not report GPU errors as events: %s", error)
            return
        for uuid in uuids:
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
            except pynvml.NVMLError as error:
                log.info("errors of GPU %s are not reported as events: %s", uuid, error)

    def collect(self) -> None:
        """Read the events since the last call."""
        for _ in range(MAX_AT_ONCE):
            if self._events is None:
                return
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
                uuid, xid = str(pynvml.nvmlDeviceGetUUID(event.device)), int(event.eventData)
            except pynvml.NVMLError_Timeout:
                return
            except pynvml.NVMLError as error:
                # with a lost GPU, every wait fails from now on; the state query detects the loss even without events
                log.debug("events of GPUs: %s", error)
                return
            if xid in HARMLESS:
                log.info("GPU %s: Xid %d, caused by a program, not by the GPU", uuid, xid)
            elif uuid not in self.last:
                self.last[uuid] = xid

    def close(self) -> None:
        """Stop receiving events."""
        if self._events is not None:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(self._events)
            self._events = None


MARK = " MIG "
"""Separator between the GPU name and the profile name in a MIG device's name: "NVIDIA A100-SXM4-80GB MIG 1g.10gb"."""
OLD_UUID = "MIG-GPU-"
"""Prefix of MIG devices' UUIDs in older drivers, which consist of the GPU's and instance's IDs (NVIDIA MIG user guide).
"""
MOST_COMPUTE_SLICES = 7
"""Compute slices of a GPU without reported profiles.

An instance then counts as at most its true size.
"""
_MEBIBYTE = 2**20


def in_mig_mode(handle: Any) -> bool:
    """Return whether a GPU is in MIG mode; False for a GPU without MIG, and for a MIG device."""
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:
        return False
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def _instances(handle: Any, gpu: Gpu) -> tuple[list[Gpu], list[str]]:
    """Return the instances of a GPU in MIG mode, and sentences with the reasons why some or all are omitted."""
    listed: list[Gpu] = []
    skipped: list[str] = []
    whole = _whole(handle, gpu.memory_bytes)
    for device in _devices(handle):
        try:
            uuid, name = str(pynvml.nvmlDeviceGetUUID(device)), str(pynvml.nvmlDeviceGetName(device))
            attributes = pynvml.nvmlDeviceGetAttributes(device)
            memory = int(pynvml.nvmlDeviceGetMemoryInfo(device).total)
        except pynvml.NVMLError as error:
            # the device can be destroyed between two queries
            skipped.append(f"a MIG device of GPU {gpu.uuid} does not answer and is skipped: {error}")
            continue
        slices = int(attributes.gpuInstanceSliceCount)
        if uuid.startswith(OLD_UUID):
            skipped.append(f"MIG device {uuid} is skipped: it has its own UUID only from driver 470 on")
        elif int(attributes.computeInstanceSliceCount) < slices:
            skipped.append(f"MIG device {uuid} is skipped: it shares its GPU instance's memory with others")
        else:
            profile = _profile(name, slices, int(attributes.memorySizeMB), memory, whole)
            instance = MigInstance(gpu.uuid, gpu.model, profile)
            model = f"{gpu.model}{MARK}{profile.name}"
            listed.append(replace(gpu, uuid=uuid, model=model, memory_bytes=memory, mig=instance))
    if not listed:
        skipped.append(
            f"GPU {gpu.index} is in MIG mode and has no instance that a session can have: make some, as "
            f"`nvidia-smi mig -i {gpu.index} -cgi 1g.10gb,1g.10gb -C` does"
        )
    return listed, skipped


def _devices(handle: Any) -> Iterator[Any]:
    try:
        most = int(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle))
    except pynvml.NVMLError:
        return
    for index in range(most):
        # instances can have any index
        try:
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except pynvml.NVMLError:
            continue


def _whole(handle: Any, memory_bytes: int) -> tuple[int, int]:
    """Return the compute slices and the MiB of the GPU's largest profile, which covers the whole GPU."""
    slices, memory_mib = 0, 0
    for number in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            largest = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number)
        except pynvml.NVMLError:
            continue  # this GPU has no such profile
        slices, memory_mib = max(slices, int(largest.sliceCount)), max(memory_mib, int(largest.memorySizeMB))
    return slices or MOST_COMPUTE_SLICES, memory_mib or memory_bytes // _MEBIBYTE


def _profile(name: str, slices: int, memory_mib: int, memory_bytes: int, whole: tuple[int, int]) -> MigProfile:
    compute_slices, whole_mib = whole
    eighths = round(memory_mib * MEMORY_SLICES / max(1, whole_mib))
    _, mark, own = name.partition(MARK)
    # on Kubernetes, "1g.10gb+me" is written "1g.10gb.me"
    called = own.strip().replace("+", ".") if mark else f"{slices}g.{round(memory_mib / 1024)}gb"
    return MigProfile(
        name=called,
        slices=slices,
        compute_slices=compute_slices,
        memory_slices=max(1, min(MEMORY_SLICES, eighths)),
        memory_bytes=memory_bytes,
    )


GONE = "was destroyed by an admin: its GPU now has other MIG instances"
"""Fault of a destroyed MIG instance, as a predicate that follows its name."""
OPEN_AGAIN_EVERY = 30.0
"""Seconds between attempts to reopen NVML while a GPU does not answer."""


class NoGpu(RuntimeError):
    """Error for a machine without a GPU to share. The message states the reason and the remedy."""


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that do not change while the agent runs."""

    index: int
    """NVML's index."""
    uuid: str
    model: str
    memory_bytes: int
    simulated: bool = False
    minor: int | None = None
    """N in the name of its device file /dev/nvidiaN, if the driver reports it."""
    mig: MigInstance | None = None
    """The MIG instance, in which case `index` and `minor` are the GPU's. None: a whole GPU."""

    @property
    def whole(self) -> str:
        """The UUID of the whole GPU."""
        return self.mig.gpu if self.mig is not None else self.uuid

    @property
    def whole_model(self) -> str:
        """The model of the whole GPU."""
        return self.mig.gpu_model if self.mig is not None else self.model

    def capacity(self, units: int) -> int:
        """Return the units that may be guaranteed on it.

        ``units``: for a whole GPU. Instances are never overcommitted.
        """
        return self.mig.profile.units if self.mig is not None else units

    @property
    def label(self) -> str:
        """The name for use in texts: "GPU 0", or "GPU 0, MIG 1g.10gb"."""
        return gpu_label(self.index, self.mig)


@dataclass(frozen=True)
class Utilisation:
    """One process's fraction of a GPU's time, measured by the driver."""

    pid: int
    at: float
    """End of the latest sample in which it computed, in seconds since the epoch."""
    busy: float
    """Mean fraction of the GPU's time over all samples since the requested instant, from 0 to 1.

    The driver rounds to 1 % and omits processes at 0. Samples are about 1/6 s long.
    """


@dataclass(frozen=True)
class GpuState:
    """NVML's figures for a GPU at one instant."""

    healthy: bool
    trouble: str = "does not answer its driver"
    """Fault of an unhealthy GPU, as a predicate that follows "the GPU"."""
    memory_used_bytes: int = 0
    utilisation: float | None = None
    """Fraction of the driver's last sample period (at most a second) in which the GPU computed, from 0 to 1; None: not
    reported."""
    temperature_celsius: float | None = None
    """None: not reported."""
    power_watts: float | None = None
    """Power draw of the GPU; None: not reported."""
    processes: Mapping[int, int | None] = field(default_factory=dict)
    """Device memory, in bytes, of each process with a CUDA context on it, keyed by this machine's pid.

    Includes resident managed memory. None: not reported.
    """

    @property
    def pids(self) -> tuple[int, ...]:
        """The pids of its processes, in ascending order."""
        return tuple(sorted(self.processes))


class GpuSource(Protocol):
    """Source of the GPUs' state: NVML."""

    def state(self, gpu: Gpu) -> GpuState:
        """Return the current state. May block for milliseconds."""

    def memory(self, gpu: Gpu) -> GpuState | None:
        """Return only the memory in use, with its processes; None if the GPU does not answer.

        May be called from any thread, and may block.
        """

    def utilisation(self, gpu: Gpu, since: float) -> tuple[Utilisation, ...] | None:
        """Return each process's fraction of the GPU's time since an instant (seconds since the epoch).

        None if there are no such figures.
        """


class Nvml:
    """NVML, opened once for the agent's lifetime. Its calls can take milliseconds: poll `state` off the event loop."""

    def __init__(self, patient: bool = False) -> None:
        """Open NVML.

        Raises NoGpu if NVML or the driver is missing; with `patient`, each poll of a GPU tries again instead.
        """
        self._xids = XidEvents(())
        self._watched: set[str] = set()
        """UUIDs of the GPUs from which events are collected."""
        self._missing: str | None = None
        """Reason why NVML is not open; None while it is open."""
        self._opened_at = time.monotonic()
        self._opening = threading.Lock()
        """Lock held while NVML is closed and opened, because other threads make calls."""
        try:
            self._open()
        except NoGpu as error:
            if not patient:
                raise
            self._missing = str(error)

    def _open(self) -> None:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError_LibraryNotFound:
            raise NoGpu(
                "no NVIDIA driver was found here (there is no libnvidia-ml.so.1). Install the driver; to try things "
                "out on simulated GPUs put the folder of the simulated driver (package gpushare-simgpu) into "
                "LD_LIBRARY_PATH before starting"
            ) from None
        except pynvml.NVMLError_DriverNotLoaded:
            raise NoGpu(
                "the NVIDIA driver is installed but not loaded: try `nvidia-smi`, or load the module nvidia"
            ) from None
        except pynvml.NVMLError as error:
            raise NoGpu(f"NVML does not start: {error}") from None
        self._missing = None

    def _open_again(self) -> None:
        """Reopen NVML. Otherwise NVML does not list a GPU that has recovered after it was lost."""
        if time.monotonic() < self._opened_at + OPEN_AGAIN_EVERY:
            return
        self._opened_at = time.monotonic()
        with self._opening:
            if self._missing is None:
                self._xids.close()
                with contextlib.suppress(pynvml.NVMLError):
                    pynvml.nvmlShutdown()
            try:
                self._open()
            except NoGpu as error:
                self._missing = str(error)
                return
        if self._watched:
            self._watch(self._watched)

    def _watch(self, uuids: Iterable[str]) -> None:
        """Collect the events of these GPUs, again after each opening of NVML."""
        self._watched, seen = set(uuids), self._xids.last
        self._xids.close()
        self._xids = XidEvents(self._watched)
        self._xids.last.update(seen)

    def answers(self, uuid: str) -> bool:
        """Return whether a GPU answers its driver, in any mode."""
        try:
            pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid))
        except pynvml.NVMLError:
            return False
        return True

    def gpus(self, mig: bool = False) -> tuple[Gpu, ...]:
        """Return the GPUs that can be shared. Raises NoGpu if there is none.

        `mig`: include the MIG instances of GPUs in MIG mode. Other GPUs in MIG mode, and GPUs that do not answer, are
        omitted and logged.
        """
        if self._missing is not None:
            raise NoGpu(self._missing)
        gpus, skipped = self._all(mig)
        for sentence in skipped:
            log.warning("%s", sentence)
        if not gpus:
            raise NoGpu("NVML lists no GPU that can be shared" + "".join(f"; {sentence}" for sentence in skipped))
        if not self._watched:
            self._watch(gpu.whole for gpu in gpus)
        return tuple(gpus)

    def instances(self) -> tuple[Gpu, ...] | None:
        """Return the current MIG instances; None: NVML does not answer. May be called from any thread."""
        with self._opening:
            if self._missing is not None:
                return None
            try:
                return tuple(gpu for gpu in self._all(mig=True)[0] if gpu.mig is not None)
            except NoGpu:
                return None

    def _all(self, mig: bool) -> tuple[list[Gpu], list[str]]:
        """Return the GPUs, with MIG instances if requested, and the reasons why some are omitted. Raises NoGpu."""
        gpus: list[Gpu] = []
        skipped: list[str] = []
        try:
            count = int(pynvml.nvmlDeviceGetCount())
        except pynvml.NVMLError as error:
            raise NoGpu(f"NVML lists no GPUs: {error}") from None
        for index in range(count):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                model = str(pynvml.nvmlDeviceGetName(handle))
                gpu = Gpu(
                    index=index,
                    uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
                    model=model,
                    memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                    simulated=model.startswith("Simulated"),
                    minor=_figure(pynvml.nvmlDeviceGetMinorNumber, handle),
                )
                if not in_mig_mode(handle):
                    gpus.append(gpu)
                elif mig:
                    parts, why = _instances(handle, gpu)
                    gpus += parts
                    skipped += why
                else:
                    skipped.append(
                        f"GPU {index} is split by MIG: the hardware isolates its instances, they are not shared further"
                    )
            except pynvml.NVMLError as error:
                skipped.append(f"GPU {index} does not answer and is skipped: {error}")
        return gpus, skipped

    def state(self, gpu: Gpu) -> GpuState:
        """Return the state of a GPU. Never raises.

        A GPU is unhealthy if it answers with an error, if the driver has reported an error that only a reset repairs,
        or if MIG split it after the agent started.
        """
        if self._missing is not None:
            self._open_again()
            if self._missing is not None:
                return GpuState(healthy=False, trouble=f"does not answer its driver ({self._missing})")
        self._xids.collect()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
            used = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        except pynvml.NVMLError as error:
            if gpu.mig is not None and self.answers(gpu.mig.gpu):
                return GpuState(healthy=False, trouble=GONE)
            self._open_again()
            return GpuState(healthy=False, trouble=f"does not answer its driver ({error})")
        if gpu.whole not in self._watched:
            self._watch({*self._watched, gpu.whole})  # the GPU was lost when the agent started
        if gpu.whole in self._xids.last:
            return GpuState(
                healthy=False,
                trouble=f"broke with Xid {self._xids.last[gpu.whole]}: reset it and restart the agent",
                memory_used_bytes=used,
            )
        if gpu.mig is None and in_mig_mode(handle):
            return GpuState(healthy=False, trouble="has been split by MIG", memory_used_bytes=used)
        rates = _figure(pynvml.nvmlDeviceGetUtilizationRates, handle)
        milliwatts = _figure(pynvml.nvmlDeviceGetPowerUsage, handle)
        return GpuState(
            healthy=True,
            memory_used_bytes=used,
            utilisation=None if rates is None else min(1.0, float(rates.gpu) / 100),
            temperature_celsius=_figure(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
            # the sensor is inaccurate by a few watts
            power_watts=None if milliwatts is None else round(milliwatts / 1000, 1),
            processes=_processes(handle),
        )

    def memory(self, gpu: Gpu) -> GpuState | None:
        """Return the memory in use, with its processes, without a health check; None if there is no answer.

        May be called from any thread; blocks for a millisecond or two.
        """
        with self._opening:
            if self._missing is not None:
                return None
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                used = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
            except pynvml.NVMLError:
                return None
            return GpuState(healthy=True, memory_used_bytes=used, processes=_processes(handle))

    def utilisation(self, gpu: Gpu, since: float) -> tuple[Utilisation, ...] | None:
        """Return each process's fraction of the GPU's time since an instant, in seconds since the epoch.

        0 requests all of the driver's samples. Returns None if the GPU or the driver has no such figures (MIG, vGPU,
        old GPUs, no permission): stop polling. Returns an empty tuple if no process computed, no sample has ended
        since, or the GPU did not answer this time. Blocks for a millisecond or two. The driver retains samples for a
        few seconds, so poll at least once a second.
        """
        with self._opening:
            return self._utilisation(gpu, since) if self._missing is None else ()

    def _utilisation(self, gpu: Gpu, since: float) -> tuple[Utilisation, ...] | None:
        # nvidia-ml-py makes two calls, and the second call fails if a process starts between them
        for _ in range(3):
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                samples = pynvml.nvmlDeviceGetProcessUtilization(handle, max(0, round(since * 1e6)))
            except pynvml.NVMLError as error:
                if error.value == pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
                    continue
                return None if error.value in _TELLS_NOTHING else ()
            # some drivers fill the rest of their buffer with zeros or with stale values
            return tuple(
                Utilisation(pid=int(sample.pid), at=sample.timeStamp / 1e6, busy=sample.smUtil / 100)
                for sample in samples
                if sample.pid > 0 and sample.smUtil <= 100 and sample.timeStamp / 1e6 > since
            )
        return ()

    def close(self) -> None:
        """Shut NVML down."""
        self._xids.close()
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


_TELLS_NOTHING = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NO_PERMISSION,
)
"""Errors from a driver that will never report the figure."""


def _figure(ask: Callable[..., Any], *arguments: Any) -> Any:
    """Return a figure; None if it is not reported (MIG mode, vGPU, no sensor)."""
    try:
        return ask(*arguments)
    except pynvml.NVMLError:
        return None


def _processes(handle: Any) -> dict[int, int | None]:
    try:
        listed = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        # some drivers do not list processes; the GPU is healthy nevertheless
        return {}
    processes: dict[int, int | None] = {}
    for process in listed:
        pid, memory = int(process.pid), getattr(process, "usedGpuMemory", None)
        before = processes.get(pid)
        # A pid is listed twice if a process computes in two ways, such as directly and through MPS.
        processes[pid] = before if memory is None else int(memory) + (before or 0)
    return processes


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore")

    boot: str
    gpus: tuple[Gpu, ...]


class RecordedGpus:
    """The file ``gpus.json`` in the state folder."""

    def __init__(self, path: Path) -> None:
        """Read the file. A missing file means no GPUs. An unreadable file also means no GPUs, and is logged."""
        self._path = path
        self._gpus: tuple[Gpu, ...] = ()
        self._this_boot = False
        try:
            record = _Record.model_validate_json(regular_content(path))
            self._gpus = record.gpus
            self._this_boot = record.boot == processes.boot_id()
        except FileNotFoundError:
            pass
        except (OSError, ValueError, ValidationError) as error:
            log.warning("cannot read the record of this machine's GPUs, %s: %s", path, error)

    def __bool__(self) -> bool:
        return bool(self._gpus)

    def lost(self, listed: Iterable[Gpu], answers: Callable[[str], bool]) -> tuple[Gpu, ...]:
        """Return the recorded GPUs that NVML does not list now.

        Includes only GPUs recorded since the machine's last boot, unless no GPU is left: otherwise a removed GPU would
        count as lost forever. `answers`: whether a GPU answers its driver although it is not listed, for example in MIG
        mode. A MIG instance that no longer exists counts as lost until the agent has determined that no session uses
        it.
        """
        listed = tuple(listed)
        uuids, indices = {gpu.uuid for gpu in listed}, {gpu.index for gpu in listed}
        lost = []
        for gpu in self._gpus:
            replaced = gpu.uuid in uuids or (gpu.index in indices and gpu.mig is None)
            if replaced or (listed and (not self._this_boot or (gpu.simulated and gpu.mig is None))):
                continue
            if not answers(gpu.uuid):
                log.error(
                    "GPU %d (%s) is lost: it was present before, and is unhealthy until it answers", gpu.index, gpu.uuid
                )
                lost.append(gpu)
        return tuple(lost)

    def save(self, gpus: Iterable[Gpu]) -> None:
        """Record these GPUs. A disk failure is logged."""
        record = _Record(boot=processes.boot_id(), gpus=tuple(gpus))
        try:
            replace_file(self._path, record.model_dump_json().encode())
        except OSError as error:
            log.warning("cannot write the record of this machine's GPUs to %s: %s", self._path, error.strerror)


def all_gpus(
    list_gpus: Callable[[], tuple[Gpu, ...]], recorded: RecordedGpus, answers: Callable[[str], bool]
) -> tuple[Gpu, ...]:
    """Return the listed and the lost GPUs, ordered by index. Raises NoGpu if there are none."""
    try:
        listed, reason = list_gpus(), None
    except NoGpu as error:
        listed, reason = (), error
    lost = recorded.lost(listed, answers)
    if reason is not None and not lost:
        raise reason
    gpus = tuple(sorted((*listed, *lost), key=lambda gpu: gpu.index))
    recorded.save(gpus)
    return gpus
