"""The ResourceSlice of a node's GPUs: its content, and the loop that maintains it at the API server.

If a feature gate is off, the API server drops fields without an error, so the stored slice is compared with the written
one. The kubelet deletes all of its node's slices when it starts, and the slices of a driver that has been unavailable
for 30 s. No pod gets a share here until the slice is written again, so the agent watches the slice.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.background import Background, set_within
from gpushare_spawner.clients.api import ApiFailure, ClusterApi, Json
from gpushare_spawner.clients.object_watch import Watched, whole
from gpushare_spawner.log_once import LogOnce
from gpushare_spawner.model.kubernetes.annotations import PREFIX
from gpushare_spawner.model.kubernetes.container_requests import quantity
from gpushare_spawner.model.kubernetes.objects import (
    CLAIMS_API,
    DRIVER,
    MEMORY_CAPACITY,
    UNITS_CAPACITY,
    UUID_ATTRIBUTE,
    capacity_of,
    device_name,
    slice_name,
)

log = logging.getLogger(__name__)


API_VERSION = CLAIMS_API.removeprefix("/apis/")
SLICES = f"{CLAIMS_API}/resourceslices"
UNUSABLE = PREFIX + "unusable"
"""Taint key of a GPU that must not get new sessions."""


@dataclass(frozen=True)
class OfferedGpu:
    """A GPU as offered to the scheduler."""

    gpu: Gpu
    units: int
    """Units of 1 % for all claims together, including those in use: more than the GPU has while idle sessions lend
    units."""
    trouble: str | None = None
    """The reason against new sessions, as one word; None if there is no reason."""


def resource_slice(node: str, gpus: Iterable[OfferedGpu], unit_size: int, generation: int, taints: bool) -> Json:
    """Return the slice of a node. `unit_size`: claims are rounded up to a multiple of this number.

    `taints`: whether the server stores device taints. If it does not, a GPU with a trouble is omitted.
    """
    devices = [_device(gpu, unit_size) for gpu in gpus if gpu.units > 0 and (taints or gpu.trouble is None)]
    return {
        "apiVersion": API_VERSION,
        "kind": "ResourceSlice",
        "metadata": {"name": slice_name(node)},
        "spec": {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": generation, "resourceSliceCount": 1},
            "devices": devices,
        },
    }


def lost(desired: Any, stored: Any, where: str = "") -> Iterator[str]:
    """Yield the path of each field that was written but not stored. Fields that the server adds do not count."""
    if isinstance(desired, Mapping):
        for key, value in desired.items():
            path = f"{where}.{key}" if where else key
            if not isinstance(stored, Mapping) or key not in stored:
                if value not in ({}, []):
                    yield path
            else:
                yield from lost(value, stored[key], path)
    elif isinstance(desired, list):
        if not isinstance(stored, list) or len(stored) != len(desired):
            yield where
        else:
            for number, (item, other) in enumerate(zip(desired, stored, strict=True)):
                yield from lost(item, other, f"{where}[{number}]")
    elif desired != stored and not _same_quantity(desired, stored):
        yield where


def says_the_same(desired: Json, stored: Json) -> bool:
    """Return whether the stored slice equals the desired one, except for its generation."""
    spec, other = ({**item["spec"], "pool": {**item["spec"]["pool"], "generation": 0}} for item in (desired, stored))
    # a lost taint is also a difference
    bare = [device for device in other.get("devices") or [] if device.get("taints")]
    tainted = [device for device in spec["devices"] if device.get("taints")]
    return len(bare) == len(tainted) and not list(lost(spec, {"devices": [], **other}))


def _device(offered: OfferedGpu, unit_size: int) -> Json:
    capacity = capacity_of(offered.units, offered.gpu.memory_bytes)
    # There is no validRange.max, because the server rejects a maximum above the value, and the value can decrease.
    smallest = {UNITS_CAPACITY: str(unit_size), MEMORY_CAPACITY: "1Mi"}
    device: Json = {
        "name": device_name(offered.gpu.uuid),
        "allowMultipleAllocations": True,
        "attributes": {
            UUID_ATTRIBUTE: {"string": offered.gpu.uuid},
            "model": {"string": offered.gpu.model[:64]},
            "index": {"int": offered.gpu.index},
        },
        "capacity": {
            name: {
                "value": amount,
                "requestPolicy": {
                    "default": smallest[name], "validRange": {"min": smallest[name], "step": smallest[name]},
                },
            }
            for name, amount in capacity.items()
        },
    }  # fmt: skip
    if offered.trouble is not None:
        device["taints"] = [{"key": UNUSABLE, "value": offered.trouble, "effect": "NoSchedule"}]
    return device


def _same_quantity(left: Any, right: Any) -> bool:
    if not isinstance(left, str) or not isinstance(right, str):
        return False
    try:
        return quantity(left) == quantity(right)
    except ValueError:
        return False


FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0
"""Seconds between tries while the API server does not answer."""
IN_A_ROW = 5
"""Consecutive writes before pauses begin: two agents on one node would undo each other's writes endlessly."""
SOON = 1.0
"""Maximum seconds between two consecutive writes."""
CHECK_EVERY = 30.0
"""Seconds between checks of the slice, in addition to checks after changes."""


class FieldsLost(Exception):
    """Error for fields that a share needs and the API server drops. The message contains the fields and a remedy."""


