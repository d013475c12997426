"""Quotas: the guarantees of users and groups, and the limits on their use beyond the guarantees. Pure data.

The rules that use quotas are in the package `quota`. Reference for admins: docs/reference/quotas.md
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, date, datetime, time, timedelta
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple
from zoneinfo import ZoneInfo

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from gpushare_spawner.model.part import SHOWN_LINE, FilePart, MessagePart
from gpushare_spawner.model.quantity import (
    MILLICORES,
    Bytes,
    Cores,
    Seconds,
    TimeOfDay,
    TimeZone,
    parse_seconds,
    whole_millicores,
)
from gpushare_spawner.model.share import UNITS_PER_GPU, written_units
from gpushare_spawner.model.template import PRIORITIES, Priority

HALF_LIFE_SECONDS = 86400.0
"""The default of `Quotas.half_life`, one day. Notebooks are used during working days: use over quota has half the
weight on the next day, and 1 % a week later. Kueue and KAI have no default; Kueue's example for batch jobs, which run
for days, is 168 h."""
MOST_GPUS = 1_000_000
"""Maximum amount of GPUs. A larger amount is a typing error."""
RECLAIM_IDLE_SECONDS = 300.0
"""The default of `Reclaim.idle_after`. Our choice: long enough to read a result, and equal to the time before a
downgrade in the shipped templates."""
RECLAIM_NOTICE_SECONDS = 60.0
"""The default of `Reclaim.notice`. Our choice: a reclaimed share loses no data, so the user only needs time to see the
notice, and the spawn in quota waits that long."""
RECLAIM_STOP_NOTICE_SECONDS = 300.0
"""The default of `Reclaim.stop_notice`, equal to that of a template's `idle.warn_before`, because variables are
lost."""
NAME_TAKEN = "name_taken"
"""Type of the error for two groups or users with the same name; its context has the names and the path of the field."""


class Resource(StrEnum):
    """The resources that quotas count."""

    GPU = "gpu"
    CPU = "cpu"
    MEMORY = "memory"


class ResourceAmounts(NamedTuple):
    """Amounts of the resources that quotas count, each at least 0."""

    units: int = 0
    """Units of 1 % of a GPU."""
    cpu: int = 0
    """Millicores."""
    memory: int = 0
    """Bytes of host memory."""

    def plus(self, other: ResourceAmounts, times: int = 1) -> ResourceAmounts:
        """Return the sum with an amount, taken so many times."""
        units, cpu, memory = other
        return ResourceAmounts(self.units + times * units, self.cpu + times * cpu, self.memory + times * memory)

    def part_of(self, capacity: ResourceAmounts) -> float:
        """Return the dominant share: the largest of the resources' parts of the capacity, 0 for an unknown capacity.

        Lent units can be in use twice, so the result can exceed 1.
        """
        parts = [mine / whole for mine, whole in zip(self, capacity, strict=True) if whole > 0]
        return max(parts, default=0.0)


NOTHING = ResourceAmounts()

Bounds = tuple[int | None, int | None, int | None]
"""Guarantees or maxima in the order of `ResourceAmounts`; None: not given."""


def _gpus(value: Any) -> float:
    """Return a number of GPUs in steps of 0.01. Raises ValueError for other values."""
    advice = "write a number of GPUs in steps of 0.01, like 2 or 2.5"
    return written_units(value, "number of GPUs", advice, least=0, most=MOST_GPUS * UNITS_PER_GPU) / UNITS_PER_GPU


def units_of(gpus: float) -> int:
    """Return an amount of GPUs in units of 1 %."""
    return round(gpus * UNITS_PER_GPU)


Gpus = Annotated[float, BeforeValidator(_gpus, json_schema_input_type=Annotated[float, Field(ge=0, le=MOST_GPUS)])]
"""An amount of GPUs; fractions are allowed."""

_PartOfGpu = Annotated[
    float, BeforeValidator(_gpus, json_schema_input_type=Annotated[float, Field(ge=0.01, le=1)]), Field(gt=0, le=1)
]

Name = Annotated[str, Field(min_length=1, max_length=255), SHOWN_LINE]
"""The name of a JupyterHub group or user: JupyterHub allows 255 characters."""


WINDOWS = {"day": 86400.0, "week": 7 * 86400.0, "month": 30 * 86400.0}
"""Lengths of the named rolling windows in seconds: 24 hours, 7 days, 30 days."""
SHORTEST_WINDOW, LONGEST_WINDOW = 3600.0, 400 * 86400.0
"""Bounds of a rolling window in seconds. Use is counted by the hour; by default, the history keeps names for 400 days.
"""


def _day(value: Any) -> date:
    """Return a date. Raises ValueError with advice for other values."""
    try:
        return value if type(value) is date else date.fromisoformat(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is not a date: write a date like 2026-10-01") from None


_Day = Annotated[date, BeforeValidator(_day)]


class TermDates(FilePart):
    """A window with fixed dates, both included. Days begin at midnight UTC."""

    first: Annotated[_Day, Field(alias="from")]
    """The first day, for example 2026-10-01."""
    last: Annotated[_Day, Field(alias="to")]
    """The last day."""

    @model_validator(mode="after")
    def _ordered(self) -> TermDates:
        if self.last < self.first:
            raise ValueError(f"ends on {self.last}, before it begins on {self.first}: exchange the dates")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """The start and the end in seconds since the epoch."""
        midnights = (datetime(*day.timetuple()[:3], tzinfo=UTC) for day in (self.first, self.last + timedelta(days=1)))
        first, after = midnights
        return first.timestamp(), after.timestamp()


def _window(value: Any) -> float:
    """Return a window's length in seconds. Raises ValueError with advice."""
    if isinstance(value, str) and value in WINDOWS:
        return WINDOWS[value]
    try:
        seconds = parse_seconds(value)
    except ValueError:
        raise ValueError(
            f"{value!r} is not a window: write day, week, month, or a duration like 12h or 14d; for fixed dates give "
            "term instead"
        ) from None
    if not SHORTEST_WINDOW <= seconds <= LONGEST_WINDOW:
        raise ValueError(f"a window has a length from 1h to 400d, not {value}")
    return seconds


