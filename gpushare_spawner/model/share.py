"""A session's share, its tier, its id, the causes of idle actions, and the limits of its device memory. Pure data.

Does not import pydantic, so that the notebook server can import this module quickly.

The placement of a share is in `model.layers`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import IntEnum, StrEnum
from typing import Any, Literal, get_args
from urllib.parse import quote, unquote

UNITS_PER_GPU = 100
"""Share units on one physical GPU; one unit is 1 % of it."""
MOST_GPUS = 64
"""Most GPUs of one share."""


@dataclass(frozen=True, order=True)
class Share:
    """``units`` of 1 % on each of ``count`` GPUs. Raises ValueError for impossible numbers."""

    units: int = UNITS_PER_GPU
    count: int = 1
    last_units: int = 0
    """Units on the last of several GPUs if these are fewer than on each of the others; 0: as many."""

    def __post_init__(self) -> None:
        if type(self.units) is not int or not 1 <= self.units <= UNITS_PER_GPU:
            raise ValueError(f"a share has 1 to {UNITS_PER_GPU} units of 1 % per GPU, not {self.units!r}")
        if type(self.count) is not int or not 1 <= self.count <= MOST_GPUS:
            raise ValueError(f"a share is on 1 to {MOST_GPUS} GPUs, not {self.count!r}")
        if type(self.last_units) is not int or not 0 <= self.last_units < self.units:
            raise ValueError(
                f"the last GPU has fewer than the {self.units} units of the others, not {self.last_units!r}"
            )
        if self.last_units and self.count < 2:
            raise ValueError("a share with fewer units on the last GPU is on at least 2 GPUs")

    @classmethod
    def from_fraction(cls, value: Any, count: int = 1) -> Share:
        """Return the share for 0.25, "0.25" or 1, on each of some GPUs. Raises ValueError with advice.

        1.5 is one whole GPU and half of another, and needs no count.
        """
        if count > 1:
            return cls(units_from_fraction(value), count)
        advice = "write a fraction from 0.01 to 64 in steps of 0.01, like 0.25, or 1.5 for one GPU and half of another"
        units = written_units(value, "fraction", advice, least=1, most=MOST_GPUS * UNITS_PER_GPU)
        whole, last = divmod(units, UNITS_PER_GPU)
        if not whole or not last:
            return cls(UNITS_PER_GPU if whole else last, max(1, whole))
        return cls(UNITS_PER_GPU, whole + 1, last)

    @property
    def fraction(self) -> float:
        """The share in GPUs: 0.25 for 25 units, 2.0 for two whole GPUs."""
        return self.total_units / UNITS_PER_GPU

    @property
    def total_units(self) -> int:
        """The total units on all GPUs."""
        return self.units * (self.count - 1) + self.least_units

    @property
    def least_units(self) -> int:
        """The units on the last GPU, which has no more than each of the others."""
        return self.last_units or self.units

    @property
    def each(self) -> tuple[int, ...]:
        """The units on each GPU, in the order of the GPUs."""
        return (*(self.units,) * (self.count - 1), self.least_units)

    def __str__(self) -> str:
        each, last = (f"{units / UNITS_PER_GPU:.2f}" for units in (self.units, self.last_units))
        if self.units == UNITS_PER_GPU:
            return f"{self.fraction:.2f} GPU" if self.last_units else f"{self.count} GPU" + "s" * (self.count > 1)
        if self.last_units:
            return f"{self.count - 1} × " * (self.count > 2) + f"{each} + {last} GPU"
        return f"{self.count} × " * (self.count > 1) + f"{each} GPU"


def units_on(gpu: str, gpus: Sequence[str], units: int, last_units: int) -> int:
    """Return the units of a session on one of its GPUs: at most ``units``, and on the last at most ``last_units``.

    Both by the share or by its tier. ``last_units`` 0: as many on the last GPU as on the others.
    """
    return min(units, last_units) if last_units and gpu == gpus[-1] else units


def units_on_all(gpus: Sequence[str], units: int, last_units: int) -> int:
    """Return the sum of a session's units on all its GPUs, see `units_on`."""
    if not last_units:
        return units * len(gpus)
    return sum([units_on(gpu, gpus, units, last_units) for gpu in gpus])


def stated_on(gpu: str, gpus: Sequence[str], each: Sequence[int], otherwise: int) -> int:
    """Return the units on one of a session's GPUs from those on each; ``otherwise`` if these are not stated."""
    return each[gpus.index(gpu)] if len(each) == len(gpus) else otherwise