class PublishedSlice(Background):
    """Watches and writes one slice. A failed write is retried; nothing waits for it.

    After `close` the slice stays: pods keep running, and the kubelet removes the slice if the agent does not return.
    """

    def __init__(
        self, api: ClusterApi, node: str, offered: Callable[[], list[OfferedGpu]], unit_size: int, taints: bool
    ) -> None:
        """`offered` returns the GPUs to offer now. `taints`: see `resource_slice`."""
        self._api = api
        self._node = node
        self._offered = offered
        self._unit_size = unit_size
        self._taints = taints
        self._path = f"{SLICES}/{slice_name(node)}"
        self._stored: Json | None = None
        self._poke = asyncio.Event()
        self._listed = asyncio.Event()
        query = {"fieldSelector": f"metadata.name={slice_name(node)}"}
        self._watched = Watched(
            api, SLICES, "the ResourceSlice of this node", whole, query, self._seen, log, cached=False
        )
        self._trouble = LogOnce(
            log,
            "cannot write the ResourceSlice of this node; no new pod gets a share here",
            "the ResourceSlice of this node can be written again",
        )

    def start(self) -> None:
        """Start, with an immediate first write."""
        self._watched.start()
        super().start()

    def changed(self) -> None:
        """Write the slice soon if it has changed."""
        self._poke.set()

    async def close(self) -> None:
        """Stop."""
        await self._watched.close()
        await super().close()

    def _seen(self) -> None:
        item = next(iter(self._watched.objects.values()), None)
        self._listed.set()
        if item is not None and self._stored is not None and _version(item) < _version(self._stored):
            return  # the watch lags behind the answer to a write
        if item is None and self._stored is not None:
            log.info("the ResourceSlice of this node was deleted; writing it again")
        self._stored = item
        self._poke.set()

    async def _run(self) -> None:
        await self._listed.wait()
        pause = FIRST_PAUSE
        in_a_row, wrote_at = 0, -math.inf
        clock = asyncio.get_running_loop().time
        while True:
            try:
                if await self._write_if_due():
                    in_a_row = in_a_row + 1 if clock() - wrote_at < SOON else 1
                    if in_a_row > IN_A_ROW:
                        await asyncio.sleep(min(FIRST_PAUSE * 2 ** min(in_a_row - IN_A_ROW, 10), LONGEST_PAUSE))
                    wrote_at = clock()
                self._trouble.resolved()
                pause = FIRST_PAUSE
            except Exception as failure:
                if not isinstance(failure, ApiFailure | FieldsLost):
                    log.exception("cannot write the ResourceSlice of this node; retrying")
                self._trouble.about(failure)
                self._poke.set()
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            await set_within(self._poke, CHECK_EVERY)
            self._poke.clear()

    async def _write_if_due(self) -> bool:
        """Write the slice if it has changed. Return whether it has changed."""
        stored = self._stored
        if stored is None:
            desired = self._desired(1)
            await check_stored(self._api, desired)
            writing = self._api.create(SLICES, desired)
        else:
            desired = self._desired(int(stored["spec"]["pool"].get("generation", 0)) + 1)
            if says_the_same(desired, stored):
                return False
            desired["metadata"]["resourceVersion"] = stored["metadata"]["resourceVersion"]
            writing = self._api.replace(self._path, desired)
        try:
            written = await writing
        except ApiFailure as failure:
            if failure.status not in (404, 409):
                raise
            # The slice was created, deleted or changed meanwhile. Read it again.
            await self._read_again()
            return True
        self._answered(written)
        if not says_the_same(desired, written):
            raise FieldsLost(fields_lost(desired, written))
        return True

    def _answered(self, written: Json) -> None:
        """Process the answer to a write, unless the watch has already delivered a later change or deletion."""
        if _version(written) >= _number(self._watched.version):
            self._stored = written
        else:
            self._poke.set()

    async def _read_again(self) -> None:
        try:
            self._stored = await self._api.get(self._path)
        except ApiFailure as failure:
            if failure.status != 404:
                raise
            self._stored = None
        self._poke.set()

    def _desired(self, generation: int) -> Json:
        return resource_slice(self._node, self._offered(), self._unit_size, generation, self._taints)


async def check_stored(api: ClusterApi, desired: Json) -> None:
    """Check with a dry run that the server stores all fields. Raises FieldsLost or ApiFailure.

    In a slice that lost fields, a share would be a whole GPU.
    """
    answer = await api.create(SLICES, desired, dryRun="All")
    if list(lost(desired["spec"], answer.get("spec"))):
        raise FieldsLost(fields_lost(desired, answer))


def fields_lost(desired: Json, stored: Json) -> str:
    """Return a sentence about the fields that the API server has dropped."""
    names = sorted({path.rsplit(".", 1)[-1] for path in lost(desired["spec"], stored.get("spec"))})
    gates = "DRAConsumableCapacity"
    if names == ["taints"]:
        gates = "DRADeviceTaints"
    return (
        f"the API server drops {', '.join(names)} from ResourceSlices: its feature gate {gates} is off (on by default "
        "from Kubernetes 1.36)"
    )


def _version(item: Json) -> int:
    return _number(str(item["metadata"].get("resourceVersion", "")))


def _number(version: str) -> int:
    return int(version) if version.isdecimal() else 0
