"""The machine's GPUs, as NVML tells."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Any

import pynvml

from gpushare_spawner.agent.xid_events import XidEvents

log = logging.getLogger(__name__)


class NoGpu(RuntimeError):
    """There is no GPU to share here; the message says why and what would help."""


@dataclass(frozen=True)
class Gpu:
    """What does not change about a GPU while the agent runs."""

    index: int
    """NVML's."""
    uuid: str
    model: str
    memory_bytes: int
    simulated: bool = False
    minor: int | None = None
    """N of its device file /dev/nvidiaN, where the driver says."""


@dataclass(frozen=True)
class GpuState:
    """What NVML says about a GPU at one moment."""

    healthy: bool
    trouble: str = "does not answer its driver"
    """What is wrong with it where it is not healthy, to be read after "the GPU"."""
    memory_used_bytes: int = 0
    pids: tuple[int, ...] = ()
    """Processes that have a CUDA context on it, as this machine numbers them."""


class Nvml:
    """NVML, opened once for the life of the agent. Its calls may take milliseconds: poll `state` off the event loop."""

    def __init__(self) -> None:
        """Raises NoGpu where NVML or the driver is missing."""
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError_LibraryNotFound:
            raise NoGpu(
                "no NVIDIA driver was found here (there is no libnvidia-ml.so.1). Install the driver; to try things "
                "out on simulated GPUs put the folder of the simulated driver into LD_LIBRARY_PATH before starting"
            ) from None
        except pynvml.NVMLError_DriverNotLoaded:
            raise NoGpu(
                "the NVIDIA driver is installed but not loaded: try `nvidia-smi`, or load the module nvidia"
            ) from None
        except pynvml.NVMLError as error:
            raise NoGpu(f"NVML does not start: {error}") from None
        self._xids: XidEvents | None = None

    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that can be shared. Raises NoGpu if there is none.

        One in MIG mode, or one that does not answer, is left out, and the log says so.
        """
        found, skipped = [], []
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                if _in_mig_mode(handle):
                    skipped.append(
                        f"GPU {index} is split by MIG: the hardware isolates its instances, they are not shared further"
                    )
                    continue
                model = str(pynvml.nvmlDeviceGetName(handle))
                found.append(
                    Gpu(
                        index=index,
                        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
                        model=model,
                        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                        simulated=model.startswith("Simulated"),
                        minor=_minor(handle),
                    )
                )
            except pynvml.NVMLError as error:
                skipped.append(f"GPU {index} does not answer and is left out: {error}")
        for sentence in skipped:
            log.warning("%s", sentence)
        if not found:
            raise NoGpu("NVML lists no GPU that can be shared" + "".join(f"; {sentence}" for sentence in skipped))
        if self._xids is None:
            self._xids = XidEvents(gpu.uuid for gpu in found)
        return tuple(found)

    def state(self, gpu: Gpu) -> GpuState:
        """A GPU that answers with an error is not healthy; this never raises.

        Neither is one of which the driver has reported an error that only a reset mends, nor one that was split by MIG
        after the agent had started.
        """
        if self._xids is not None:
            self._xids.collect()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
            used = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        except pynvml.NVMLError as error:
            return GpuState(healthy=False, trouble=f"does not answer its driver ({error})")
        if self._xids is not None and gpu.uuid in self._xids.last:
            return GpuState(
                healthy=False,
                trouble=f"broke with Xid {self._xids.last[gpu.uuid]}: reset it and start the agent anew",
                memory_used_bytes=used,
            )
        if _in_mig_mode(handle):
            return GpuState(healthy=False, trouble="has been split by MIG", memory_used_bytes=used)
        try:
            pids = tuple(sorted({int(process.pid) for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}))
        except pynvml.NVMLError:
            # some drivers do not list processes; the GPU is well all the same
            pids = ()
        return GpuState(healthy=True, memory_used_bytes=used, pids=pids)

    def close(self) -> None:
        """Let NVML go."""
        if self._xids is not None:
            self._xids.close()
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _minor(handle: Any) -> int | None:
    try:
        return int(pynvml.nvmlDeviceGetMinorNumber(handle))
    except pynvml.NVMLError:
        return None


def _in_mig_mode(handle: Any) -> bool:
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:
        return False
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)
