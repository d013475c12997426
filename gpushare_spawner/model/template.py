"""A compute template: what an admin offers at the login form. Reference for admins: docs/reference/templates.md"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from gpushare_spawner.model.quantity import Bytes, Cores, PercentOrBytes, Seconds, format_seconds
from gpushare_spawner.model.share import UNITS_PER_GPU, Share, units_from_fraction
from gpushare_spawner.model.tier import Tier


class _Part(BaseModel):
    # A misspelt field must be an error, not a setting that silently does nothing.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def _fraction(value: Any) -> float:
    return units_from_fraction(value) / UNITS_PER_GPU


_Written = Annotated[float, Field(ge=0.01, le=1)]  # what JSON Schema shows to editors

Fraction = Annotated[float, BeforeValidator(_fraction, json_schema_input_type=_Written)]


class GpuMemory(_Part):
    """Device memory of a session."""

    oversubscribe: bool = True
    """Notebooks together may allocate more than the GPU has: device memory becomes CUDA managed memory, and what is not
    in use moves to host memory."""
    guarantee: PercentOrBytes | None = None
    """GPU memory that the session can allocate whatever its neighbours have allocated, within its server's host memory.
    While sessions take turns its pages may be in host memory. Not given: the fraction of the GPU's memory."""
    limit: PercentOrBytes = "100%"
    """What CUDA shows as the GPU's total memory. All processes of the session together may allocate as much; an
    allocation beyond it fails as on a GPU of that size."""


class Gpu(_Part):
    """Which part of a GPU, or how many whole ones."""

    fraction: Fraction | None = None
    """A part of one GPU, in steps of 0.01: guaranteed while neighbours work, and more while they are idle. Give either
    `fraction` or `count`."""
    count: Annotated[int, Field(ge=1, le=64, strict=True)] | None = None
    """Whole GPUs, instead of a fraction. Several lie on one machine and are of one model."""
    memory: GpuMemory = GpuMemory()
    """Memory of the GPU."""
    models: tuple[str, ...] = ()
    """Patterns of GPU model names that will do, like `["*A100*", "*H100*"]`; `*` stands for anything, upper and lower
    case are the same. Not given: any GPU."""

    @model_validator(mode="after")
    def _one_of(self) -> Gpu:
        if (self.fraction is None) == (self.count is None):
            raise ValueError("give either fraction (a part of one GPU) or count (whole GPUs), one of the two")
        return self

    @cached_property
    def share(self) -> Share:
        """The share that the template asks for."""
        return Share(count=self.count) if self.count is not None else Share.from_fraction(self.fraction)

    def accepts(self, model: str) -> bool:
        """Whether a GPU of this model name will do; upper and lower case are the same."""
        return not self.models or any(fnmatchcase(model.lower(), pattern.lower()) for pattern in self.models)


class Range(_Part):
    """A guaranteed amount and an upper limit."""

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        guarantee, limit = getattr(self, "guarantee", None), getattr(self, "limit", None)
        if guarantee is not None and limit is not None and guarantee > limit:
            raise ValueError("the guarantee is more than the limit")
        return self


class Cpu(Range):
    """CPU cores."""

    guarantee: Cores | None = None
    """Cores that the server can count on. Not given: the spawner's setting."""
    limit: Cores | None = None
    """Cores that the server may use while they are free. Not given: the spawner's setting."""


class HostMemory(Range):
    """Host memory."""

    guarantee: Bytes | None = None
    """Host memory that the server can count on. Not given: the spawner's setting."""
    limit: Bytes | None = None
    """Host memory that the server may use; beyond that the system ends a process of it. GPU memory that is paged out
    counts too. Not given: the spawner's setting."""


class Resources(_Part):
    """What the notebook server gets beside the GPU."""

    cpu: Cpu = Cpu()
    """Cores for its processes."""
    memory: HostMemory = HostMemory()
    """Host memory for its processes and for GPU memory that is paged out."""


class Access(_Part):
    """Who may use the template: members of any of the groups, and the users; both empty: everybody."""

    groups: tuple[str, ...] = ()
    """JupyterHub groups. Members of any of them may use the template."""
    users: tuple[str, ...] = ()
    """Names of users that may use the template. Whoever may not use a template does not see its card, and cannot start
    it through the API."""

    def allows(self, user: str, groups: frozenset[str] | set[str]) -> bool:
        """Whether this user, a member of these groups, may use the template."""
        if not self.groups and not self.users:
            return True
        return user in self.users or not groups.isdisjoint(self.groups)


