"""How the scheduler knows the GPUs of a node: a resource for each GPU. Nodes of other layers have one for observers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpushare_spawner.model.kubernetes.prefix import PREFIX

RESOURCE_PREFIX = PREFIX + "gpu-"
"""One extended resource per physical GPU: the scheduler then keeps all units of a share on one GPU."""

OBSERVER = PREFIX + "observer"
"""The extended resource of an agent that only observes: a pod that has one of it gets a socket and the library."""


def resource_name(gpu_index: int) -> str:
    """The extended resource of the node's GPU of that index."""
    if gpu_index < 0:
        raise ValueError(f"a GPU's index is 0 or more, not {gpu_index}")
    return f"{RESOURCE_PREFIX}{gpu_index}"


def gpu_index_of(resource: str) -> int | None:
    """The inverse of `resource_name`; None for a resource that is not ours."""
    digits = resource.removeprefix(RESOURCE_PREFIX)
    if digits == resource or not re.fullmatch(r"0|[1-9]\d*", digits, re.ASCII):
        return None
    return int(digits)


def resource_limits(share_units: int, gpu_indices: Iterable[int], unit_size: int = 1) -> dict[str, str]:
    """The limits of a notebook container: so many resource units on each of its GPUs.

    `unit_size` is what one device of the plugin stands for, in share units of 1 %. A share that is no multiple of it
    is rounded up, since rounded down it would promise what the scheduler has not set aside.
    """
    if unit_size < 1:
        raise ValueError(f"the unit size is 1 share unit or more, not {unit_size}")
    amount = str(-(-share_units // unit_size))
    return {resource_name(index): amount for index in gpu_indices}
