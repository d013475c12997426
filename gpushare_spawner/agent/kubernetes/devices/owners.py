"""Owners of devices: sessions, and grants without a known pod.

For the kubelet, a device represents `unit_size` share units of a GPU. The agent offers a list of devices, and the
kubelet assigns them to pods and tracks them. A pod's own devices never change; units that an idle pod lends are offered
as additional devices.

Each grant, that is, the devices of one GPU assigned to one container, has a folder that is mounted into the container.
pods/sessions.py listens in it. The folders belong to root and are mounted read-only: a container can connect to its
socket but cannot write, regardless of its user. The agent does not rely on this: it removes the files that it created,
by name, and never searches for others.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gpushare_spawner.agent import state_folder as removal
from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.session_records import PodOwner
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.agent.state_folder import SOCKET_NAME, Discarded, PathTooLong, SessionFolder

log = logging.getLogger(__name__)


MAX_ID = 63
"""Maximum number of characters in a device ID."""
_DIGITS = 4
_MAX_NAME = MAX_ID - len("-999-") - _DIGITS
_INDEX_AND_NUMBER = re.compile(rf"[0-9]+-[0-9]{{{_DIGITS}}}")
MAX_DEVICES = 10**_DIGITS
"""Maximum number of devices of one GPU, including those of sessions with lent units. The list is about 600 KB; the
limit of a message to the kubelet is 4 MiB."""


@dataclass(frozen=True)
class DeviceIds:
    """IDs of one GPU's devices: the GPU's UUID, its index, and a number.

    The UUID makes them unique on the node, and identifies a device's GPU even if GPU indices change, for example after
    a failure. When the index changes, so do the IDs. The kubelet treats them as a new resource and can allocate every
    device that is not in use. The number has a fixed length, so IDs sort like numbers.
    """

    gpu: str
    """UUID of the GPU."""
    index: int

    @cached_property
    def _of_gpu(self) -> str:
        fits = len(self.gpu) <= _MAX_NAME and self.gpu.isascii()
        return f"{self.gpu if fits else hashlib.sha256(self.gpu.encode()).hexdigest()[:32]}-"

    @cached_property
    def _of_index(self) -> str:
        return f"{self._of_gpu}{self.index}-"

    def id(self, number: int) -> str:
        """Return the ID of the device with this number. Numbers start at 0."""
        if not 0 <= number < MAX_DEVICES:
            raise ValueError(f"a GPU has at most {MAX_DEVICES} devices, there is no number {number}")
        return f"{self._of_index}{number:0{_DIGITS}}"

    def number(self, id: str) -> int | None:
        """Return the number in an ID; None if the ID does not belong to this GPU with this index."""
        digits = id.removeprefix(self._of_index)
        if len(digits) != _DIGITS or digits == id or not (digits.isascii() and digits.isdigit()):
            return None
        return int(digits)

    def has(self, id: str) -> bool:
        """Return whether the device belongs to this GPU, regardless of the GPU's index when the ID was created."""
        rest = id.removeprefix(self._of_gpu)
        return rest != id and _INDEX_AND_NUMBER.fullmatch(rest) is not None


