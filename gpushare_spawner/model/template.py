"""A compute template: a card on the form that an admin offers.

The package `templates` reads the files. Reference for admins: docs/reference/templates.md
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from gpushare_spawner.model.controls import MOST_KEEPS
from gpushare_spawner.model.layers import LAYERS, Enforcement, IdleReach, Layer, LayerName, MemoryEngine
from gpushare_spawner.model.part import SHOWN_LINE, SHOWN_TEXT, FilePart, ShownLine, TextPattern
from gpushare_spawner.model.quantity import Bytes, Cores, Percent, PercentOrBytes, Seconds, resolve_bytes
from gpushare_spawner.model.share import (
    MOST_GPUS,
    NO_NEIGHBOUR_RULES,
    UNITS_PER_GPU,
    NeighbourRules,
    Share,
    Tier,
    units_from_fraction,
)

Priority = Literal["low", "normal", "high"]
"""The priority of a template's spawns and sessions."""
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
"""All priorities, the lowest first."""
IDLE_ORDER = "idle_order"
"""Type of the error for idle actions in the wrong order; its context has the names and seconds of two of them."""
LAYER_CANNOT = "layer_cannot"
"""Type of the error for a promise that the template's layer cannot keep. Its context: the fields of BrokenPromise."""


def _fraction(value: Any) -> float:
    return units_from_fraction(value) / UNITS_PER_GPU


def _fraction_of_gpus(value: Any) -> float:
    return Share.from_fraction(value).fraction


_Written = Annotated[float, Field(ge=0.01, le=1)]  # the type in the editors' JSON Schema

_ANY = 2**50
"""Assumed bytes of a GPU, to compare two percentages."""

Fraction = Annotated[float, BeforeValidator(_fraction, json_schema_input_type=_Written)]
_WrittenGpus = Annotated[float, Field(ge=0.01, le=MOST_GPUS)]
FractionOfGpus = Annotated[float, BeforeValidator(_fraction_of_gpus, json_schema_input_type=_WrittenGpus)]


@dataclass(frozen=True)
class BrokenPromise:
    """A field of a template that a layer cannot keep."""

    field: str
    """Dotted path, like ``gpu.memory.limit``."""
    what: str
    """The layer's actual behavior."""
    advice: str
    """How to change the template."""


class GpuMemory(FilePart):
    """Device memory of a session."""

    oversubscribe: bool = True
    """Sessions together can allocate more memory than the GPU has. Memory that is not in use moves to host memory, as
    `engine` defines."""
    engine: MemoryEngine = MemoryEngine.MANAGED
    """`managed`: device memory becomes CUDA managed memory, and pages that are not in use are paged out. `suspend`:
    device memory stays plain, and the driver suspends all processes of an idle session while other sessions need its
    memory; the agent needs the permission to do so."""
    guarantee: PercentOrBytes | None = None
    """GPU memory that the session can allocate regardless of other sessions, within its server's host memory. While
    sessions take turns, it can be paged out to host memory. Not given: the same fraction of the GPU's memory."""
    limit: PercentOrBytes = "100%"
    """The GPU's total memory as CUDA reports it. It limits all processes of the session together; an allocation beyond
    it fails as on a GPU of that size."""

    @model_validator(mode="after")
    def _suspend_oversubscribes(self) -> GpuMemory:
        if self.engine is MemoryEngine.SUSPEND and not self.oversubscribe:
            raise ValueError(
                "engine: suspend is a way to oversubscribe; leave out oversubscribe: false, or leave out the engine"
            )
        return self

    @model_validator(mode="after")
    def _guarantee_within_limit(self) -> GpuMemory:
        if self.guarantee is None:
            return self
        least, most = self.guarantee, self.limit
        # a percentage and an amount can be compared only for a specific GPU
        if least.endswith("%") == most.endswith("%") and resolve_bytes(least, _ANY) > resolve_bytes(most, _ANY):
            raise ValueError(f"the guarantee ({least}) is more than the limit ({most}): lower it, or raise the limit")
        return self

    @property
    def kind(self) -> tuple[bool, MemoryEngine]:
        """The settings that cannot change when a session changes to another template's share."""
        return self.oversubscribe, self.engine


