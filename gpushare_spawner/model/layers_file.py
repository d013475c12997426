"""Rules for sharing layers: the content of `layers.yaml`, and the sizes of MIG instances.

Pure data and rules. `layers.yaml` assigns layers to nodes and sets their options. The defaults are those of each
layer's own installation. The capabilities of each layer are in `model.layers`. Reference for admins:
docs/reference/layers.md

A GPU in MIG mode has 8 memory slices and up to 7 compute slices. The profile "3g.40gb" has 3 compute slices and the
memory slices for 40 GB. (NVIDIA MIG user guide, "Partitioning".)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from gpushare_spawner.model.layers import LAYERS, LayerName, Where
from gpushare_spawner.model.part import FilePart
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.share import UNITS_PER_GPU

_QUALIFIED = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
ResourceName = Annotated[str, Field(pattern=rf"^{_QUALIFIED}$", max_length=317)]
"""An extended resource: a domain, a slash and a name. Source: Kubernetes, qualified names (253 + 1 + 63 letters)."""
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
"""The name of an object in a cluster."""


class LayerOptions(FilePart):
    """Options of one layer."""


class ReplicaOptions(LayerOptions):
    """Options of NVIDIA's device plugin with replicas: time-slicing and MPS."""

    resource: ResourceName | None = None
    """The resource that requests a replica. Not given: `nvidia.com/gpu.shared` if a node has it, else
    `nvidia.com/gpu`."""
    replicas: Annotated[int, Field(ge=2, strict=True)] | None = None
    """Replicas of each GPU. Not given: the value of each node's label `nvidia.com/gpu.replicas`."""


class MigOptions(LayerOptions):
    """Options of MIG."""

    strategy: Literal["single", "mixed"] | None = None
    """The MIG strategy of NVIDIA's device plugin. Not given: that of each node's label `nvidia.com/mig.strategy`."""


class HamiOptions(LayerOptions):
    """Options of HAMi."""

    scheduler: ObjectName = "hami-scheduler"
    """The name of its scheduler."""
    resource: ResourceName = "nvidia.com/gpu"
    """The resource that represents a number of GPUs."""
    memory_factor: Annotated[int, Field(ge=1, le=1024, strict=True)] = 1
    """HAMi's `memoryFactor`: the MiB per unit of `nvidia.com/gpumem`. If it is not set here, a server gets that many
    times the memory that its template guarantees."""


class KaiOptions(LayerOptions):
    """Options of KAI Scheduler."""

    scheduler: ObjectName = "kai-scheduler"
    """The name of its scheduler."""
    queue: ObjectName = "default-queue"
    """The queue of quotas that are not in `queues`. It must be a leaf queue."""
    queues: dict[str, ObjectName] = {}
    """Queues by quota, with the names of `quotas.yaml`: a group, or a group and a team like `physics/lasers`."""
    priority_class: ObjectName = "build"
    """The pods' priority class. KAI Scheduler does not preempt a pod with a priority of at least 100, like that of
    `build`, but such a pod must fit into its queue's quota."""
    preemptible: bool | None = None
    """Whether KAI Scheduler may preempt the pods. Not given: the priority class decides."""


class DraOptions(LayerOptions):
    """Options of a DRA driver for GPUs."""

    driver: ObjectName = "gpu.nvidia.com"
    """The name of the driver in its ResourceSlices."""
    device_class: ObjectName = "gpu.nvidia.com"
    """The DeviceClass of whole GPUs."""
    consumable: bool = False
    """A fraction becomes consumable capacity of a GPU that several claims share, instead of a MIG device. Needs
    Kubernetes with the feature gate DRAConsumableCapacity, enabled by default since 1.36, and a driver that publishes
    shares."""


class MetaGpuOptions(LayerOptions):
    """Options of MetaGPU."""

    resource: ResourceName = "cnvrg.io/metagpu"
    """The resource that represents a part of a GPU."""
    per_gpu: Annotated[int, Field(ge=1, strict=True)] = 100
    """Number of these parts per GPU."""


