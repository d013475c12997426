"""Things sorted by two small numbers, so that the best fit is found without looking at all of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple


class Found(NamedTuple):
    """Sorts by the numbers first, then by rank."""

    first: int
    second: int
    rank: int


class CapacityIndex:
    """Ranks (integers that stand for GPUs or nodes) in buckets, one for each pair of numbers.

    Which buckets are not empty is kept in bit masks, so a search costs a few operations for each number there is,
    however many things there are. Numbers below 0 count as 0.
    """

    def __init__(self) -> None:
        self._ranks: dict[tuple[int, int], list[int]] = {}
        self._firsts = 0
        self._seconds: dict[int, int] = {}

    def put(self, rank: int, first: int, second: int) -> None:
        """Put a rank into the bucket of these numbers."""
        first, second = max(first, 0), max(second, 0)
        bucket = self._ranks.setdefault((first, second), [])
        insort(bucket, rank)
        self._firsts |= 1 << first
        self._seconds[first] = self._seconds.get(first, 0) | 1 << second

    def take(self, rank: int, first: int, second: int) -> None:
        """Take a rank out of its bucket. Raises KeyError if it is not in it."""
        first, second = max(first, 0), max(second, 0)
        bucket = self._ranks[first, second]
        position = bisect_left(bucket, rank)
        if position == len(bucket) or bucket[position] != rank:
            raise KeyError(rank)
        del bucket[position]
        if not bucket:
            del self._ranks[first, second]
            self._seconds[first] &= ~(1 << second)
            if not self._seconds[first]:
                del self._seconds[first]
                self._firsts &= ~(1 << first)

    def tightest(self, first: int, second: int) -> Found | None:
        """The lowest rank on the lowest bucket whose numbers are both at least these."""
        return next(self._fitting(_ascending(self._firsts >> first << first), second), None)

    def nearest_below(self, first: int, second: int) -> Found | None:
        """First number less than this, second at least that: the highest first, then the lowest second number."""
        return next(self._fitting(_descending(self._firsts & ((1 << first) - 1)), second), None)

    def _fitting(self, firsts: Iterator[int], second: int) -> Iterator[Found]:
        for first in firsts:
            mask = self._seconds[first] >> second << second
            if mask:
                lowest = (mask & -mask).bit_length() - 1
                yield Found(first, lowest, self._ranks[first, lowest][0])


def _ascending(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _descending(mask: int) -> Iterator[int]:
    while mask:
        highest = mask.bit_length() - 1
        yield highest
        mask ^= 1 << highest