class HoursBudget(FilePart):
    """GPU-hours that can be used within a window.

    If they are used up, sessions work only in GPU time and memory that no session within its budget uses. Kernels keep
    running.
    """

    hours: Annotated[float, Field(ge=0, le=1_000_000_000, strict=False)]
    """GPU-hours: a whole GPU for an hour, or a quarter of one for four. With 0, sessions never have units of their own.
    """
    window: (
        Annotated[float, BeforeValidator(_window, json_schema_input_type=Literal["day", "week", "month"] | str | float)]
        | None
    ) = None
    """The time in which use counts: the last 24 hours (`day`), 7 days (`week`) or 30 days (`month`), or a duration from
    `1h` to `400d`, such as `14d`. Either `window` or `term` is required."""
    term: TermDates | None = None
    """Fixed dates instead of a window: `{from: 2026-10-01, to: 2027-01-31}`."""
    counted: Literal["held", "delivered"] = "held"
    """`held`: the units of a session for as long as it has them. Lent units do not count. `delivered`: the time in
    which the session had work on its GPUs."""

    @model_validator(mode="after")
    def _either(self) -> HoursBudget:
        if (self.window is None) == (self.term is None):
            raise ValueError("give either window, such as week, or term with its dates")
        return self

    def bounds(self, now: float) -> tuple[float, float]:
        """Return the start of the window and its end, which is ``now`` if it is rolling, in seconds since the epoch."""
        return self.term.bounds if self.term is not None else (now - (self.window or 0.0), now)


LEAST_LEFT = 1e-6
"""GPU-hours. A smaller remainder is that of floating-point sums, and counts as nothing."""