class AllOptions(LayerOptions):
    """Options of each layer."""

    time_slicing: Annotated[ReplicaOptions, Field(alias="time-slicing")] = ReplicaOptions()
    """NVIDIA's device plugin with time-slicing."""
    mps: ReplicaOptions = ReplicaOptions()
    """NVIDIA's device plugin with MPS."""
    mig: MigOptions = MigOptions()
    """MIG with NVIDIA's device plugin."""
    hami: HamiOptions = HamiOptions()
    """HAMi."""
    kai: KaiOptions = KaiOptions()
    """KAI Scheduler."""
    dra: DraOptions = DraOptions()
    """A DRA driver for GPUs."""
    metagpu: MetaGpuOptions = MetaGpuOptions()
    """MetaGPU."""

    def of(self, layer: LayerName) -> LayerOptions:
        """Return the options of a layer. Native, nvshare and KubeShare have none here."""
        options: LayerOptions = getattr(self, layer.value.replace("-", "_"), LayerOptions())
        return options

    def given(self) -> frozenset[LayerName]:
        """Return the layers that have options in the file."""
        return frozenset(LayerName(name.replace("_", "-")) for name in self.model_fields_set)


class LayerRule(FilePart):
    """The layer of some nodes. A rule without `nodes` and `models` applies to all nodes."""

    nodes: dict[str, str] = {}
    """Labels that a node must have, like `{pool: teaching}`; all of them must match. Not given: any node."""
    models: tuple[str, ...] = ()
    """Patterns of GPU model names, like `["*A100*"]`; `*` stands for any text, case is ignored. Not given: any GPU."""
    layer: LayerName
    """The layer that shares the GPUs of these nodes."""
    options: AllOptions = AllOptions()
    """Options by layer, for these nodes only. They override those of the whole file field by field."""

    @model_validator(mode="after")
    def _own_options(self) -> LayerRule:
        others = self.options.given() - {self.layer}
        if others:
            raise ValueError(
                f"options of {', '.join(sorted(others))} have no effect in a rule of layer {self.layer}: move them to "
                "a rule of that layer"
            )
        return self

    def applies(self, labels: Mapping[str, str], model: str) -> bool:
        """Return whether the rule is for a node with these labels and a GPU with this model name."""
        if any(labels.get(name) != value for name, value in self.nodes.items()):
            return False
        return not self.models or any(matches(model, pattern) for pattern in self.models)

    def hides(self, later: LayerRule) -> bool:
        """Return whether a later rule is never used, because this rule applies to all its nodes.

        On one machine, a rule is also used after rules of layers that do not work there, and after rules for GPUs in
        the other MIG mode, see `machine_layer`.
        """
        if not self.nodes.items() <= later.nodes.items() or not (
            not self.models or (later.models and {*later.models} <= {*self.models})
        ):
            return False
        on_a_machine = Where.ONE_MACHINE in LAYERS[later.layer].where and not later.nodes
        first_there = Where.ONE_MACHINE in LAYERS[self.layer].where and (
            (self.layer is LayerName.MIG) is (later.layer is LayerName.MIG)
        )
        return first_there or not on_a_machine

    def may_apply(self, models: Iterable[str]) -> bool:
        """Return whether the rule probably applies to a GPU that these patterns accept. An empty list accepts any GPU.

        This is for checks without a node; `applies` is exact.
        """
        models = tuple(models)
        if not models or not self.models:
            return True
        return any(_alike(mine, other) for mine in self.models for other in models)


class LayersFile(FilePart):
    """Layers by node and GPU model. Nodes without a rule have the layer `native`."""

    rules: tuple[LayerRule, ...] = ()
    """Rules in order. The first rule that applies to a node is used."""
    options: AllOptions = AllOptions()
    """Options by layer, for all nodes."""

    @field_validator("rules")
    @classmethod
    def _all_count(cls, rules: tuple[LayerRule, ...]) -> tuple[LayerRule, ...]:
        for number, later in enumerate(rules):
            first = next((place for place, rule in enumerate(rules[:number]) if rule.hides(later)), None)
            if first is not None:
                raise ValueError(
                    f"rule {number + 1} (layer {later.layer}) is never used: rule {first + 1} (layer "
                    f"{rules[first].layer}) applies to all its nodes, and the first rule counts; move it before that "
                    "one, or remove it"
                )
        return rules

    def rule_of(self, labels: Mapping[str, str], model: str) -> LayerRule | None:
        """Return the rule of a node with these labels and GPUs of this model; None if no rule applies."""
        return next((rule for rule in self.rules if rule.applies(labels, model)), None)

    def options_of(self, layer: LayerName, rule: LayerRule | None = None) -> LayerOptions:
        """Return a layer's options on the nodes of a rule; None: nodes without a rule."""
        options = self.options.of(layer)
        own = rule.options.of(layer) if rule is not None else LayerOptions()
        return options.model_copy(update={name: getattr(own, name) for name in own.model_fields_set})

    def layers_for(self, models: Iterable[str]) -> tuple[LayerName, ...]:
        """Return the layers that can serve a template with these patterns of GPU models, without duplicates."""
        models = tuple(models)
        matching = [rule.layer for rule in self.rules if rule.may_apply(models)]
        everywhere = any(not rule.nodes and not rule.models for rule in self.rules)
        return tuple(dict.fromkeys(matching if everywhere else [*matching, LayerName.NATIVE]))


