"""Kubernetes' quantities: 500m, 2, 4Gi, 1e3."""

from __future__ import annotations

import re
from decimal import Decimal

_SUFFIXES = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12), "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40), "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}  # fmt: skip
_QUANTITY = re.compile(r"^([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)(n|u|m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$")


def quantity(text: str | int | float) -> Decimal:
    """The number. Raises ValueError for what is none."""
    found = _QUANTITY.match(str(text))
    if not found:
        raise ValueError(f"quantities must match the regular expression '{_QUANTITY.pattern}'")
    return Decimal(found[1]) * _SUFFIXES[found[2] or ""]


def canonical(text: str | int | float) -> str:
    """As an API server writes it: no fraction, and the largest suffix of the given kind. 0.5 is 500m, 1000 is 1k.

    Raises ValueError for what is no quantity.
    """
    number = quantity(text)
    if not number:
        return "0"
    binary = str(text).endswith("i")
    suffixes = [(name, factor) for name, factor in _SUFFIXES.items() if name.endswith("i") == binary or not name]
    for name, factor in sorted(suffixes, key=lambda pair: -pair[1]):
        if number == (number / factor).to_integral_value() * factor:
            return f"{int(number / factor)}{name}"
    return f"{int((number / _SUFFIXES['n']).to_integral_value())}n"


def is_extended(resource: str) -> bool:
    """Whether a resource is one that a cluster adds: a name with a domain outside Kubernetes' own."""
    domain, _, name = resource.partition("/")
    return bool(name) and not domain.endswith("kubernetes.io") and not resource.startswith("requests.")