class BudgetState(MessagePart):
    """A budget at one instant. Amounts are GPU-hours."""

    account: str
    """The key of the account with the budget, see `quota.Account`."""
    user: str = ""
    """The user, of a budget of each user in the account; empty: all servers of the account use it together."""
    hours: float
    """What can be used within the window, granted hours included."""
    granted: float = 0.0
    """The part of it that admins have granted for a time."""
    used: float
    counted: Literal["held", "delivered"] = "held"
    """See `HoursBudget.counted`."""
    window: float | None = None
    """The length of a rolling window in seconds; None: a term."""
    ends_at: float | None = None
    """The end of a term, in seconds since the epoch."""
    more_at: float | None = None
    """When something is left again if the budget is used up, else when the oldest use leaves the window, in seconds
    since the epoch; None: never, or nothing is used."""

    @property
    def left(self) -> float:
        """What is left, at least 0."""
        rest = self.hours - self.used
        return rest if rest > LEAST_LEFT else 0.0

    @property
    def used_up(self) -> bool:
        """Whether nothing is left."""
        return not self.left

    @property
    def part_left(self) -> float:
        """The fraction that is left, from 0 to 1."""
        return self.left / self.hours if self.hours else 0.0

    @cached_property
    def shown(self) -> tuple[str, str, float, bool, float]:
        """What a page shows of it. The use grows constantly, so pages show it in steps of 1 %."""
        return self.account, self.user, self.hours, self.used_up, round(self.part_left, 2)


class BudgetStates(MessagePart):
    """The file in which the service writes the state of all budgets for the hub's form."""

    written_at: float
    """Seconds since the epoch."""
    budgets: tuple[BudgetState, ...] = ()


BUDGETS_FILE = "gpushare-budgets.json"
"""Name of the file for `BudgetStates`, in the folder where hub and service run."""
BUDGETS_AGE = 900.0
"""Seconds after which the file's content is too old to be shown: the service writes it every minute."""


