"""What admins can set for a sharing layer, in `layers.yaml`. Defaults are what the layer's own installation uses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from gpushare_spawner.model.layers.declaration import LayerName

_QUALIFIED = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
ResourceName = Annotated[str, Field(pattern=rf"^{_QUALIFIED}$", max_length=317)]
"""An extended resource: a domain, a slash and a name. Source: Kubernetes, qualified names (253 + 1 + 63 letters)."""
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
"""The name of an object in a cluster."""


class LayerOptions(BaseModel):
    """Options of one layer."""

    # A misspelt field must be an error, not a setting without effect.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ReplicaOptions(LayerOptions):
    """Options of NVIDIA's device plugin with replicas: time-slicing and MPS."""

    resource: ResourceName | None = None
    """The resource that a replica is requested by. Not given: `nvidia.com/gpu.shared` where a node has it, else
    `nvidia.com/gpu`."""
    replicas: Annotated[int, Field(ge=2, strict=True)] | None = None
    """Replicas of each GPU. Not given: as each node's label `nvidia.com/gpu.replicas` says."""


class MigOptions(LayerOptions):
    """Options of MIG."""

    strategy: Literal["single", "mixed"] | None = None
    """The MIG strategy of NVIDIA's device plugin. Not given: as each node's label `nvidia.com/mig.strategy` says."""


class HamiOptions(LayerOptions):
    """Options of HAMi."""

    scheduler: ObjectName = "hami-scheduler"
    """The name of its scheduler."""
    resource: ResourceName = "nvidia.com/gpu"
    """The resource that stands for a number of GPUs."""
    memory_resource: ResourceName = "nvidia.com/gpumem"
    """The resource that stands for GPU memory in MiB."""
    memory_factor: Annotated[int, Field(ge=1, le=1024, strict=True)] = 1
    """HAMi's `memoryFactor`: the MiB that one of `memory_resource` stands for. Without it a server would get this many
    times the memory that its template guarantees."""
    memory_percentage_resource: ResourceName = "nvidia.com/gpumem-percentage"
    """The resource that stands for a part of the GPU's memory, in percent."""
    cores_resource: ResourceName = "nvidia.com/gpucores"
    """The resource that stands for a part of the GPU's time, in percent."""


class KaiOptions(LayerOptions):
    """Options of KAI Scheduler."""

    scheduler: ObjectName = "kai-scheduler"
    """The name of its scheduler."""
    queue: ObjectName = "default-queue"
    """The queue of users whose quota is not in `queues`. It must be a leaf queue."""
    queues: dict[str, ObjectName] = {}
    """Queues by quota, as `quotas.yaml` names it: a group, or a group and a team like `physics/lasers`."""
    priority_class: ObjectName = "build"
    """The priority class of the pods. From 100 on, as `build` has it, KAI Scheduler does not preempt a pod, and the pod
    must fit in the quota of its queue."""
    preemptible: bool | None = None
    """Whether KAI Scheduler may preempt the pods. Not given: as the priority class says."""
    reservation_namespace: ObjectName = "kai-resource-reservation"
    """The namespace of its reservation pods."""


class DraOptions(LayerOptions):
    """Options of a DRA driver for GPUs."""

    driver: ObjectName = "gpu.nvidia.com"
    """The name of the driver, as its ResourceSlices have it."""
    device_class: ObjectName = "gpu.nvidia.com"
    """The DeviceClass of whole GPUs."""
    mig_device_class: ObjectName = "mig.nvidia.com"
    """The DeviceClass of MIG devices."""
    consumable: bool = False
    """A fraction becomes consumable capacity of a GPU that several claims share, not a MIG device. Needs Kubernetes
    with the feature gate DRAConsumableCapacity, on by default from 1.36 on, and a driver that publishes shares."""
    shares: Annotated[str, Field(min_length=1)] = "shares"
    """The capacity of a GPU that stands for its shares."""


class MetaGpuOptions(LayerOptions):
    """Options of MetaGPU."""

    resource: ResourceName = "cnvrg.io/metagpu"
    """The resource that stands for a part of a GPU."""
    per_gpu: Annotated[int, Field(ge=1, strict=True)] = 100
    """How many of them each GPU has."""


class NvshareOptions(LayerOptions):
    """Options of nvshare."""

    resource: ResourceName = "nvshare.com/gpu"
    """The resource that stands for a place on a node's GPU."""


class KubeShareOptions(LayerOptions):
    """Options of KubeShare."""

    scheduler: ObjectName = "kubeshare-scheduler"
    """The name of its scheduler."""


class AllOptions(LayerOptions):
    """Options by layer."""

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
    nvshare: NvshareOptions = NvshareOptions()
    """nvshare."""
    kubeshare: KubeShareOptions = KubeShareOptions()
    """KubeShare."""

    def of(self, layer: LayerName) -> LayerOptions:
        """Return the options of a layer. The native layer has none: its settings are those of agent and spawner."""
        options: LayerOptions = getattr(self, layer.value.replace("-", "_"), LayerOptions())
        return options

    def given(self) -> frozenset[LayerName]:
        """Return the layers that have options in the file."""
        return frozenset(LayerName(name.replace("_", "-")) for name in self.model_fields_set)
