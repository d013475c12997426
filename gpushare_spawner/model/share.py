"""A share: the part of a GPU that a session is entitled to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

UNITS_PER_GPU = 100
"""Share units on one physical GPU; one unit is 1 % of it."""


@dataclass(frozen=True, order=True)
class Share:
    """``units`` of 1 % on each of ``count`` GPUs.

    A fraction is on one GPU; a share of several GPUs has whole ones. Raises ValueError for other values.
    """

    units: int = UNITS_PER_GPU
    count: int = 1

    def __post_init__(self) -> None:
        if type(self.units) is not int or not 1 <= self.units <= UNITS_PER_GPU:
            raise ValueError(f"a share has 1 to {UNITS_PER_GPU} units of 1 % per GPU, not {self.units!r}")
        if type(self.count) is not int or not 1 <= self.count <= 64:
            raise ValueError(f"a share is on 1 to 64 GPUs, not {self.count!r}")
        if self.count > 1 and self.units != UNITS_PER_GPU:
            raise ValueError("a fraction is on one GPU; a share of several GPUs has whole GPUs")

    @classmethod
    def from_fraction(cls, value: Any) -> Share:
        """Return the share for 0.25, "0.25" or 1. Raises ValueError, which says what would be right."""
        return cls(units=units_from_fraction(value))

    @property
    def fraction(self) -> float:
        """The share in GPUs: 0.25 for 25 units, 2.0 for two whole GPUs."""
        return self.units * self.count / UNITS_PER_GPU

    @property
    def total_units(self) -> int:
        """The units on all GPUs together."""
        return self.units * self.count

    def __str__(self) -> str:
        if self.units == UNITS_PER_GPU:
            return f"{self.count} GPU" if self.count == 1 else f"{self.count} GPUs"
        return f"{self.fraction:.2f} GPU"


def borrowed_in_use(share_units: int, borrowed_units: int, guaranteed_units: int) -> int:
    """Return how many of a session's borrowed units are its now: not those that their owners have reclaimed, nor those
    that the session's own tier has taken. ``guaranteed_units``: what the session gets now while all others work.
    """
    owned = max(0, share_units - borrowed_units)
    return min(borrowed_units, max(0, guaranteed_units - owned))


def units_from_fraction(value: Any) -> int:
    """Turn a fraction of a GPU (number or decimal string) into units of 1 %.

    Raises ValueError for what is no number, not above 0, above 1, or finer than 0.01.
    """
    advice = "write a fraction of one GPU from 0.01 to 1 in steps of 0.01, like 0.25; for more than one GPU use 'count'"
    if isinstance(value, bool) or not isinstance(value, (int, float, str, Decimal)):
        raise ValueError(f"{value!r} is not a fraction: {advice}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value!r} is not a fraction: {advice}")
    try:
        # str() first: 0.29 must become 29 units, not 28.999...
        number = Decimal(str(value).strip())
    except InvalidOperation:
        raise ValueError(f"{value!r} is not a fraction: {advice}") from None
    if not number.is_finite() or not 0 < number <= 1:
        raise ValueError(f"{value!r} is out of range: {advice}")
    units = number * UNITS_PER_GPU
    if units != units.to_integral_value():
        raise ValueError(f"{value!r} is finer than 0.01: {advice}")
    return int(units)