def _several(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


Budgets = Annotated[
    tuple[HoursBudget, ...], BeforeValidator(_several, json_schema_input_type=HoursBudget | tuple[HoursBudget, ...])
]
"""Budgets that apply together. The file can have one budget without a list."""


class PerUser(FilePart):
    """Limits of one user within a quota."""

    servers: Annotated[int, Field(ge=1, strict=True)] | None = None
    """Maximum number of a user's servers with a GPU at the same time in this quota, over all templates. Not given: no
    limit."""
    weight: _PartOfGpu | None = None
    """The maximum fraction of one GPU that all sessions of one user in this quota get together while others compete for
    that GPU, for example 0.5. If their shares add up to more, each gets proportionally less, and the other sessions get
    the rest. A session keeps the value with which it was started. Not given: no limit."""
    budget: Budgets = ()
    """Budget of each user, or a list of budgets that apply together, for example `{hours: 4, window: day}`."""

    @property
    def weight_units(self) -> int | None:
        """`weight` in units of 1 % of a GPU; None: no limit."""
        return None if self.weight is None else units_of(self.weight)


class Reclaim(FilePart):
    """How units of sessions over quota are reclaimed while a spawn in quota waits for them.

    The sessions are downgraded or released. Kernels and their GPU memory stay, unless `stop_after` is given.
    """

    enabled: Annotated[bool, Field(strict=True)] = True
    """Whether units are reclaimed at all. With `false` they become free only when servers end, or by the idle actions
    of their templates."""
    idle_after: Seconds = RECLAIM_IDLE_SECONDS
    """A session that has not used its GPU for this long is idle. Units of idle sessions are reclaimed before those of
    active sessions, regardless of their templates' idle actions. GPU work shorter than `min_use` does not count as
    use."""
    notice: Seconds = RECLAIM_NOTICE_SECONDS
    """The notice period: the time between the notice to the user and the downgrade or release."""
    active_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The minimum that an active session keeps, as a fraction of each of its GPUs. With 0, units of active sessions can
    also be reclaimed for a guarantee of whole GPUs; such a session still gets GPU time, with the lowest weight."""
    stop_after: Seconds | None = None
    """A server with reclaimed units is stopped after this long without GPU work, busy kernels or other activity, while
    a spawn in quota still waits for its GPU. Not given: no server is stopped."""
    stop_notice: Seconds = RECLAIM_STOP_NOTICE_SECONDS
    """The notice period before such a stop."""

    @model_validator(mode="after")
    def _positive(self) -> Reclaim:
        if self.stop_after is not None and self.stop_after <= 0:
            raise ValueError("stop_after must be more than 0 s; leave it out so that no server is stopped")
        return self

    @property
    def active_units(self) -> int:
        """`active_share` in units of 1 %."""
        return units_of(self.active_share)


class CpuAmounts(FilePart):
    """CPU cores that templates guarantee to servers."""

    guarantee: Cores | None = None
    """Guaranteed cores. Not given: no part of the rule that decides which servers are in quota."""
    maximum: Cores | None = None
    """The maximum number of cores. Not given: no maximum."""


class MemoryAmounts(FilePart):
    """Host memory that templates guarantee to servers."""

    guarantee: Bytes | None = None
    """Guaranteed memory. Not given: no part of the rule that decides which servers are in quota."""
    maximum: Bytes | None = None
    """The maximum amount of memory. Not given: no maximum."""


class Quota(FilePart):
    """The quota of a user or a group: guaranteed amounts, and the limits on use beyond them."""

    guarantee: Gpus = 0.0
    """Guaranteed GPUs: spawns within this amount come first in the queue. Not given: 0."""
    maximum: Gpus | None = None
    """The maximum number of GPUs that can be used, including use over quota. Not given: no maximum."""
    weight: Annotated[float, Field(ge=0, le=1_000_000, strict=False)] = 1.0
    """Capacity beyond the guarantees is divided in proportion to the weights of the quotas that request it, among those
    of one group first. With 0, the quota gets only capacity that no other quota requests."""
    cpu: CpuAmounts = CpuAmounts()
    """CPU cores, counted from the guarantees of the servers' templates, with or without a GPU."""
    memory: MemoryAmounts = MemoryAmounts()
    """Host memory, counted in the same way."""
    servers: Annotated[int, Field(ge=1, strict=True)] | None = None
    """Maximum number of servers with a GPU that use the quota at the same time. Not given: no limit."""
    budget: Budgets = ()
    """GPU-hours that all its servers can use together within a window, or a list of such budgets."""
    per_user: PerUser = PerUser()
    """Limits of one user within the quota."""
    priorities: Annotated[tuple[Priority, ...], Field(min_length=1)] = PRIORITIES
    """Priorities that templates of its servers with a GPU can have, for example `[low, normal]`. Not given: all."""

    @model_validator(mode="after")
    def _ordered(self) -> Quota:
        for guarantee, maximum, (field, divisor, unit) in zip(self.reserved, self.maxima, _WRITTEN, strict=True):
            if guarantee is not None and maximum is not None and maximum < guarantee:
                raise ValueError(
                    f"{field and f'{field}: '}the maximum ({maximum / divisor:g}{unit}) is less than the guarantee "
                    f"({guarantee / divisor:g}{unit}): raise the maximum or lower the guarantee"
                )
        return self

    @cached_property
    def guaranteed(self) -> Bounds:
        """The guarantees."""
        return units_of(self.guarantee), _millicores(self.cpu.guarantee), self.memory.guarantee

    @cached_property
    def maxima(self) -> Bounds:
        """The maxima."""
        most = None if self.maximum is None else units_of(self.maximum)
        return most, _millicores(self.cpu.maximum), self.memory.maximum

    @property
    def guaranteed_units(self) -> int:
        """The guaranteed GPUs in units of 1 %."""
        return self.guaranteed[0] or 0

    @property
    def maximum_units(self) -> int | None:
        """The maximum of GPUs in units of 1 %; None if there is none."""
        return self.maxima[0]

    @property
    def parts(self) -> Iterable[Quota]:
        """The quotas within this one."""
        return ()

    @cached_property
    def reserved(self) -> Bounds:
        """The guarantees; where none is given, the sum of those of the quotas within."""
        within = _sums(part.reserved for part in self.parts)
        return _each(theirs if own is None else own for own, theirs in zip(self.guaranteed, within, strict=True))

    @cached_property
    def unshared(self) -> Bounds:
        """What the guarantees exceed those of the quotas within: for any of them."""
        within = _sums(part.reserved for part in self.parts)
        pairs = zip(self.guaranteed, within, strict=True)
        return _each(None if own is None else own - (theirs or 0) for own, theirs in pairs)


_WRITTEN = (("", UNITS_PER_GPU, ""), ("cpu", MILLICORES, ""), ("memory", 2**30, "Gi"))
"""For each resource the field of a quota, and an amount in the file with its unit."""


class Group(Quota):
    """The quota of a JupyterHub group. Only groups without teams have servers of their own."""

    teams: dict[Name, Group] = {}
    """Quotas of the group's teams, by the names of their JupyterHub groups; a team can have teams. Any of them can use
    the part of the group's guarantee that exceeds theirs. If the group's guarantee of GPUs is not given, it is the sum
    of theirs. A group with teams has no `per_user`."""
    users: dict[Name, Quota] = {}
    """Quotas of users within the group's, by user name. These users use them instead of the group's."""

    @model_validator(mode="after")
    def _contains(self) -> Group:
        if self.teams and self.per_user != PerUser():
            raise ValueError("a group with teams has no servers of its own: give per_user in the teams")
        for left, guarantee, (field, divisor, unit) in zip(self.unshared, self.guaranteed, _WRITTEN, strict=True):
            if left is not None and left < 0 and guarantee is not None:
                within = f"{(guarantee - left) / divisor:g}{unit}"
                raise ValueError(
                    f"{field and f'{field}.'}guarantee: its teams and users are guaranteed {within} in all, more than "
                    f"{guarantee / divisor:g}{unit}: raise it to {within}, or lower theirs"
                )
        return self

    @cached_property
    def guaranteed(self) -> Bounds:
        """The guarantees; of GPUs, if none is given, the sum of those of its teams and users."""
        units, *others = super().guaranteed
        within = sum(part.guaranteed_units for part in self.parts)
        return _each([units if "guarantee" in self.model_fields_set else within, *others])

    @property
    def parts(self) -> Iterable[Quota]:
        """The quotas of its teams and users."""
        return (*self.teams.values(), *self.users.values())


def _each(bounds: Iterable[int | None]) -> Bounds:
    units, cpu, memory = bounds
    return units, cpu, memory


def _sums(parts: Iterable[Bounds]) -> Bounds:
    """Return the sum of the bounds of each resource; None where no part has one."""
    given = [[bound for bound in bounds if bound is not None] for bounds in zip(*parts, strict=True)] or [[], [], []]
    return _each(sum(bounds) if bounds else None for bounds in given)


def _millicores(cores: float | None) -> int | None:
    return None if cores is None else whole_millicores(cores)


_Price = Annotated[float, Field(ge=0, le=1_000_000_000, strict=False)]


class GpuPrice(FilePart):
    """The price of GPU models at a time of day. The first entry that fits applies."""

    models: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    """Models, with `*` for any text, for example `["*A100*"]`. Not given: all."""
    start: TimeOfDay | None = None
    """From this time of day on, like `"22:00"`. Not given, with `end`: at all times."""
    end: TimeOfDay | None = None
    """Until this time of day. If it is not later than `start`, it is on the next day. Each hour has the price at its
    start."""
    gpu_hour: _Price
    """Price of a GPU-hour."""

    @model_validator(mode="after")
    def _both(self) -> GpuPrice:
        if (self.start is None) != (self.end is None):
            raise ValueError("give both start and end, or neither")
        return self

    def fits(self, model: str, at: time) -> bool:
        """Return whether it applies to a GPU model at a time of day."""
        if self.start is not None and self.end is not None:
            over_midnight = self.end <= self.start
            if not (at >= self.start or at < self.end if over_midnight else self.start <= at < self.end):
                return False
        return any(fnmatchcase(model, pattern) for pattern in self.models)


class Prices(FilePart):
    """What GPU time costs, for the history. It limits nothing. A change applies to later GPU time."""

    currency: Annotated[str, Field(min_length=1, max_length=16), SHOWN_LINE] = "EUR"
    """Text that is shown with amounts."""
    gpu_hours: tuple[GpuPrice, ...] = ()
    """Prices of GPU-hours. Without an entry that fits, GPU time is free of charge."""
    energy: _Price = 0.0
    """Price of a kWh, in addition."""
    co2: _Price = 0.0
    """Grams of CO2 for each kWh."""
    time_zone: TimeZone = "UTC"
    """The time zone of times of day, for example `Europe/Berlin`."""

    def gpu_hour(self, model: str, at: float) -> float:
        """Return the price of a GPU-hour of a model at an instant, in seconds since the epoch."""
        moment = datetime.fromtimestamp(at, ZoneInfo(self.time_zone)).time()
        return next((price.gpu_hour for price in self.gpu_hours if price.fits(model, moment)), 0.0)


class Quotas(FilePart):
    """A hub's quotas. Raises pydantic.ValidationError, which names each invalid field."""

    groups: dict[Name, Group] = {}
    """Quotas by JupyterHub group. All members of a group share its quota."""
    users: dict[Name, Quota] = {}
    """Quotas by user name."""
    default: Quota = Quota()
    """The quota of each user without a quota as a user or through a group. Each of these users has this quota
    separately. Not given: no guarantee and no maximum."""
    half_life: Seconds = HALF_LIFE_SECONDS
    """Time after which use over quota has half the weight for the order in the queue."""

    reclaim: Reclaim = Reclaim()
    """How units of sessions over quota are reclaimed for spawns in quota."""
    prices: Prices | None = None
    """What GPU time costs. Not given: the history has no prices, and no CO2."""

    @property
    def guaranteed_units(self) -> int:
        """The sum of all guarantees in units of 1 %, without the default quota: its number of users is unknown."""
        return sum(quota.guaranteed_units for quota in (*self.groups.values(), *self.users.values()))

    @property
    def all_quotas(self) -> list[Quota]:
        """The quotas of all groups and users, without the default quota."""
        quotas: list[Quota] = [*self.users.values(), *self.groups.values()]
        for quota in quotas:
            quotas += quota.parts
        return quotas

    @cached_property
    def has_budgets(self) -> bool:
        """Whether any quota has a budget, of its own or for each user."""
        return any(quota.budget or quota.per_user.budget for quota in (self.default, *self.all_quotas))

    @cached_property
    def count_resources(self) -> bool:
        """Whether any quota guarantees or limits CPU or memory, so that servers without a GPU count too."""
        every = [self.default, *self.all_quotas]
        return any(bound is not None for quota in every for bound in (*quota.guaranteed[1:], *quota.maxima[1:]))

    @model_validator(mode="after")
    def _unique(self) -> Quotas:
        if self.half_life <= 0:
            raise ValueError("half_life: must be more than 0 s: write a duration like 24h or 7d")
        entries = [*_entries(self.groups, ("groups",), "a group")]
        entries += [("user", user, ("users", user), "a user") for user in self.users]
        seen: dict[tuple[str, str], str] = {}
        for kind, name, path, place in sorted(entries, key=lambda entry: len(entry[2])):
            if (kind, name) in seen:
                context = {"name": name, "first": seen[kind, name], "path": path, "kind": kind}
                raise PydanticCustomError(NAME_TAKEN, "{name} is {first} already", context)
            seen[kind, name] = place
        return self


def _entries(
    groups: Mapping[str, Group], path: tuple[str, ...], place: str
) -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Yield the kind, the name, the path in the file and the place of each group, and of each user in a group."""
    for name, group in groups.items():
        here = (*path, name)
        yield "group", name, here, place
        yield from _entries(group.teams, (*here, "teams"), f"a team of {name}")
        for user in group.users:
            yield "user", user, (*here, "users", user), f"a user of {name}"
