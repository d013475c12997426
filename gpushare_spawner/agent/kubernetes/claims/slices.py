"""The ResourceSlice of a node's GPUs, as the API server is given it. Pure: slices.py writes it.

A feature gate that is off drops fields without an error, so what the server keeps is compared with what was written.

Keeps the ResourceSlice of this node at the API server what it should be.

Others delete it: the kubelet deletes all slices of its node when it starts, and those of a driver that has been gone
for 30 s. Nothing new is placed here until it is written again, so it is watched.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.kubernetes.api import ApiFailure, ClusterApi, Json
from gpushare_spawner.log_once import LogOnce
from gpushare_spawner.model.kubernetes import (
    CLAIMS_API,
    DRIVER,
    MEMORY_CAPACITY,
    PREFIX,
    UNITS_CAPACITY,
    UUID_ATTRIBUTE,
    capacity_of,
    device_name,
    quantity,
    slice_name,
)

log = logging.getLogger(__name__)


API_VERSION = CLAIMS_API.removeprefix("/apis/")
SLICES = f"{CLAIMS_API}/resourceslices"
UNUSABLE = PREFIX + "unusable"
"""Key of the taint of a GPU that must get no new session."""


@dataclass(frozen=True)
class OfferedGpu:
    """A GPU as the scheduler is to see it."""

    gpu: Gpu
    units: int
    """Units of 1 % that claims may take in all, those that they have taken included: more than the GPU has while idle
    sessions lend theirs."""
    trouble: str | None = None
    """Why no new session may come, in one word; None: one may."""


def resource_slice(node: str, gpus: Iterable[OfferedGpu], unit_size: int, generation: int, taints: bool) -> Json:
    """Return the slice of a node. `unit_size`: claims are rounded up to a multiple of it.

    `taints`: the server keeps taints of devices. Where it does not, a GPU with a trouble is left out.
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


def lost(wanted: Any, kept: Any, where: str = "") -> Iterator[str]:
    """Yield the path of each field that was written and is not kept. What the server adds by itself is no loss."""
    if isinstance(wanted, Mapping):
        for key, value in wanted.items():
            path = f"{where}.{key}" if where else key
            if not isinstance(kept, Mapping) or key not in kept:
                if value not in ({}, []):
                    yield path
            else:
                yield from lost(value, kept[key], path)
    elif isinstance(wanted, list):
        if not isinstance(kept, list) or len(kept) != len(wanted):
            yield where
        else:
            for number, (one, other) in enumerate(zip(wanted, kept, strict=True)):
                yield from lost(one, other, f"{where}[{number}]")
    elif wanted != kept and not _same_quantity(wanted, kept):
        yield where


def says_the_same(wanted: Json, kept: Json) -> bool:
    """Whether a slice as the server keeps it says what it should, whatever its generation is."""
    spec, other = ({**one["spec"], "pool": {**one["spec"]["pool"], "generation": 0}} for one in (wanted, kept))
    # a device that has lost its taint is another one too
    bare = [device for device in other.get("devices") or [] if device.get("taints")]
    tainted = [device for device in spec["devices"] if device.get("taints")]
    return len(bare) == len(tainted) and not list(lost(spec, {"devices": [], **other}))


def _device(offered: OfferedGpu, unit_size: int) -> Json:
    capacity = capacity_of(offered.units, offered.gpu.memory_bytes)
    # no validRange.max: the server refuses one above the value, and the value can fall
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


def _same_quantity(one: Any, other: Any) -> bool:
    if not isinstance(one, str) or not isinstance(other, str):
        return False
    try:
        return quantity(one) == quantity(other)
    except ValueError:
        return False


FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0
"""Seconds between tries while the API server does not answer."""
IN_A_ROW = 5
"""Writes one soon after the other, before pauses begin: two agents of one node would undo each other's without end."""
SOON = 1.0
"""Seconds between two writes that are in a row."""
LOOK_EVERY = 30.0
"""Seconds between looks at the slice, beside those that changes cause."""


class FieldsLost(Exception):
    """The API server does not keep what a share needs; the message says which fields, and what would help."""


