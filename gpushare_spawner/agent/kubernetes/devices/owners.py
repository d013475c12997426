"""Who holds which devices: sessions, and grants of which it is not known yet whose they are.

The devices that stand for a GPU's units at the kubelet: their ids, and which are offered.

A device is one unit (of `unit_size` share units). The kubelet is told a list; it gives devices from it to pods, and
keeps count of who holds which. A pod's own devices never change; what is lent while it idles is offered as further
devices.

The folder of each grant: the devices of one GPU that one container was given. It is mounted into the container.

pod_sockets.py says what listens in it. The folders belong to root and are mounted read-only: a container connects to
its socket and writes nothing, whatever user it runs as. The agent relies on that as little as it can: it removes the
files that it made, by their names, and never looks for others.
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

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.agent.state import folder as removal
from gpushare_spawner.agent.state.folder import SOCKET_NAME, Discarded, PathTooLong, SessionFolder
from gpushare_spawner.agent.state.records import PodOwner

log = logging.getLogger(__name__)


MAX_ID = 63
"""Characters in a device's id."""
_DIGITS = 4
_MAX_NAME = MAX_ID - len("-999-") - _DIGITS
_INDEX_AND_NUMBER = re.compile(rf"[0-9]+-[0-9]{{{_DIGITS}}}")
MAX_DEVICES = 10**_DIGITS
"""Of one GPU: those that are free, and those of sessions whose units are lent. Their list is some 600 KB, and a message
to the kubelet may have 4 MiB."""


@dataclass(frozen=True)
class DeviceIds:
    """Ids of one GPU's devices: the GPU's UUID, its index, and a number.

    With the UUID they are unique over the node, and a device still says which GPU it is of when the GPUs are numbered
    anew, as after one that broke. With the index they are others then: to the kubelet they are of another resource, of
    which it gives everything that is not held. The number is of fixed length, so that the order of the ids is that of
    the numbers.
    """

    gpu: str
    """UUID."""
    index: int

    @cached_property
    def _of_gpu(self) -> str:
        fits = len(self.gpu) <= _MAX_NAME and self.gpu.isascii()
        return f"{self.gpu if fits else hashlib.sha256(self.gpu.encode()).hexdigest()[:32]}-"

    @cached_property
    def _of_index(self) -> str:
        return f"{self._of_gpu}{self.index}-"

    def id(self, number: int) -> str:
        """The id of the device with this number, from 0."""
        if not 0 <= number < MAX_DEVICES:
            raise ValueError(f"a GPU has at most {MAX_DEVICES} devices, there is no number {number}")
        return f"{self._of_index}{number:0{_DIGITS}}"

    def number(self, id: str) -> int | None:
        """The inverse; None for an id that is not of this GPU under this index."""
        digits = id.removeprefix(self._of_index)
        if len(digits) != _DIGITS or digits == id or not (digits.isascii() and digits.isdigit()):
            return None
        return int(digits)

    def has(self, id: str) -> bool:
        """Whether the device is of this GPU, whatever index it had when the id was made."""
        rest = id.removeprefix(self._of_gpu)
        return rest != id and _INDEX_AND_NUMBER.fullmatch(rest) is not None