class GpuTime(FilePart):
    """GPU time of a session, on each of its GPUs."""

    limit: Percent = UNITS_PER_GPU
    """At most this part of the GPU's time, also while other sessions are idle; not less than the fraction."""


class GpuBypass(FilePart):
    """Consequence for processes that use the GPU without the library while the session exceeds its memory limit."""

    action: Literal["report", "notify", "stop"] = "report"
    """`report`: the dashboard and the metrics show such processes. `notify`: while they make the session hold more GPU
    memory than `gpu.memory.limit`, the user gets a message too. `stop`: after the message and `grace`, the processes
    that still do are stopped, the largest first, until the session is within its limit."""
    grace: Seconds = 60.0
    """Time from the message to the stop."""


class TemplateGpu(FilePart):
    """A fraction of one GPU, a number of whole GPUs, or a fraction of each of several GPUs."""

    fraction: FractionOfGpus | None = None
    """A fraction of each GPU, in steps of 0.01, guaranteed while other sessions work; the session gets more while they
    are idle. 1.5 is one whole GPU and half of another. Not given: whole GPUs."""
    count: Annotated[int, Field(ge=1, le=64, strict=True)] | None = None
    """Number of GPUs; required without `fraction`. Several GPUs are on the same machine and of the same model. Not
    given: one."""
    time: GpuTime = GpuTime()
    """Time of the GPU."""
    memory: GpuMemory = GpuMemory()
    """Memory of the GPU."""
    bypass: GpuBypass = GpuBypass()
    """Processes without the library."""
    layer: LayerName | None = None
    """The sharing layer that provides the GPU, like `kai`. Not given: that of the nodes in `layers.yaml`, or else
    `native`."""
    models: tuple[ShownLine, ...] = ()
    """Patterns of suitable GPU model names, like `["*A100*", "*H100*"]`; `*` stands for any text, case is ignored. Not
    given: any GPU."""

    @model_validator(mode="after")
    def _gives_amount(self) -> TemplateGpu:
        if self.fraction is None and self.count is None:
            raise ValueError("give fraction (a part of a GPU), count (whole GPUs), or both (a part of each of several)")
        if (self.fraction or 0) > 1 and self.count is not None:
            raise ValueError(
                f"fraction: {self.fraction:g} is on several GPUs already; remove count, or write 1 or less"
            )
        if self.memory.engine is MemoryEngine.SUSPEND and self.share.count > 1:
            raise ValueError("memory.engine: suspend needs a share of one GPU; leave out the engine, or write count: 1")
        if self.time.limit < self.share.units:
            raise ValueError(
                f"time.limit: {self.time.limit}% is less than the share, {self.share.units}%; write at least "
                f"{self.share.units}%, or a smaller share"
            )
        return self

    @cached_property
    def share(self) -> Share:
        """The template's share."""
        return Share.from_fraction(1 if self.fraction is None else self.fraction, self.count or 1)

    def accepts(self, model: str) -> bool:
        """Return whether a GPU with this model name is suitable, ignoring case."""
        return not self.models or any(fnmatchcase(model.lower(), pattern.lower()) for pattern in self.models)


class Range(FilePart):
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
    """Cores guaranteed to the server. Not given: the spawner's setting."""
    limit: Cores | None = None
    """Maximum cores that the server can use. Not given: the spawner's setting."""


class HostMemory(Range):
    """Host memory."""

    guarantee: Bytes | None = None
    """Host memory guaranteed to the server. Not given: the spawner's setting."""
    limit: Bytes | None = None
    """Maximum host memory that the server can use; above it, the system ends one of the server's processes. Paged-out
    GPU memory also counts. Not given: the spawner's setting."""


class Resources(FilePart):
    """CPU and host memory of the notebook server."""

    cpu: Cpu = Cpu()
    """CPU cores for its processes."""
    memory: HostMemory = HostMemory()
    """Host memory for its processes and for paged-out GPU memory."""