def devices_for(units: int, unit_size: int) -> int:
    """Return the number of devices for these share units, rounded up."""
    return -(-units // unit_size)


def offered(capacity: int, held: Collection[int], in_use: int) -> list[int]:
    """Return the numbers to offer: all held numbers, and the lowest free ones.

    `capacity`: the number of the GPU's devices. `in_use`: the number of devices that their holders' tiers leave in use.
    The number of free devices offered equals the number of devices not in use. If more devices are in use than exist
    (owners are active again and borrowers have not ended), no free devices are offered until pods end. Only free
    devices are ever withdrawn, so the kubelet takes nothing from running pods. At most `MAX_DEVICES` are offered.
    """
    numbers = set(held)
    target = len(numbers) + max(0, capacity - in_use)
    number = 0
    while len(numbers) < target and number < MAX_DEVICES:
        numbers.add(number)
        number += 1
    return sorted(numbers)


def preferred(available: Iterable[str], must_include: Iterable[str], count: int) -> list[str]:
    """Return the `count` IDs with the lowest numbers: free devices with high numbers can be withdrawn later."""
    chosen = sorted(set(must_include))
    rest = sorted(set(available) - set(chosen))
    return [*chosen, *rest][:count]


BELOW = "s"
"""Name of the session's folder in a grant's folder."""


def grant_name(devices: Iterable[str]) -> str:
    """Return the name of a grant's folder.

    The name is derived from the IDs, which are unique to one pod. Therefore the agent can find the folder from the
    kubelet's list even after losing its state.
    """
    return hashlib.sha256("\n".join(sorted(devices)).encode()).hexdigest()[:16]


def folder_names(pod: PodOwner) -> tuple[str, ...]:
    """Return the names of the folders mounted by a session's pod: the claim's folder, or one per grant."""
    return pod.folders or tuple(grant_name(ids) for ids in pod.grants)


def socket_in(folder: Path) -> Path:
    """Return the path of the session's socket in this grant's folder."""
    return folder / BELOW / SOCKET_NAME


def make_fresh(folder: Path) -> None:
    """Create an empty folder, replacing the folder of an earlier holder of the same devices. Raises OSError."""
    remove(folder)
    make(folder, exists=False)


def make(folder: Path, exists: bool = True) -> None:
    """Create the folder. Raises OSError. `exists`: whether it may already exist."""
    # Containers reach their folder through a mount; on the machine, only root can enter.
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(exist_ok=exists)
    os.chmod(folder, 0o755)


def remove(folder: Path) -> None:
    """Remove a grant's folder. Files that cannot be removed are left."""
    with contextlib.suppress(OSError, PathTooLong):
        aside = discarded(folder)
        try:
            SessionFolder(folder, BELOW, aside).remove()
            os.rmdir(folder)
        except FileNotFoundError:
            pass
        except OSError:
            aside.take(folder)


def discarded(folder: Path) -> Discarded:
    """Return the destination for folders that contain files other than the agent's."""
    return Discarded(folder.parent.parent / removal.FOLDER)


class DevicesRefused(Exception):
    """Error for devices that cannot be granted, with the reason. The pod fails admission and can be started again."""


@dataclass(frozen=True)
class DeviceGrant:
    """Devices of one GPU that the kubelet assigned to one container."""

    gpu: str
    """UUID of the GPU."""
    devices: frozenset[str]
    """IDs of the devices."""
    made_at: float
    """Event loop time in seconds."""
    requested: bool = True
    """Whether the kubelet requested it.

    False: it is from the kubelet's list, and ends when it disappears from the list.
    """


class AllocatedDevices:
    """The devices of all GPUs. A session's devices are in its record; only grants without a session are stored here."""

    def __init__(
        self,
        gpus: Iterable[Gpu],
        capacity_units: int,
        unit_size: int,
        sessions: Mapping[str, Session],
        folder: Path,
        folder_name: Callable[[Iterable[str]], str] = grant_name,
    ) -> None:
        """`sessions` is reread each time. `capacity_units`: the units of each GPU.

        `folder`: the parent folder of the grants' folders. `folder_name` returns the folder name for devices that were
        assigned together.
        """
        self.gpus: dict[str, Gpu] = {gpu.uuid: gpu for gpu in gpus}
        self.ids = {uuid: DeviceIds(uuid, gpu.index) for uuid, gpu in self.gpus.items()}
        self.capacity = capacity_units // unit_size
        self.unit_size = unit_size
        self.folder = folder
        self._folder_name = folder_name
        self._sessions = sessions
        self._offered: dict[str, tuple[set[str], int, list[str]]] = {}
        """Held IDs, number in use, and the resulting IDs to offer, by GPU."""
        self.pending: dict[tuple[str, frozenset[str]], DeviceGrant] = {}

    def offered(self, gpu: str) -> list[str]:
        """Return the IDs to offer to the kubelet now."""
        ids = self.ids[gpu]
        held: set[str] = set()
        in_use = 0
        for session, devices in self._holders(gpu):
            held.update(devices)
            in_use += self._in_use(session, gpu, devices)
        for grant in self._pending(gpu):
            in_use += len(grant.devices - held)
            held |= grant.devices
        # This is called every second, mostly with the same result.
        if gpu not in self._offered or self._offered[gpu][:2] != (held, in_use):
            # IDs with an earlier index of the GPU count as held, but do not belong to this resource.
            numbers = {number for number in map(ids.number, held) if number is not None}
            self._offered[gpu] = held, in_use, [ids.id(number) for number in offered(self.capacity, numbers, in_use)]
        return self._offered[gpu][2]

    def ids_of_visible_pods(self) -> set[str]:
        """Return the device IDs, on all GPUs, of sessions with a pod that the API server has reported."""
        pods = [session.record.pod for session in self._sessions.values()]
        return {id for pod in pods if pod is not None and pod.uid for ids in pod.devices.values() for id in ids}

    def free_ids(self, gpu: str, claimed: Collection[str]) -> list[str]:
        """Return the IDs that claims can get now, lowest first.

        `claimed`: the IDs of prepared claims. They are in use even after the session has ended, because its containers
        can still be running.
        """
        held = {id for _, ids in self._holders(gpu) for id in ids}
        held.update(id for grant in self._pending(gpu) for id in grant.devices)
        count = sum(id not in held for id in self.offered(gpu))
        count -= sum(self.ids[gpu].has(id) for id in claimed if id not in held)
        every = map(self.ids[gpu].id, range(MAX_DEVICES))
        return list(itertools.islice((id for id in every if id not in held and id not in claimed), max(0, count)))

    def claimable(self, gpu: str, claimed: Collection[str]) -> int:
        """Return the number of devices that all claims together can have.

        `claimed`: the IDs of prepared claims. The scheduler counts the sum of all claims and does not consider tiers:
        units that sessions with a claim have lent are added to the GPU's own devices, and the use by other sessions is
        subtracted.
        """
        total = self.capacity
        for session, devices in self._holders(gpu):
            total -= self._in_use(session, gpu, devices) - sum(id in claimed for id in devices)
        for grant in self._pending(gpu):
            total -= sum(id not in claimed for id in grant.devices)
        return max(0, total)

    def holders(self, gpu: str, devices: Iterable[str]) -> list[Session]:
        """Return the sessions that hold any of these devices."""
        requested = set(devices)
        return [session for session, held in self._holders(gpu) if not requested.isdisjoint(held)]

    def check(self, gpu: str, devices: Iterable[str]) -> None:
        """Check that the kubelet can assign these devices to a container. Raises DevicesRefused.

        Their holders do not count: the kubelet reassigns a device only after the pod that had it has ended.
        """
        requested = list(devices)
        available = set(self.offered(gpu))
        unknown = sorted(set(requested) - available)
        if not requested or len(set(requested)) < len(requested):
            raise DevicesRefused(
                "no devices were requested" if not requested else "the same device was requested twice"
            )
        if unknown:
            raise DevicesRefused(
                f"{len(unknown)} of {len(requested)} devices are not offered (any more), like {unknown[0]}: "
                "their units are taken; start the pod again"
            )
        others = [(session, held) for session, held in self._holders(gpu) if set(requested).isdisjoint(held)]
        in_use = sum(self._in_use(session, gpu, held) for session, held in others)
        in_use += sum(len(grant.devices) for grant in self._pending(gpu) if grant.devices.isdisjoint(requested))
        if in_use + len(requested) > self.capacity:
            raise DevicesRefused(
                f"GPU {self.gpus[gpu].index} has {self.capacity} devices and {in_use} are in use: "
                f"{len(requested)} more are not available now; start the pod again"
            )

    def free_for(self, session: Session, gpu: Gpu) -> int:
        """Return the units that a session can have on one of its GPUs.

        The use by other sessions and by new grants is subtracted.
        """
        uuid = gpu.uuid
        used = sum(self._in_use(holder, uuid, held) for holder, held in self._holders(uuid) if holder is not session)
        own = {id for holder, held in self._holders(uuid) if holder is session for id in held}
        used += sum(len(grant.devices) for grant in self._pending(uuid) if grant.devices.isdisjoint(own))
        return max(0, self.capacity - used) * self.unit_size

    def grant(self, gpu: str, devices: Iterable[str]) -> DeviceGrant:
        """Grant devices to a container. The sessions that had them must have ended. Raises DevicesRefused."""
        requested = frozenset(devices)
        for overlap in [pending for pending in self._pending(gpu) if not pending.devices.isdisjoint(requested)]:
            self.forget(overlap)
        grant = DeviceGrant(gpu, requested, asyncio.get_running_loop().time())
        try:
            make_fresh(self.folder_of(grant))
        except OSError as error:
            raise DevicesRefused(f"the folder of the session's socket cannot be created: {error}") from None
        self.pending[gpu, grant.devices] = grant
        return grant

    def listed_grant(self, gpu: str, devices: frozenset[str]) -> DeviceGrant:
        """Return the grant of devices that the kubelet lists and no session holds.

        If there is no such grant, create one with the current time.
        """
        grant = self.pending.get((gpu, devices))
        if grant is None:
            grant = self.pending[gpu, devices] = DeviceGrant(
                gpu, devices, asyncio.get_running_loop().time(), requested=False
            )
        return grant

    def drop_pending(self, gpu: str, devices: frozenset[str]) -> None:
        """Drop the grant, because a session now holds its devices."""
        self.pending.pop((gpu, devices), None)

    def forget(self, grant: DeviceGrant) -> None:
        """Drop the grant and its folder, because no pod holds its devices."""
        self.pending.pop((grant.gpu, grant.devices), None)
        remove(self.folder_of(grant))

    def folder_of(self, grant: DeviceGrant) -> Path:
        """Return the folder that is mounted into the container."""
        return self.folder / self._folder_name(grant.devices)

    def folders_of(self, given: Iterable[Iterable[str]]) -> tuple[str, ...]:
        """Return the folders of these grants for `PodOwner.folders`; empty if their names are derived from the IDs."""
        names = {frozenset(ids): self._folder_name(ids) for ids in given}
        if all(name == grant_name(ids) for ids, name in names.items()):
            return ()
        return tuple(dict.fromkeys(names.values()))

    def remove_unknown_folders(self, listed: Iterable[frozenset[str]]) -> None:
        """Remove the folders of grants that no pod holds. `listed`: the devices in the kubelet's list."""
        grants = [grant.devices for grant in self.pending.values()]
        current = {self._folder_name(ids) for ids in [*grants, *listed]}
        for session in self._sessions.values():
            if session.record.pod is not None:
                current.update(folder_names(session.record.pod))
        with contextlib.suppress(FileNotFoundError):
            for path in [path for path in self.folder.iterdir() if path.name not in current]:
                log.info("removing %s, whose pod no longer exists", path)
                remove(path)

    def gpu_of(self, device: str) -> str | None:
        """Return the UUID of the GPU of a device."""
        return next((uuid for uuid, ids in self.ids.items() if ids.has(device)), None)

    def _holders(self, gpu: str) -> Iterator[tuple[Session, tuple[str, ...]]]:
        for session in self._sessions.values():
            pod = session.record.pod
            if pod is not None and gpu in pod.devices:
                yield session, pod.devices[gpu]

    def _pending(self, gpu: str) -> list[DeviceGrant]:
        return [grant for grant in self.pending.values() if grant.gpu == gpu]

    def _in_use(self, session: Session, gpu: str, devices: tuple[str, ...]) -> int:
        """Return the number of a GPU's devices that a session's tier leaves in use: all if none are lent.

        If the share was resized, return the devices for its current units, which can exceed the number that the pod
        holds.
        """
        record = session.record
        resized = record.pod is not None and record.pod.placed_units is not None
        if not resized and record.effective_units >= record.request.share_units:
            return len(devices)
        needed = devices_for(record.request.on(gpu, record.effective_units), self.unit_size)
        return needed if resized else min(len(devices), needed)