def devices_for(units: int, unit_size: int) -> int:
    """How many devices so many share units are; a part of one is a whole one."""
    return -(-units // unit_size)


def offered(capacity: int, held: Collection[int], in_use: int) -> list[int]:
    """The numbers to offer: all that are held, and the lowest free ones.

    `capacity`: devices of the GPU; `in_use`: how many of those held their holders' tiers leave them. As many free ones
    are offered as are not in use; where more is in use than there is (owners are back, borrowers still there), none
    are, until pods end. Only free ones are ever withdrawn: the kubelet then takes nothing from running pods. There are
    never more than `MAX_DEVICES`.
    """
    numbers = set(held)
    wanted = len(numbers) + max(0, capacity - in_use)
    number = 0
    while len(numbers) < wanted and number < MAX_DEVICES:
        numbers.add(number)
        number += 1
    return sorted(numbers)


def preferred(available: Iterable[str], must_include: Iterable[str], count: int) -> list[str]:
    """`count` ids with the lowest numbers, as free high ones can be withdrawn later."""
    chosen = sorted(set(must_include))
    rest = sorted(set(available) - set(chosen))
    return [*chosen, *rest][:count]


BELOW = "s"
"""The session's folder in a grant's."""


def grant_name(devices: Iterable[str]) -> str:
    """The name of a grant's folder.

    It follows from the ids, which are one pod's alone: whoever sees the ids in the kubelet's list knows the folder,
    also after everything here was lost.
    """
    return hashlib.sha256("\n".join(sorted(devices)).encode()).hexdigest()[:16]


def folder_names(pod: PodOwner) -> tuple[str, ...]:
    """The names of the folders that a session's pod has mounted: its claim's, else one for each grant."""
    return pod.folders or tuple(grant_name(ids) for ids in pod.grants)


def socket_in(folder: Path) -> Path:
    """Where the socket of the session will be that gets this grant's folder."""
    return folder / BELOW / SOCKET_NAME


def make_fresh(folder: Path) -> None:
    """Make an empty folder in place of what an earlier holder of the same devices had. Raises OSError."""
    remove(folder)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir()
    os.chmod(folder, 0o755)


def make(folder: Path) -> None:
    """The folder, if it is not there already. Raises OSError."""
    # containers see their own folder through a mount; on the machine itself nobody is to pass
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    os.chmod(folder, 0o755)


def remove(folder: Path) -> None:
    """Take a grant's folder away; what cannot be removed is left."""
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
    """What a grant's folder is moved to where something else is in it."""
    return Discarded(folder.parent.parent / removal.FOLDER)


class DevicesRefused(Exception):
    """Devices that cannot be given; the message says why. The pod fails its admission, and may be started again."""


@dataclass(frozen=True)
class DeviceGrant:
    """Devices of one GPU that the kubelet gave to one container."""

    gpu: str
    """UUID."""
    devices: frozenset[str]
    """Ids."""
    made_at: float
    """The event loop's time, seconds."""
    asked_for: bool = True
    """The kubelet asked for it; False: it was found in its list, and is none when it is no longer there."""


class HeldDevices:
    """The devices of all GPUs. What sessions hold is in their records; only grants without a session are kept here."""

    def __init__(
        self,
        gpus: Iterable[Gpu],
        capacity_units: int,
        unit_size: int,
        sessions: Mapping[str, Session],
        folder: Path,
        folder_name: Callable[[Iterable[str]], str] = grant_name,
    ) -> None:
        """`capacity_units` of each GPU; `sessions` is looked at again each time; `folder`: of the grants' folders.

        `folder_name` names the folder of devices that were given together.
        """
        self.gpus: dict[str, Gpu] = {gpu.uuid: gpu for gpu in gpus}
        self.ids = {uuid: DeviceIds(uuid, gpu.index) for uuid, gpu in self.gpus.items()}
        self.capacity = capacity_units // unit_size
        self.unit_size = unit_size
        self.folder = folder
        self._folder_name = folder_name
        self._sessions = sessions
        self._offered: dict[str, tuple[set[str], int, list[str]]] = {}
        """GPU -> ids that are held, how many are in use, and what is offered then."""
        self.pending: dict[tuple[str, frozenset[str]], DeviceGrant] = {}

    def offered(self, gpu: str) -> list[str]:
        """The ids to offer to the kubelet now."""
        ids = self.ids[gpu]
        held: set[str] = set()
        in_use = 0
        for session, devices in self._holders(gpu):
            held.update(devices)
            in_use += self._in_use(session, devices)
        for grant in self._pending(gpu):
            in_use += len(grant.devices - held)
            held |= grant.devices
        # looked at every second, and the same most of the time
        if gpu not in self._offered or self._offered[gpu][:2] != (held, in_use):
            # those of an index that the GPU had before count, and are not this resource's
            numbers = {number for number in map(ids.number, held) if number is not None}
            self._offered[gpu] = held, in_use, [ids.id(number) for number in offered(self.capacity, numbers, in_use)]
        return self._offered[gpu][2]

    def ids_of_known_pods(self) -> set[str]:
        """The ids, of all GPUs, that sessions hold whose pods the API server has shown."""
        pods = [session.record.pod for session in self._sessions.values()]
        return {id for pod in pods if pod is not None and pod.uid for ids in pod.devices.values() for id in ids}

    def free_ids(self, gpu: str, claimed: Collection[str]) -> list[str]:
        """As many ids as claims may be given now, the lowest that nobody has.

        `claimed`: the ids of claims that are prepared. They are in use also where the session has ended already: its
        containers may still run.
        """
        held = {id for _, ids in self._holders(gpu) for id in ids}
        held.update(id for grant in self._pending(gpu) for id in grant.devices)
        count = sum(id not in held for id in self.offered(gpu))
        count -= sum(self.ids[gpu].has(id) for id in claimed if id not in held)
        every = map(self.ids[gpu].id, range(MAX_DEVICES))
        return list(itertools.islice((id for id in every if id not in held and id not in claimed), max(0, count)))

    def claimable(self, gpu: str, claimed: Collection[str]) -> int:
        """How many devices claims may have in all. `claimed`: the ids of those that are prepared.

        The scheduler goes by the sum of all claims, and knows no tiers: what sessions with a claim have lent is added
        to the GPU's own devices, and what others use is taken off.
        """
        total = self.capacity
        for session, devices in self._holders(gpu):
            total -= self._in_use(session, devices) - sum(id in claimed for id in devices)
        for grant in self._pending(gpu):
            total -= sum(id not in claimed for id in grant.devices)
        return max(0, total)

    def holders(self, gpu: str, devices: Iterable[str]) -> list[Session]:
        """The sessions that hold any of these."""
        wanted = set(devices)
        return [session for session, held in self._holders(gpu) if not wanted.isdisjoint(held)]

    def check(self, gpu: str, devices: Iterable[str]) -> None:
        """Whether the kubelet may give these to a container. Raises Refused.

        Their holders do not count: the kubelet gives a device again only when the pod that had it has ended.
        """
        wanted = list(devices)
        known = set(self.offered(gpu))
        unknown = sorted(set(wanted) - known)
        if not wanted or len(set(wanted)) < len(wanted):
            raise DevicesRefused("no devices were asked for" if not wanted else "the same device was asked for twice")
        if unknown:
            raise DevicesRefused(
                f"{len(unknown)} of {len(wanted)} devices are not offered (any more), like {unknown[0]}: "
                "their units are taken; start the pod again"
            )
        others = [(session, held) for session, held in self._holders(gpu) if set(wanted).isdisjoint(held)]
        in_use = sum(self._in_use(session, held) for session, held in others)
        in_use += sum(len(one.devices) for one in self._pending(gpu) if one.devices.isdisjoint(wanted))
        if in_use + len(wanted) > self.capacity:
            raise DevicesRefused(
                f"GPU {self.gpus[gpu].index} has {self.capacity} devices and {in_use} are in use: "
                f"{len(wanted)} more are not to be had now; start the pod again"
            )

    def free_for(self, session: Session) -> int:
        """The units that a session can have on its fullest GPU, beside what others use and what was just given away."""
        left = self.capacity
        for gpu in session.gpus:
            used = sum(self._in_use(one, held) for one, held in self._holders(gpu.uuid) if one is not session)
            own = {id for one, held in self._holders(gpu.uuid) if one is session for id in held}
            used += sum(len(one.devices) for one in self._pending(gpu.uuid) if one.devices.isdisjoint(own))
            left = min(left, self.capacity - used)
        return max(0, left) * self.unit_size

    def grant(self, gpu: str, devices: Iterable[str]) -> DeviceGrant:
        """The kubelet gives these to a container; the sessions that had them must have ended. Raises Refused."""
        wanted = frozenset(devices)
        for one in [one for one in self._pending(gpu) if not one.devices.isdisjoint(wanted)]:
            self.forget(one)
        grant = DeviceGrant(gpu, wanted, asyncio.get_running_loop().time())
        try:
            make_fresh(self.folder_of(grant))
        except OSError as error:
            raise DevicesRefused(f"the folder of the session's socket cannot be made: {error}") from None
        self.pending[gpu, grant.devices] = grant
        return grant

    def found(self, gpu: str, devices: frozenset[str]) -> DeviceGrant:
        """The kubelet says that somebody holds these, and no session does: since when is not known."""
        grant = self.pending.get((gpu, devices))
        if grant is None:
            grant = self.pending[gpu, devices] = DeviceGrant(
                gpu, devices, asyncio.get_running_loop().time(), asked_for=False
            )
        return grant

    def settled(self, gpu: str, devices: frozenset[str]) -> None:
        """A session holds these now."""
        self.pending.pop((gpu, devices), None)

    def forget(self, grant: DeviceGrant) -> None:
        """Nobody holds these."""
        self.pending.pop((grant.gpu, grant.devices), None)
        remove(self.folder_of(grant))

    def folder_of(self, grant: DeviceGrant) -> Path:
        """What is mounted into the container."""
        return self.folder / self._folder_name(grant.devices)

    def folders_of(self, given: Iterable[Iterable[str]]) -> tuple[str, ...]:
        """The names of the folders of these grants, for `PodOwner.folders`; empty: they follow from the ids."""
        names = {frozenset(ids): self._folder_name(ids) for ids in given}
        if all(name == grant_name(ids) for ids, name in names.items()):
            return ()
        return tuple(dict.fromkeys(names.values()))

    def remove_unknown_folders(self, listed: Iterable[frozenset[str]]) -> None:
        """Take away folders of grants that nobody holds any more. `listed`: what the kubelet says is held."""
        grants = [grant.devices for grant in self.pending.values()]
        known = {self._folder_name(ids) for ids in [*grants, *listed]}
        for session in self._sessions.values():
            if session.record.pod is not None:
                known.update(folder_names(session.record.pod))
        with contextlib.suppress(FileNotFoundError):
            for path in [path for path in self.folder.iterdir() if path.name not in known]:
                log.info("removing %s, which is of a pod that is gone", path)
                remove(path)

    def gpu_of(self, device: str) -> str | None:
        """The UUID of the GPU that a device is of."""
        return next((uuid for uuid, ids in self.ids.items() if ids.has(device)), None)

    def _holders(self, gpu: str) -> Iterator[tuple[Session, tuple[str, ...]]]:
        for session in self._sessions.values():
            pod = session.record.pod
            if pod is not None and gpu in pod.devices:
                yield session, pod.devices[gpu]

    def _pending(self, gpu: str) -> list[DeviceGrant]:
        return [grant for grant in self.pending.values() if grant.gpu == gpu]

    def _in_use(self, session: Session, devices: tuple[str, ...]) -> int:
        """Devices that a session's tier leaves it: all, whatever its share says, where it has lent nothing.

        After a change of its share: as many as its units are, and they can be more than its pod holds.
        """
        record = session.record
        resized = record.pod is not None and record.pod.placed_units is not None
        if not resized and record.effective_units >= record.request.share_units:
            return len(devices)
        wanted = devices_for(record.effective_units, self.unit_size)
        return wanted if resized else min(len(devices), wanted)
