"""The devices that stand for a GPU's units at the kubelet: their ids, and which are offered.

A device is one unit (of `unit_size` share units). The kubelet is told a list; it gives devices from it to pods, and
keeps count of who holds which. A pod's own devices never change; what is lent while it idles is offered as further
devices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass

MAX_ID = 63
"""Characters in a device's id."""
_DIGITS = 4


@dataclass(frozen=True)
class DeviceIds:
    """Ids of one GPU's devices: the GPU's UUID and a number.

    With the UUID they are unique over the node, and a device still says which GPU it is of when the GPUs are numbered
    anew. The number is of fixed length, so that the order of the ids is that of the numbers.
    """

    gpu: str
    """UUID."""

    @property
    def prefix(self) -> str:
        """What all of them begin with."""
        fits = len(self.gpu) <= MAX_ID - _DIGITS - 1 and self.gpu.isascii()
        return f"{self.gpu if fits else hashlib.sha256(self.gpu.encode()).hexdigest()[:32]}-"

    def id(self, number: int) -> str:
        """The id of the device with this number, from 0."""
        if not 0 <= number < 10**_DIGITS:
            raise ValueError(f"a GPU has at most {10**_DIGITS} devices, there is no number {number}")
        return f"{self.prefix}{number:0{_DIGITS}}"

    def number(self, id: str) -> int | None:
        """The inverse; None for an id that is not of this GPU."""
        digits = id.removeprefix(self.prefix)
        if digits == id or len(digits) != _DIGITS or not (digits.isascii() and digits.isdigit()):
            return None
        return int(digits)


def devices_for(units: int, unit_size: int) -> int:
    """How many devices so many share units are; a part of one is a whole one."""
    return -(-units // unit_size)


def offered(capacity: int, held: Collection[int], in_use: int) -> list[int]:
    """The numbers to offer: all that are held, and the lowest free ones.

    `capacity`: devices of the GPU; `in_use`: how many of those held their holders' tiers leave them. As many free ones
    are offered as are not in use; where more is in use than there is (owners are back, borrowers still there), none
    are, until pods end. Only free ones are ever withdrawn: the kubelet then takes nothing from running pods.
    """
    numbers = set(held)
    wanted = len(numbers) + max(0, capacity - in_use)
    number = 0
    while len(numbers) < wanted:
        numbers.add(number)
        number += 1
    return sorted(numbers)


def preferred(available: Iterable[str], must_include: Iterable[str], count: int) -> list[str]:
    """`count` ids with the lowest numbers, as free high ones can be withdrawn later."""
    chosen = sorted(set(must_include))
    rest = sorted(set(available) - set(chosen))
    return [*chosen, *rest][:count]