class Limits(_Part):
    """How often the template may be used."""

    per_user: Annotated[int, Field(ge=1, strict=True)] | None = None
    """Servers of one user with this template at a time. Not given: any number."""


class Idle(_Part):
    """What happens to a session whose GPU is idle, and when. Each step is optional.

    Times count from the last GPU work.
    """

    downgrade_after: Seconds | None = None
    """The session is downgraded to `downgrade_to` after this long without GPU work. Not given: never."""
    downgrade_to: Fraction | None = None
    """The smaller share, a fraction of one GPU, less than the share itself. Belongs to `downgrade_after`."""
    release_after: Seconds | None = None
    """The share is released after this long without GPU work. The kernel lives on, its GPU memory is kept, and its next
    GPU work restores the share. Not given: never."""
    stop_after: Seconds | None = None
    """The server is stopped after this long without GPU work, busy kernel or notebook activity. Not given: never."""
    warn_before: Seconds = 300.0
    """The notice period: how long before each idle action the user is told."""

    @model_validator(mode="after")
    def _in_order(self) -> Idle:
        if (self.downgrade_after is None) != (self.downgrade_to is None):
            raise ValueError("downgrade_after and downgrade_to belong together: give both or neither")
        steps = [(name, getattr(self, name)) for name in ("downgrade_after", "release_after", "stop_after")]
        given = [(name, value) for name, value in steps if value is not None]
        for name, value in given:
            if value <= 0:
                raise ValueError(f"{name} must be more than 0 s")
        for (first, earlier), (second, later) in pairwise(given):
            if earlier >= later:
                raise ValueError(
                    f"{second} ({format_seconds(later)}) must come after {first} ({format_seconds(earlier)})"
                )
        return self

    def after(self, tier: Tier) -> float | None:
        """Idle seconds after which a session goes to this tier; None where it never does."""
        return {
            Tier.DOWNGRADED: self.downgrade_after,
            Tier.RELEASED: self.release_after,
            Tier.STOPPED: self.stop_after,
        }.get(tier)

    def units(self, tier: Tier, share: Share) -> int:
        """Units (per GPU) that a session of this share holds in this tier."""
        if tier is Tier.ACTIVE:
            return share.units
        if tier is Tier.DOWNGRADED and self.downgrade_to is not None:
            return min(share.units, units_from_fraction(self.downgrade_to))
        return 0


class Template(_Part):
    """One card on the form. Raises pydantic.ValidationError, which names each wrong field."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
    """Lower case letters, digits and dashes, at most 63; unique in the folder. API starts and reports use it, so keep
    it once it is in use."""
    display_name: Annotated[str, Field(min_length=1, max_length=80)]
    """The title on the card."""
    description: Annotated[str, Field(max_length=2000)] = ""
    """A sentence or two on the card."""
    default: bool = False
    """Chosen beforehand on the form; in one template only."""
    gpu: Gpu | None = None
    """The share of a GPU. Not given: no GPU."""
    resources: Resources = Resources()
    """CPU and host memory."""
    image: Annotated[str, Field(min_length=1)] | None = None
    """Container image, where servers run in containers. Not given: the spawner's setting."""
    access: Access = Access()
    """Who may use the template. Not given: everybody."""
    limits: Limits = Limits()
    """Limits on its use."""
    idle: Idle = Idle()
    """What happens while the GPU is idle."""
    profile_options: dict[str, Any] = {}
    """Further choices on the card, as in KubeSpawner's `profile_options`."""
    kubespawner_override: dict[str, Any] = {}
    """Any further settings of the spawner; they have the last word."""

    @model_validator(mode="after")
    def _consistent(self) -> Template:
        if self.gpu is None:
            if self.idle.downgrade_after is not None or self.idle.release_after is not None:
                raise ValueError(
                    "idle: downgrade_after and release_after need a gpu; a template without one can only stop_after"
                )
            return self
        if self.idle.downgrade_to is not None:
            smaller = units_from_fraction(self.idle.downgrade_to)
            if smaller >= self.gpu.share.units:
                raise ValueError(
                    f"idle: downgrade_to ({self.idle.downgrade_to}) must be less than the share "
                    f"({self.gpu.share.units / UNITS_PER_GPU})"
                )
        return self

    @property
    def share(self) -> Share | None:
        """The share it asks for; None without a GPU."""
        return self.gpu.share if self.gpu is not None else None