class Access(FilePart):
    """The users of the template: members of the groups and the named users. If both are empty, all users."""

    groups: tuple[ShownLine, ...] = ()
    """JupyterHub groups whose members may use the template."""
    users: tuple[ShownLine, ...] = ()
    """User names. Other users do not see the template's card and cannot use the template through the API."""

    def allows(self, user: str, groups: frozenset[str] | set[str]) -> bool:
        """Return whether this user, a member of these groups, may use the template."""
        if not self.groups and not self.users:
            return True
        return user in self.users or not groups.isdisjoint(self.groups)


class Limits(FilePart):
    """Limits on servers with the template."""

    per_user: Annotated[int, Field(ge=1, strict=True)] | None = None
    """Maximum number of a user's servers with this template at the same time. Not given: no limit."""


class ReleaseResources(FilePart):
    """CPU and memory that a released session's server still requests. Only on Kubernetes 1.33 and later."""

    cpu: Cores | None = None
    """Cores, less than `resources.cpu.guarantee`. Not given: the guarantee stays."""
    memory: Bytes | None = None
    """Host memory, less than `resources.memory.guarantee`. Not given: the guarantee stays."""

    @model_validator(mode="after")
    def _some(self) -> ReleaseResources:
        if self.cpu is None and self.memory is None:
            raise ValueError("give cpu or memory, or both")
        for name in ("cpu", "memory"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} must be more than 0")
        return self


class KeepLimits(FilePart):
    """Limits on how long, how often and for how many sessions a user may keep a share.

    Admins are not bound by these limits.
    """

    longest: Seconds | None = None
    """Maximum length of a keep. 0: no user may keep a share. Not given: 8 hours."""
    per_day: Annotated[int, Field(ge=0, le=MOST_KEEPS, strict=True)] | None = None
    """Maximum keeps within 24 hours, over all sessions of one user; an extension counts as another keep. Not given:
    2."""
    at_once: Annotated[int, Field(ge=0, strict=True)] | None = None
    """Maximum number of one user's sessions kept at the same time. Not given: 2."""


def check_idle_order(downgrade_after: float | None, release_after: float | None, stop_after: float | None) -> None:
    """Raise an error for a time (seconds; None: never) that is not above 0 or not above the preceding time."""
    actions = {"downgrade_after": downgrade_after, "release_after": release_after, "stop_after": stop_after}
    given = [(name, value) for name, value in actions.items() if value is not None]
    for name, value in given:
        if value <= 0:
            raise ValueError(f"{name} must be more than 0 s")
    for (first, earlier), (second, later) in pairwise(given):
        if earlier >= later:
            raise PydanticCustomError(
                IDLE_ORDER,
                "{second} ({later} s) must be more than {first} ({earlier} s)",
                {"first": first, "earlier": earlier, "second": second, "later": later},
            )