def borrowed_as(units: Sequence[int], each: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Return a session's ``borrowed_units`` and ``borrowed_each``, from its units and the borrowed ones on each GPU.

    ``borrowed_units`` is right for the GPU with the fewest owned units of those with borrowed units, and for all GPUs
    if ``borrowed_each`` is empty.
    """
    owned = min([units[0], *(here - borrowed for here, borrowed in zip(units, each, strict=True) if borrowed)])
    same = all(borrowed == max(0, here - owned) for here, borrowed in zip(units, each, strict=True))
    return units[0] - owned, () if same else tuple(each)


def choice_of(share: Share) -> int:
    """Return the number for a share among those of equally many GPUs: its units on each, or 150 for 100 and 50."""
    return share.total_units if share.last_units else share.units


def chosen(choice: int, gpus: int) -> Share:
    """Return the share for a number of `choice_of`."""
    whole, last = divmod(choice, UNITS_PER_GPU)
    return Share(UNITS_PER_GPU, whole + 1, last) if whole and last else Share(choice, gpus)


def borrowed_in_use(share_units: int, borrowed_units: int, guaranteed_units: int) -> int:
    """Return the borrowed units that a session still has.

    Units that their owners have reclaimed and units that the session's tier has taken do not count.
    ``guaranteed_units``: the session's current units while all others work.
    """
    owned = max(0, share_units - borrowed_units)
    return min(borrowed_units, max(0, guaranteed_units - owned))


def units_from_fraction(value: Any) -> int:
    """Turn a fraction of a GPU (number or decimal string) into units of 1 %.

    Raises ValueError for a value that is not a number, is outside 0.01 to 1, or is finer than 0.01.
    """
    advice = "write a fraction of one GPU from 0.01 to 1 in steps of 0.01, like 0.25; for more than one GPU add 'count'"
    return written_units(value, "fraction", advice, least=1, most=UNITS_PER_GPU)


def written_units(value: Any, noun: str, advice: str, least: int, most: int) -> int:
    """Return an amount of GPUs (number or decimal string) in units of 1 %.

    Raises ValueError with the advice for a value that is not a number, is out of bounds, or is finer than 0.01.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str, Decimal)):
        raise ValueError(f"{value!r} is not a {noun}: {advice}")
    try:
        # through str(), so that 0.29 becomes 29 units and not 28.999...
        units = Decimal(str(value).strip()) * UNITS_PER_GPU
    except ArithmeticError:  # not a number, or too large even for Decimal
        units = Decimal("NaN")
    if units.is_nan() or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{value!r} is not a {noun}: {advice}")
    if not (0 < units <= most or units == least):
        raise ValueError(f"{value!r} is out of range: {advice}")
    if units != units.to_integral_value():
        raise ValueError(f"{value!r} is finer than 0.01: {advice}")
    return int(units)


@dataclass(frozen=True)
class NeighbourRules:
    """The labels of a session, and its rules for other sessions on its GPUs."""

    labels: tuple[str, ...] = ()
    apart_from: tuple[str, ...] = ()
    """Labels of sessions that are never on the same GPU."""
    alone: bool = False
    """Whether no other session is on its GPUs."""

    @classmethod
    def together(cls, rules: Iterable[NeighbourRules]) -> NeighbourRules:
        """Return the labels and rules of several sessions together."""
        several = [rule for rule in rules if rule is not NO_NEIGHBOUR_RULES]
        if not several:
            return NO_NEIGHBOUR_RULES
        labels = {label for rule in several for label in rule.labels}
        apart_from = {label for rule in several for label in rule.apart_from}
        return cls(tuple(sorted(labels)), tuple(sorted(apart_from)), any(rule.alone for rule in several))

    def accept(self, others: NeighbourRules) -> bool:
        """Return whether the labels of both sides permit them on the same GPU; `alone` is not considered."""
        return frozenset(self.apart_from).isdisjoint(others.labels) and frozenset(others.apart_from).isdisjoint(
            self.labels
        )


NO_NEIGHBOUR_RULES = NeighbourRules()


class Tier(StrEnum):
    """The tier of a session, from the full share down to none.

    The service decides on deeper tiers, one at a time. The agent restores ACTIVE by itself as soon as GPU work counts
    as use of the share, see `UseRule`.
    """

    ACTIVE = "active"
    """The full share."""
    DOWNGRADED = "downgraded"
    """The template's smaller share; the other units are lent."""
    RELEASED = "released"
    """No units: all are lent. The session's memory can be paged out; its kernels keep running."""
    STOPPED = "stopped"
    """The notebook server is stopped."""

    @property
    def depth(self) -> int:
        """The depth, from 0 for ACTIVE to 3 for STOPPED; also the tier's number in the wire protocol."""
        return _DEPTH[self]


# a table, because the culler reads depths several times per session
_DEPTH = {tier: depth for depth, tier in enumerate(Tier)}