class PublishedSlice:
    """Watches and writes one slice. What cannot be written is tried again; nothing waits for it."""

    def __init__(
        self, api: ClusterApi, node: str, offered: Callable[[], list[OfferedGpu]], unit_size: int, taints: bool
    ) -> None:
        """`offered` gives the GPUs as they are to be seen now. `taints`: see `resource_slice`."""
        self._api = api
        self._node = node
        self._offered = offered
        self._unit_size = unit_size
        self._taints = taints
        self._path = f"{SLICES}/{slice_name(node)}"
        self._stored: Json | None = None
        self._heard = 0
        """The newest version that the watch has told of, a deletion included."""
        self._poke = asyncio.Event()
        self._listed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._trouble = LogOnce(
            log,
            "cannot write the ResourceSlice of this node; no new pod gets a share here",
            "the ResourceSlice of this node is written again",
        )
        self._unseen = LogOnce(
            log, "cannot read the ResourceSlice of this node; retrying", "the ResourceSlice of this node is read again"
        )

    def start(self) -> None:
        """Begin, with a first write at once."""
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._keep())]

    def changed(self) -> None:
        """Look soon whether something is to be written."""
        self._poke.set()

    async def close(self) -> None:
        """Stop. The slice stays: pods run on, and the kubelet removes it when the agent stays away."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self) -> None:
        pause = FIRST_PAUSE
        query = {"fieldSelector": f"metadata.name={slice_name(self._node)}"}
        while True:
            try:
                answer = await self._api.list(SLICES, **query)
                self._heard = max(self._heard, _version(answer))
                self._seen(answer["items"][0] if answer["items"] else None)
                self._listed.set()
                self._unseen.settled()
                async for event in self._api.watch(SLICES, str(answer["metadata"]["resourceVersion"]), **query):
                    if event["type"] != "BOOKMARK":
                        self._heard = max(self._heard, _version(event["object"]))
                        self._seen(event["object"] if event["type"] != "DELETED" else None)
                    pause = FIRST_PAUSE
                # a server that ends watches at once must not be asked without end
                await asyncio.sleep(0.05)
                continue
            except ApiFailure as failure:
                if failure.status != 410:
                    self._unseen.about(failure)
            except Exception:
                log.exception("watching the ResourceSlice of this node failed; retrying")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _seen(self, item: Json | None) -> None:
        if item is not None and self._stored is not None and _version(item) < _version(self._stored):
            return  # the watch is behind what a write was answered
        if item is None and self._stored is not None:
            log.info("the ResourceSlice of this node was deleted; it is written again")
        self._stored = item
        self._poke.set()

    async def _keep(self) -> None:
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
                self._trouble.settled()
                pause = FIRST_PAUSE
            except Exception as failure:
                if not isinstance(failure, ApiFailure | FieldsLost):
                    log.exception("cannot write the ResourceSlice of this node; retrying")
                self._trouble.about(failure)
                self._poke.set()
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            try:
                async with asyncio.timeout(LOOK_EVERY):
                    await self._poke.wait()
            except TimeoutError:
                pass
            self._poke.clear()

    async def _write_if_due(self) -> bool:
        """Return whether something was to be written."""
        stored = self._stored
        if stored is None:
            await self._create(self._wanted(1))
            return True
        wanted = self._wanted(int(stored["spec"]["pool"].get("generation", 0)) + 1)
        if says_the_same(wanted, stored):
            return False
        wanted["metadata"]["resourceVersion"] = stored["metadata"]["resourceVersion"]
        try:
            written = await self._api.replace(self._path, wanted)
        except ApiFailure as failure:
            if failure.status not in (404, 409):
                raise
            # deleted or changed meanwhile: the watch says how it is
            await self._read_again()
            return True
        self._answered(written)
        if not says_the_same(wanted, written):
            raise FieldsLost(fields_lost(wanted, written))
        return True

    async def _create(self, wanted: Json) -> None:
        await check_kept(self._api, wanted)
        try:
            written = await self._api.create(SLICES, wanted)
        except ApiFailure as failure:
            if failure.status != 409:
                raise
            await self._read_again()
            return
        self._answered(written)

    def _answered(self, written: Json) -> None:
        """Take what a write was answered, unless the watch was faster and has told of a later change or deletion."""
        if _version(written) >= self._heard:
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

    def _wanted(self, generation: int) -> Json:
        return resource_slice(self._node, self._offered(), self._unit_size, generation, self._taints)


async def check_kept(api: ClusterApi, wanted: Json) -> None:
    """Try the creation of a slice without making it: a share in a slice that lost fields would be a whole GPU. Raises
    FieldsLost or ApiFailure."""
    answer = await api.create(SLICES, wanted, dryRun="All")
    if list(lost(wanted["spec"], answer.get("spec"))):
        raise FieldsLost(fields_lost(wanted, answer))


def fields_lost(wanted: Json, kept: Json) -> str:
    """Return a sentence about what the API server has dropped."""
    names = sorted({path.rsplit(".", 1)[-1] for path in lost(wanted["spec"], kept.get("spec"))})
    gates = "DRAConsumableCapacity"
    if names == ["taints"]:
        gates = "DRADeviceTaints"
    return (
        f"the API server drops {', '.join(names)} from ResourceSlices: its feature gate {gates} is off (on by default "
        "from Kubernetes 1.36)"
    )


def _version(item: Json) -> int:
    version = str(item["metadata"].get("resourceVersion", ""))
    return int(version) if version.isdecimal() else 0