class Idle(FilePart):
    """The times of a session's idle actions. Each action is optional.

    Times count from the last GPU work, or from the server's start if there was none. For downgrades and releases, GPU
    work that is shorter than `min_use` does not count.
    """

    downgrade_after: Seconds | None = None
    """The share is downgraded to `downgrade_to` after this long without GPU work. Not given: never."""
    downgrade_to: Fraction | None = None
    """The smaller share, a fraction of one GPU, less than the share itself. Of several GPUs each keeps at most so much.
    Needs `downgrade_after`."""
    release_after: Seconds | None = None
    """The share is released after this long without GPU work. Kernels keep running and keep their GPU memory. New GPU
    work runs immediately and restores the share as soon as it counts as use, see `min_use`. Not given: never."""
    release_resources: ReleaseResources | None = None
    """The CPU and host memory that a released session's server still requests on Kubernetes, so that other servers can
    start on the node. Limits do not change, and the server never requests less than it uses. Use is measured first, so
    requests are lowered up to 15 s after the release. They are restored with the share; if the node is full then, the
    server has less guaranteed CPU and memory until capacity is free. Needs `release_after` and guarantees in
    `resources`. Not given: requests stay."""
    stop_after: Seconds | None = None
    """The server is stopped after this long without GPU work, busy kernels or other activity. Not given: never."""
    warn_before: Seconds = 300.0
    """The notice period: the time between the notice to the user and the idle action."""
    when: Literal["always", "pressure"] | None = None
    """`always`: idle sessions are downgraded and released after these times. `pressure`: only while a spawn that can
    use the units waits, from as few users as possible, after a notice period of at most 1 minute. Servers are stopped
    in any case.
    Not given: `always`."""
    min_use: Seconds | None = None
    """GPU time that counts as use of the share, like `2s`: in one piece, or in shorter pieces within the first of the
    idle times. Shorter work also runs immediately, but neither keeps nor restores the share, however often it recurs.
    0: all GPU work counts. Not given: 1/60 of the first idle time, at most 15 seconds."""
    keep: KeepLimits | None = None
    """Limits on users' keeps, which prevent the template's idle actions. Not given: `longest` 8 hours, `per_day` 2,
    `at_once` 2."""
    dry_run: bool = False
    """Idle actions are decided, logged and shown, but not carried out, and users get no notices."""

    @model_validator(mode="after")
    def _in_order(self) -> Idle:
        if (self.downgrade_after is None) != (self.downgrade_to is None):
            raise ValueError("downgrade_after and downgrade_to belong together: give both or neither")
        if self.release_resources is not None and self.release_after is None:
            raise ValueError("release_resources needs release_after")
        check_idle_order(self.downgrade_after, self.release_after, self.stop_after)
        return self

    def after(self, tier: Tier) -> float | None:
        """Return the idle seconds after which a session enters this tier; None: never."""
        return {
            Tier.DOWNGRADED: self.downgrade_after,
            Tier.RELEASED: self.release_after,
            Tier.STOPPED: self.stop_after,
        }.get(tier)

    @property
    def first_after(self) -> float | None:
        """Idle seconds after which the session loses units; None: never."""
        return self.downgrade_after if self.downgrade_after is not None else self.release_after

    def units(self, tier: Tier, share: Share) -> int:
        """Return the units per GPU that a session with this share holds in this tier."""
        if tier is Tier.ACTIVE:
            return share.units
        if tier is Tier.DOWNGRADED and self.downgrade_to is not None:
            return min(share.units, units_from_fraction(self.downgrade_to))
        return 0


def _gpu_uuid(value: str) -> str:
    if not re.fullmatch("(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", value):
        raise ValueError(
            f"{value} is no UUID of a GPU; write one like GPU-8f6b2c1e-0000-5000-8000-0123456789ab, from nvidia-smi -L"
        )
    return value


def _label(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) else value


_Label = Annotated[str, BeforeValidator(_label, json_schema_input_type=str | int | float), SHOWN_LINE]
"""Text that can also be written as a number, because admins write `display_name: 2`."""


class _FreeForm(FilePart):
    # other fields of KubeSpawner are passed on unchanged
    model_config = ConfigDict(extra="allow")


class PlacementPin(FilePart):
    """The GPU or the nodes of sessions. Only the sharing layer `native` keeps these rules."""

    gpu: Annotated[str, AfterValidator(_gpu_uuid)] | None = None
    """UUID of the only suitable GPU, as `nvidia-smi -L` shows it."""
    nodes: tuple[Annotated[ShownLine, Field(min_length=1)], ...] = ()
    """Names of the only suitable nodes. Not given: any node."""


class PlacementPins(FilePart):
    """The GPUs or nodes of users and of members of groups. The rules of their templates hold too."""

    users: dict[ShownLine, PlacementPin] = {}
    """By user name."""
    groups: dict[ShownLine, PlacementPin] = {}
    """By JupyterHub group."""

    def of_user(self, user: str, groups: Collection[str]) -> list[tuple[str, PlacementPin]]:
        """Return the pins of a user, each with its field."""
        pins = [(f"users.{user}", self.users[user])] if user in self.users else []
        return pins + [(f"groups.{group}", self.groups[group]) for group in sorted(self.groups) if group in groups]


