"""Kubernetes' quantities as numbers: 500m, 2, 4Gi, 1e3."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

_SUFFIXES = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12), "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40), "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}  # fmt: skip
_QUANTITY = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)(n|u|m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?")


def quantity(value: Any) -> Decimal:
    """Return a quantity of the API server as a number. Raises ValueError for what is none."""
    found = _QUANTITY.fullmatch(str(value).strip())
    if found is None:
        raise ValueError(f"{value!r} is not a quantity: Kubernetes writes them like 500m, 2 or 4Gi")
    return Decimal(found[1]) * _SUFFIXES[found[2] or ""]


def millicores(amounts: Mapping[str, Any]) -> int:
    """Return the CPU in amounts as the API server writes them, in millicores, rounded up."""
    return math.ceil(quantity(amounts.get("cpu", 0)) * 1000)


def memory_bytes(amounts: Mapping[str, Any]) -> int:
    """Return the memory in amounts as the API server writes them, in bytes."""
    return int(quantity(amounts.get("memory", 0)))