def machine_layer(rules: LayersFile, model: str, *, mig: bool) -> LayerName | None:
    """Return the layer of GPUs of this model on one machine, without node labels.

    The first rule with a layer that works on one machine is used. Rules of layer `mig` are for GPUs in MIG mode
    (``mig``), which no other layer can share. Without a rule, the layer is `native`, or None for a GPU in MIG mode:
    only a template that names a layer can use that GPU.
    """
    for rule in rules.rules:
        works = Where.ONE_MACHINE in LAYERS[rule.layer].where and (rule.layer is LayerName.MIG) is mig
        if works and rule.applies({}, model):
            return rule.layer
    return None if mig else LayerName.NATIVE


def matches(model: str, pattern: str) -> bool:
    """Return whether a GPU's model name matches a pattern; case is ignored.

    Node labels have dashes instead of spaces: "NVIDIA-A100-SXM4-80GB" matches the patterns of "NVIDIA A100-SXM4-80GB".
    """
    name, expected = model.lower(), pattern.lower()
    return fnmatchcase(name, expected) or fnmatchcase(name.replace(" ", "-"), expected.replace(" ", "-"))


def _alike(first: str, second: str) -> bool:
    """Return whether one pattern is a special case of the other, like "*A100-SXM4*" of "*A100*".

    Patterns like "*A100*" and "*80GB*" can also match the same models, but only the names of the nodes' GPUs show that.
    """
    return matches(first.strip("*"), second) or matches(second.strip("*"), first)


MEMORY_SLICES = 8


Memory = int | Fraction | None
"""Bytes, or a fraction of the GPU's memory slices; None: the same fraction as the share. A profile has slightly less
memory than its slices, just as programs cannot use all memory of a whole GPU."""


@dataclass(frozen=True)
class MigProfile:
    """A MIG profile of one GPU model."""

    name: str
    """The name as in its resource, with "." instead of the "+" in the driver's name."""
    slices: int
    """Compute slices."""
    compute_slices: int
    """Compute slices of the whole GPU."""
    memory_slices: int
    memory_bytes: int
    """Minimum memory of an instance."""

    def covers(self, units: int, memory: Memory = None) -> bool:
        """Return whether the profile is at least as large as the share (units of 1 %) and has enough memory."""
        if units > self.units:
            return False
        if isinstance(memory, int):
            return self.memory_bytes >= memory
        part = memory if memory is not None else Fraction(units, UNITS_PER_GPU)
        return Fraction(self.memory_slices, MEMORY_SLICES) >= part

    @property
    def units(self) -> int:
        """The largest share that its compute slices hold, in units of 1 %."""
        return min(UNITS_PER_GPU, self.slices * UNITS_PER_GPU // self.compute_slices)

    @property
    def size(self) -> tuple[Fraction, Fraction, int, str]:
        """Sort key: the larger of the compute and memory fractions, then their sum, then the shorter name."""
        compute, memory = Fraction(self.slices, self.compute_slices), Fraction(self.memory_slices, MEMORY_SLICES)
        return max(compute, memory), compute + memory, len(self.name), self.name


@dataclass(frozen=True)
class MigInstance:
    """An isolated part of a GPU in MIG mode, for one session."""

    gpu: str
    """The GPU's UUID."""
    gpu_model: str
    profile: MigProfile


def gpu_label(index: int, instance: MigInstance | None) -> str:
    """Return the name of a GPU, or of one of its instances, for texts: "GPU 0", "GPU 0, MIG 1g.10gb"."""
    return f"GPU {index}" + (f", MIG {instance.profile.name}" if instance is not None else "")


def smallest(profiles: Iterable[MigProfile], units: int, memory: Memory = None) -> MigProfile | None:
    """Return the smallest profile that holds a share (see `MigProfile.covers`); None if there is none."""
    return min(
        (profile for profile in profiles if profile.covers(units, memory)),
        key=lambda profile: profile.size,
        default=None,
    )


def guaranteed_memory(guarantee: str | None) -> Memory:
    """Return the amount or fraction of the GPU's memory that a template guarantees."""
    if guarantee is None or not guarantee.endswith("%"):
        return None if guarantee is None else resolve_bytes(guarantee, 0)
    return Fraction(guarantee[:-1].strip()) / 100
