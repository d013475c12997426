"""The GPUs that this machine had: one that is lost is unhealthy, and not forgotten, also when the agent starts anew.

Without this record an agent whose only GPU is lost could not start, and its sessions and tiers would be lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.nvml import Gpu, NoGpu
from gpushare_spawner.agent.state.state_file import regular_content, replace_file

log = logging.getLogger(__name__)

_GPUS = TypeAdapter(tuple[Gpu, ...])


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore")

    boot: str
    gpus: list[dict[str, object]]


class KnownGpus:
    """The file ``gpus.json`` in the state folder."""

    def __init__(self, path: Path) -> None:
        """Reads it. A missing file means no GPUs. So does one that cannot be read, and the log says so."""
        self._path = path
        self._gpus: tuple[Gpu, ...] = ()
        self._this_boot = False
        try:
            record = _Record.model_validate_json(regular_content(path))
            self._gpus = _GPUS.validate_python(record.gpus)
            self._this_boot = record.boot == processes.boot_id()
        except FileNotFoundError:
            pass
        except (OSError, ValueError, ValidationError) as error:
            log.warning("cannot read the record of this machine's GPUs, %s: %s", path, error)

    def __bool__(self) -> bool:
        return bool(self._gpus)

    def lost(self, found: Iterable[Gpu], answers: Callable[[Gpu], bool]) -> tuple[Gpu, ...]:
        """GPUs that were here before and are not among those that NVML lists now.

        Only those of this boot of the machine, unless no GPU is left: else a removed GPU would count as lost for ever.
        `answers`: whether a GPU answers its driver although it is not listed, for example in MIG mode. A MIG instance
        that is gone counts as lost until the agent has found that no session has it.
        """
        found = tuple(found)
        uuids, indices = {gpu.uuid for gpu in found}, {gpu.index for gpu in found}
        lost = []
        for gpu in self._gpus:
            replaced = gpu.uuid in uuids or (gpu.index in indices and gpu.mig is None)
            if replaced or (found and (not self._this_boot or (gpu.simulated and gpu.mig is None))):
                continue
            if not answers(gpu):
                log.error(
                    "GPU %d (%s) is lost: it was here before; it is unhealthy until it answers", gpu.index, gpu.uuid
                )
                lost.append(gpu)
        return tuple(lost)

    def save(self, gpus: Iterable[Gpu]) -> None:
        """Remember these. A disk that refuses is told in the log."""
        record = _Record(boot=processes.boot_id(), gpus=[asdict(gpu) for gpu in gpus])
        try:
            replace_file(self._path, record.model_dump_json().encode())
        except OSError as error:
            log.warning("cannot write the record of this machine's GPUs to %s: %s", self._path, error.strerror)


def all_gpus(
    list_gpus: Callable[[], tuple[Gpu, ...]], known: KnownGpus, answers: Callable[[Gpu], bool]
) -> tuple[Gpu, ...]:
    """Those that NVML lists and those that are lost, by index. Raises NoGpu if there is neither."""
    try:
        found, reason = list_gpus(), None
    except NoGpu as error:
        found, reason = (), error
    lost = known.lost(found, answers)
    if reason is not None and not lost:
        raise reason
    gpus = tuple(sorted((*found, *lost), key=lambda gpu: gpu.index))
    known.save(gpus)
    return gpus