class TemplatePlacement(PlacementPin):
    """The GPUs on which sessions of the template are placed. Only the sharing layer `native` keeps these rules."""

    near: tuple[ShownLine, ...] = ()
    """Labels. Sessions are placed beside a session with one of them, or on any GPU while no such session runs."""
    apart_from: tuple[ShownLine, ...] = ()
    """Labels. No GPU has a session of the template and a session with one of them, whichever started first."""
    alone: bool = False
    """No other session is placed on the session's GPUs."""

    @model_validator(mode="after")
    def _can_hold(self) -> TemplatePlacement:
        both = sorted({*self.near} & {*self.apart_from})
        if both:
            raise ValueError(f"near: {both[0]} is in apart_from too; remove it from one of them")
        if self.alone and self.near:
            raise ValueError("alone: a session cannot be alone and near other sessions; remove alone, or near")
        return self


class UnlistedChoice(_FreeForm):
    """Text instead of a listed choice, as in KubeSpawner's `unlisted_choice`."""

    display_name: _Label | None = None
    """The title of the field."""
    display_name_in_choices: _Label | None = None
    """The entry in the list of choices."""
    validation_message: _Label | None = None
    """The form's message for text that does not match the pattern."""
    validation_regex: TextPattern | None = None
    """The pattern for the whole text, without look-around and backreferences."""


class OptionChoice(_FreeForm):
    """One of the listed choices, as in KubeSpawner's `profile_options`."""

    display_name: _Label | None = None
    """The entry in the list. Not given: its key."""


class ProfileOption(_FreeForm):
    """An additional choice on a card, as in KubeSpawner's `profile_options`."""

    display_name: _Label | None = None
    """The title of the list. Not given: its key."""
    choices: dict[ShownLine, OptionChoice] | None = None
    """The choices, by their keys in the API."""
    unlisted_choice: UnlistedChoice | None = None
    """Whether users may enter text instead of a listed choice."""


