"""Quotas: the guarantees of users and groups, and the limits on their use beyond the guarantees. Pure data.

The rules that use quotas are in the package `quota`. Reference for admins: docs/reference/quotas.md
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from gpushare_spawner.model.part import SHOWN_LINE, FilePart
from gpushare_spawner.model.quantity import Seconds
from gpushare_spawner.model.share import UNITS_PER_GPU, written_units

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
"""Type of the error for two groups with the same name; its context has the name and the department."""


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


class PerUser(FilePart):
    """Limits of one user within a quota."""

    servers: Annotated[int, Field(ge=1, strict=True)] | None = None
    """Maximum number of a user's servers with a GPU at the same time in this quota, over all templates. Not given: no
    limit."""
    weight: _PartOfGpu | None = None
    """The maximum fraction of one GPU that all sessions of one user in this quota get together while others compete for
    that GPU, for example 0.5. If their shares add up to more, each gets proportionally less, and the other sessions get
    the rest. A session keeps the value with which it was started. Not given: no limit."""

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


class Amounts(FilePart):
    """A guaranteed amount of GPUs, and the limits on use beyond it."""

    guarantee: Gpus = 0.0
    """Guaranteed GPUs: spawns within this amount come first in the queue. Not given: 0."""
    maximum: Gpus | None = None
    """The maximum number of GPUs that can be used, including use over quota. Not given: no maximum."""
    weight: Annotated[float, Field(ge=0, le=1_000_000, strict=False)] = 1.0
    """Capacity beyond the guarantees is divided in proportion to the weights of the quotas that request it. With 0, the
    quota gets only capacity that no other quota requests."""

    @model_validator(mode="after")
    def _ordered(self) -> Amounts:
        if self.maximum is not None and self.maximum < self.guarantee:
            raise ValueError(
                f"the maximum ({self.maximum:g}) is less than the guarantee ({self.guarantee:g}): "
                "raise the maximum or lower the guarantee"
            )
        return self

    @property
    def guaranteed_units(self) -> int:
        """The guarantee in units of 1 %."""
        return units_of(self.guarantee)

    @property
    def maximum_units(self) -> int | None:
        """The maximum in units of 1 %; None if there is none."""
        return None if self.maximum is None else units_of(self.maximum)


class Quota(Amounts):
    """The quota of a user, a group or a team."""

    servers: Annotated[int, Field(ge=1, strict=True)] | None = None
    """Maximum number of servers with a GPU that use the quota at the same time. Not given: no limit."""
    per_user: PerUser = PerUser()
    """Limits of one user within the quota."""


class Group(Quota):
    """The quota of a JupyterHub group. A group with teams is a department: only its teams have servers."""

    teams: dict[Name, Quota] = {}
    """Quotas of the department's teams, by the names of their JupyterHub groups. Any of the teams can use the part of
    the department's guarantee that exceeds the teams' guarantees. If the department's guarantee is not given, it is the
    sum of the teams' guarantees. A department has no `servers` and no `per_user`: its teams have them."""

    @model_validator(mode="after")
    def _department(self) -> Group:
        if self.teams and (self.servers is not None or self.per_user != PerUser()):
            raise ValueError("a group with teams has no servers of its own: give servers and per_user in the teams")
        return self

    @property
    def guaranteed_units(self) -> int:
        """The guarantee in units of 1 %; for a department without a guarantee, the sum of its teams' guarantees."""
        if self.teams and "guarantee" not in self.model_fields_set:
            return self.teams_units
        return super().guaranteed_units

    @property
    def teams_units(self) -> int:
        """The sum of the teams' guarantees, in units of 1 %."""
        return sum(team.guaranteed_units for team in self.teams.values())


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

    @property
    def guaranteed_units(self) -> int:
        """The sum of all guarantees in units of 1 %, without the default quota, whose number of users is unknown."""
        groups = sum(max(group.guaranteed_units, group.teams_units) for group in self.groups.values())
        return groups + sum(user.guaranteed_units for user in self.users.values())

    @model_validator(mode="after")
    def _unique(self) -> Quotas:
        if self.half_life <= 0:
            raise ValueError("half_life: must be more than 0 s: write a duration like 24h or 7d")
        seen = dict.fromkeys(self.groups, "")
        for department, group in self.groups.items():
            for team in group.teams:
                if team in seen:
                    first = f"a team of {seen[team]}" if seen[team] else "a group"
                    raise PydanticCustomError(
                        NAME_TAKEN,
                        "{team} is {first} already",
                        {"team": team, "first": first, "department": department},
                    )
                seen[team] = department
        return self