@dataclass(frozen=True)
class UseRule:
    """Rule for the GPU work that counts as use of a share.

    GPU time is summed up to `min_use` and decays linearly over `window`. Work counts as use when the sum reaches
    `min_use`: one piece of work of that length, or shorter work that takes more than `min_use` in each window. Raises
    ValueError.
    """

    min_use: float = 0.0
    """GPU seconds, 0 or more; 0: all GPU work counts."""
    window: float = 300.0
    """Seconds, more than 0."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_use < math.inf:
            raise ValueError(f"min_use is {self.min_use}; it is a finite number of seconds, 0 or more")
        if not 0 < self.window < math.inf:
            raise ValueError(f"window is {self.window}; it is a finite number of seconds, more than 0")


def voids_idle_action(
    busy: bool,
    last_gpu_activity: float | None,
    gpu_seconds: float,
    if_idle_since: float | None,
    if_gpu_seconds: float | None,
) -> bool:
    """Return whether a session has worked since the service decided on an idle action.

    The first three describe the session now: whether a burst runs or waits, the end of the last burst (seconds since
    the epoch), and the GPU seconds. `if_gpu_seconds`: GPU seconds above which its work counts as use; None: all work
    after `if_idle_since` counts, or none if that is also None.
    """
    if if_gpu_seconds is not None:
        return gpu_seconds > if_gpu_seconds
    return if_idle_since is not None and (busy or (last_gpu_activity or 0.0) > if_idle_since)


MAX_LENGTH = 6200
"""Maximum characters of a session id. JupyterHub limits the names of users and servers to 255 characters each. A
character has at most 4 bytes in UTF-8, and each byte takes 3 characters in the id."""


def session_id(user: str, server: str = "") -> str:
    """Return the session id of a user's server; the default server has no name. The inverse of `split_session_id`."""
    # quote() with these safe characters never returns '+', so it separates the two parts
    return f"{_quoted(user)}+{_quoted(server)}" if server else _quoted(user)


def split_session_id(value: str) -> tuple[str, str]:
    """Return the user and the server name of a session id."""
    user, _, server = value.partition("+")
    return unquote(user.replace("=", "%")), unquote(server.replace("=", "%"))


def _quoted(name: str) -> str:
    # '%' is not allowed in a session id, so '=' replaces it; a real '=' is quoted
    return quote(name, safe="@._:~-").replace("%", "=")


class IdleCause(StrEnum):
    """The rule that leads to an idle action. A notice includes it, so its text can explain how to keep the share."""

    IDLE = "idle"
    """The session was idle for the time in its template. GPU work, or for a stop any activity, prevents the action."""
    MAX_AGE = "max-age"
    """The server has run for the maximum time allowed. Nothing prevents the action."""
    OTHER = "other"
    """A cause from a newer version."""
    RECLAIM = "reclaim"
    """A spawn in quota waits for units of this session, which is over quota. GPU work does not prevent the action."""
    BUDGET = "budget"
    """A budget of the session is used up. GPU work does not prevent the action."""

    @classmethod
    def _missing_(cls, value: Any) -> IdleCause:
        return cls.OTHER

    @property
    def averted_by_work(self) -> bool:
        """Whether GPU work prevents the action, so that its notice is withdrawn when work begins."""
        return self is not IdleCause.MAX_AGE and not self.makes_way

    @property
    def makes_way(self) -> bool:
        """Whether the session makes way for others, also while it works."""
        return self in (IdleCause.RECLAIM, IdleCause.BUDGET)


class MemoryLimit(IntEnum):
    """The limit that refuses an allocation, as in RESERVED, where 0 means a granted allocation."""

    SESSION = 1
    """The template's `gpu.memory.limit`, over all processes of the session."""
    SESSION_HOST_MEMORY = 2
    """The host memory of the session's server. Memory that could not be paged out is not allocated."""
    NODE_HOST_MEMORY = 3
    """The host memory that the node has for paged-out memory."""

    @property
    def label(self) -> MemoryLimitName:
        """The name in reports and metrics."""
        return _NAMES[self - 1]


MemoryLimitName = Literal["session", "session_host_memory", "node_host_memory"]
"""Names in the order of `MemoryLimit`."""
_NAMES: tuple[MemoryLimitName, ...] = get_args(MemoryLimitName)


ADVICE_PERIOD = 7 * 86400.0
"""Seconds of the past that advice on a share considers: a week has all days of a user's work."""


@dataclass(frozen=True)
class SizeAdvice:
    """What the record of a session's GPU work says about the size of its share, see `arbiter.right_size`."""

    units: int
    """The share that the session had."""
    advised_units: int
    """The share that would have been better; the same: there is no advice."""
    since: float
    """The first replayed burst, in seconds since the epoch."""
    until: float
    bursts: int
    """Number of replayed bursts."""
    gpu_seconds: float
    waited_seconds: float
    """Recorded wait of these bursts for other sessions."""
    later: int = 0
    """Number of bursts that would have ended noticeably later with the advised share."""
    later_seconds: float = 0.0
    """Sum of the seconds by which they would have ended later."""
    saved_seconds: float = 0.0
    """Wait that the advised share would have saved."""
    freed_gpu_seconds: float = 0.0
    """GPU time that the advised share would have left to others: units by the time that the session held them."""
    memory_p50_bytes: int = 0
    memory_p95_bytes: int = 0
    memory_peak_bytes: int = 0