class Template(FilePart):
    """One card on the form. Raises pydantic.ValidationError, which names each invalid field."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
    """At most 63 lowercase letters, digits and dashes; unique in the folder. The API and reports use the name, so do
    not change it later."""
    display_name: Annotated[str, Field(min_length=1, max_length=80), SHOWN_LINE]
    """The title on the card."""
    description: Annotated[str, Field(max_length=2000), SHOWN_TEXT] = ""
    """One or two sentences on the card."""
    default: bool = False
    """Whether the template is selected when the form opens. Only one template can be the default."""
    gpu: TemplateGpu | None = None
    """The share of a GPU. Not given: no GPU."""
    resources: Resources = Resources()
    """CPU and host memory."""
    image: Annotated[str, Field(min_length=1), SHOWN_LINE] | None = None
    """Container image, if servers run in containers. Not given: the spawner's setting."""
    access: Access = Access()
    """The users and groups that may use the template. Not given: all users."""
    limits: Limits = Limits()
    """Maximum number of servers with the template at the same time."""
    priority: Priority = "normal"
    """Order of its spawns in the queue, among those in quota and among those of one quota. Where units are reclaimed,
    sessions over quota with a lower priority yield first."""
    reclaimable: Annotated[bool, Field(strict=True)] = True
    """With `false`, sessions count against guarantees only and never yield units to others: a spawn beyond the quota's
    guarantee is refused. Has an effect only with quotas."""
    labels: tuple[ShownLine, ...] = ()
    """Labels of the template's sessions, for `near` and `apart_from` of any template."""
    placement: TemplatePlacement = TemplatePlacement()
    """Rules for the choice of the GPU. Not given: any suitable GPU."""
    idle: Idle = Idle()
    """Actions while the GPU is idle."""
    profile_options: dict[ShownLine, ProfileOption] = {}
    """Additional choices on the card, as in KubeSpawner's `profile_options`."""
    kubespawner_override: dict[str, Any] = {}
    """Additional settings of the spawner, which override all others."""

    @model_validator(mode="after")
    def _consistent(self) -> Template:
        if self.gpu is None:
            if self.idle.downgrade_after is not None or self.idle.release_after is not None:
                raise ValueError(
                    "idle: downgrade_after and release_after need a gpu; a template without one can only stop_after"
                )
            if self.placement != TemplatePlacement():
                raise ValueError("placement: needs a gpu; remove the field")
            if not self.reclaimable:
                raise ValueError("reclaimable: needs a gpu; remove the field")
            return self
        if self.placement.gpu is not None and self.gpu.share.count > 1:
            raise ValueError(f"placement.gpu: is one GPU, and the share is {self.gpu.share}; remove the field")
        if self.idle.downgrade_to is not None:
            smaller = units_from_fraction(self.idle.downgrade_to)
            if smaller >= self.gpu.share.units:
                raise ValueError(
                    f"idle: downgrade_to ({self.idle.downgrade_to}) must be less than the share "
                    f"({self.gpu.share.units / UNITS_PER_GPU})"
                )
        if self.idle.release_resources is not None:
            self._check_release_resources(self.idle.release_resources)
        if self.gpu.layer is not None:
            for broken in self.broken_promises(self.gpu.layer):
                context = {"field": broken.field, "what": broken.what, "advice": broken.advice}
                raise PydanticCustomError(LAYER_CANNOT, "{field}: {what}; {advice}", context)
        return self

    def broken_promises(self, layer: LayerName) -> tuple[BrokenPromise, ...]:
        """Return the template's promises that a layer cannot keep; empty if the template can use the layer."""
        if self.gpu is None or layer is LayerName.NATIVE:
            return ()
        broken = list(_broken_promises(self.gpu, self.idle, LAYERS[layer]))
        if self.placement != TemplatePlacement():
            what = f"{LAYERS[layer].title} does not keep rules for the choice of the GPU"
            broken.append(BrokenPromise("placement", what, "remove the field, or use the layer native"))
        return tuple(broken)

    def pinned(self, pin: PlacementPin) -> Template:
        """Return the template whose sessions also keep a pin. Raises ValueError if both can never hold, as a clause."""
        if self.gpu is None:
            return self
        if self.gpu.layer not in (None, LayerName.NATIVE):
            raise ValueError(f"its layer {self.gpu.layer} does not keep rules for the choice of the GPU")
        own = self.placement
        if pin.gpu is not None and self.gpu.share.count > 1:
            raise ValueError(f"its share is {self.gpu.share}, and not one GPU")
        if pin.gpu is not None and own.gpu not in (None, pin.gpu):
            raise ValueError(f"it asks for GPU {own.gpu}, and not for GPU {pin.gpu}")
        nodes = tuple(node for node in own.nodes if node in pin.nodes or not pin.nodes) if own.nodes else pin.nodes
        if own.nodes and not nodes:
            raise ValueError(f"it asks for the nodes {', '.join(own.nodes)}, and not for {', '.join(pin.nodes)}")
        rules = own.model_copy(update={"gpu": pin.gpu or own.gpu, "nodes": nodes})
        return self.model_copy(update={"placement": rules})

    def _check_release_resources(self, kept: ReleaseResources) -> None:
        """Raise ValueError for requests that Kubernetes cannot lower in place: the pod's QoS class must not change.

        Source: Kubernetes documentation, "Resize CPU and Memory Resources assigned to Containers", limitations.
        """
        cpu, memory = self.resources.cpu, self.resources.memory
        for name, guarantee, less in (("cpu", cpu.guarantee, kept.cpu), ("memory", memory.guarantee, kept.memory)):
            if less is None:
                continue
            where = f"idle: release_resources: {name}"
            if guarantee is None:
                raise ValueError(f"{where} needs resources.{name}.guarantee; a limit alone is requested in full")
            if less >= guarantee:
                raise ValueError(f"{where} must be less than resources.{name}.guarantee")
        # a limit without a guarantee is requested in full
        limited = ((cpu.guarantee, cpu.limit), (memory.guarantee, memory.limit))
        if all(limit is not None and guarantee in (None, limit) for guarantee, limit in limited):
            raise ValueError(
                "idle: release_resources: Kubernetes does not lower the requests of a server whose guarantees of cpu "
                "and memory are its limits; give one limit that is more than its guarantee"
            )

    @property
    def rank(self) -> int:
        """The priority as a number: the lowest is 0."""
        return PRIORITIES.index(self.priority)

    @property
    def share(self) -> Share | None:
        """The template's share; None without a GPU."""
        return self.gpu.share if self.gpu is not None else None

    @property
    def neighbours(self) -> NeighbourRules:
        """The labels of its sessions, and their rules for other sessions on their GPUs."""
        rules = NeighbourRules(self.labels, self.placement.apart_from, self.placement.alone)
        return NO_NEIGHBOUR_RULES if rules == NO_NEIGHBOUR_RULES else rules


