"""The devices that stand for a GPU's units at the kubelet: their ids, and which are offered.

A device is one unit (of `unit_size` share units). The kubelet is told a list; it gives devices from it to pods, and
keeps count of who holds which. A pod's own devices never change; what is lent while it idles is offered as further
devices.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

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