def _broken_promises(gpu: TemplateGpu, idle: Idle, layer: Layer) -> Iterator[BrokenPromise]:
    """Yield the promises that a layer other than our own cannot keep. Only fields that are given are promises."""
    yield from _of_share(gpu.share, layer)
    yield from _of_memory(gpu, layer)
    if "limit" in gpu.time.model_fields_set and gpu.time.limit < UNITS_PER_GPU:
        what = f"{layer.title} does not limit the GPU time of a session in this way"
        yield BrokenPromise("gpu.time.limit", what, "remove the line")
    if gpu.bypass.action != "report":
        what = f"with {layer.title} the agent does not watch for processes without the library"
        yield BrokenPromise("gpu.bypass", what, "remove the field")
    kept = f"with {layer.title} an idle server keeps its GPU until it stops"
    for field, after, action in (
        ("downgrade_after", idle.downgrade_after, IdleReach.DOWNGRADE),
        ("release_after", idle.release_after, IdleReach.RELEASE),
    ):
        if after is not None and action not in layer.reach:
            yield BrokenPromise(f"idle.{field}", kept, "write stop_after alone")


def _of_share(share: Share, layer: Layer) -> Iterator[BrokenPromise]:
    if share.count > 1 and not layer.several_gpus:
        yield BrokenPromise("gpu.count", f"{layer.title} gives a server one GPU", "write count: 1, or a fraction")
    elif share.last_units:
        what = f"{layer.title} gives a server the same part of each GPU"
        yield BrokenPromise("gpu.fraction", what, "write a fraction of 1 or less, or count without it")
    elif share.count > 1 and share.units < UNITS_PER_GPU and not layer.parts_of_several_gpus:
        what = f"{layer.title} gives a server whole GPUs, or a part of one"
        yield BrokenPromise("gpu.count", what, "remove the count, or the fraction")
    if layer.largest_units < share.units < UNITS_PER_GPU:
        most = f"{layer.largest_units / UNITS_PER_GPU:.2f}"
        what = f"a part of a GPU with {layer.title} is at most {most}"
        yield BrokenPromise("gpu.fraction", what, f"write {most} or less, or count: 1")
    if share.units < (layer.smallest_units or 0):
        least = f"{(layer.smallest_units or 0) / UNITS_PER_GPU:.2f}"
        yield BrokenPromise(
            "gpu.fraction", f"the smallest share of {layer.title} is {least}", f"write at least {least}"
        )


def _of_memory(gpu: TemplateGpu, layer: Layer) -> Iterator[BrokenPromise]:
    memory, given = gpu.memory, gpu.memory.model_fields_set
    if "engine" in given:
        what = "the memory engine is a part of the layer native"
        yield BrokenPromise("gpu.memory.engine", what, "remove the line")
    if "oversubscribe" in given and memory.oversubscribe and not layer.oversubscribes:
        what = f"{layer.title} does not move GPU memory to host memory"
        yield BrokenPromise("gpu.memory.oversubscribe", what, "write oversubscribe: false, or remove the line")
    if memory.guarantee is not None and layer.memory is Enforcement.NONE:
        what = f"{layer.title} does not divide GPU memory"
        yield BrokenPromise("gpu.memory.guarantee", what, "remove the line")
    if "limit" not in given:
        return
    own = memory.guarantee or f"{gpu.share.units}%"
    if layer.memory in (Enforcement.NONE, Enforcement.ACCOUNTED):
        if memory.limit != "100%":
            what = f"{layer.title} does not limit GPU memory: a session can allocate all of it"
            yield BrokenPromise("gpu.memory.limit", what, "remove the line")
    elif _size(memory.limit) != _size(own):
        what = f"with {layer.title} a session has the memory of its guarantee ({own}), and no more"
        yield BrokenPromise("gpu.memory.limit", what, "remove the line")


def _size(written: str) -> tuple[bool, int]:
    """Return an amount that can be compared with others in any notation. A percentage never equals bytes."""
    return written.endswith("%"), resolve_bytes(written, 10**12)
