"""The ways to share a GPU, and what each of them can do. Form, docs, checks and culler read it from here.

What a template promises that a sharing layer cannot keep. Pure data and rules.

MIG instances of a GPU: how large each is, and the smallest that holds a share. Pure data.

A GPU in MIG mode has 8 memory slices and up to 7 compute slices; the profile "3g.40gb" has 3 of the compute slices and
as many memory slices as 40 GB are. (NVIDIA MIG user guide, "Partitioning".)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.share import UNITS_PER_GPU, Share

LAYER_VARIABLE = "GPUSHARE_LAYER"
"""Environment of a server whose GPU another layer than ours gives: the layer's name."""


class LayerName(StrEnum):
    """A way to share a GPU, as admins write it."""

    NATIVE = "native"
    TIME_SLICING = "time-slicing"
    MPS = "mps"
    MIG = "mig"
    HAMI = "hami"
    KAI = "kai"
    DRA = "dra"
    METAGPU = "metagpu"
    NVSHARE = "nvshare"
    KUBESHARE = "kubeshare"


class Enforcement(StrEnum):
    """What keeps a session within its part of a GPU."""

    NONE = "none"
    """Nothing: sessions can take more, at the cost of the others, and nobody counts what they may have."""
    ACCOUNTED = "accounted"
    """Nothing, but parts that add up to more than the GPU are never placed together."""
    SOFTWARE = "software"
    """The layer's library or daemon, or the driver."""
    HARDWARE = "hardware"
    """The GPU itself."""

    @property
    def keeps(self) -> bool:
        """Whether a session is kept within its part."""
        return self in (Enforcement.SOFTWARE, Enforcement.HARDWARE)


class PlacedBy(StrEnum):
    """What chooses the GPU of a session."""

    LEDGER = "ledger"
    """The hub, by its ledger of all allocations."""
    SCHEDULER = "scheduler"
    """The cluster's scheduler, or one that the layer brings."""


class IdleReach(StrEnum):
    """What an idle action can do to a session whose server keeps running. A server can be stopped with every layer."""

    DOWNGRADE = "downgrade"
    RELEASE = "release"
    RESIZE = "resize"


class ObservedBy(StrEnum):
    """How the agent sees the GPU work of sessions, so that idle ones are found."""

    LIBRARY = "library"
    """The preload library reports each burst. On Kubernetes, work of processes without it is seen as the driver counts
    it; on one machine such processes are reported, and their work is not seen."""
    NVML = "NVML"
    """By what the driver counts of each process: the layer preloads a library of its own, or can be set to do so. Two
    such libraries in one container replace each other, or wrap the same functions."""


class Where(StrEnum):
    """Where a layer works."""

    KUBERNETES = "kubernetes"
    ONE_MACHINE = "one machine"


@dataclass(frozen=True)
class LayerSource:
    """The public source that a layer's rules were read from."""

    project: str
    version: str
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layer:
    """One way to share a GPU."""

    name: LayerName
    title: str
    """Its name in texts."""
    smallest_units: int | None
    """The smallest share, and the step of shares, in units of 1 %; None: replicas or profiles of its nodes decide."""
    memory: Enforcement
    """Whether a session is kept within its part of the GPU's memory."""
    compute: Enforcement
    """Whether a session is kept within its part of the GPU's time."""
    places: PlacedBy
    observed_by: ObservedBy = ObservedBy.LIBRARY
    largest_units: int = 100
    """The largest part of one GPU, in units of 1 %; a whole GPU is possible besides."""
    reach: frozenset[IdleReach] = frozenset()
    oversubscribes: bool = False
    """Whether sessions together can allocate more memory than the GPU has."""
    several_gpus: bool = True
    """Whether a session can have several whole GPUs."""
    legacy: bool = False
    """Its project is not maintained any more."""
    replaces_pods: bool = False
    """Whether its scheduler deletes a pod and creates it again: what the first pod owned is then deleted too."""
    where: frozenset[Where] = frozenset({Where.KUBERNETES})
    note: str = ""
    """What an admin must know besides, in full sentences."""
    source: LayerSource | None = None
    """None: it is ours."""


LAYERS: dict[LayerName, Layer] = {
    layer.name: layer
    for layer in (
        Layer(
            name=LayerName.NATIVE,
            title="gpushare",
            smallest_units=1,
            memory=Enforcement.SOFTWARE,
            compute=Enforcement.SOFTWARE,
            places=PlacedBy.LEDGER,
            reach=frozenset(IdleReach),
            oversubscribes=True,
            where=frozenset(Where),
            note="While others are idle, a session can use more than its share. While others work, it gets GPU time in "
            "proportion to its share.",
        ),
        Layer(
            name=LayerName.TIME_SLICING,
            title="NVIDIA time-slicing",
            smallest_units=None,
            memory=Enforcement.NONE,
            compute=Enforcement.NONE,
            places=PlacedBy.SCHEDULER,
            largest_units=50,
            note="A share is one replica: with 4 replicas of each GPU a template of 0.25 GPU or less gets one, and "
            "0.50 GPU needs nodes with 2. A GPU has as many sessions as it has replicas. Sessions that work take "
            "turns of equal length. Whole GPUs (`count: 1`) are those that the plugin does not share. Write a "
            "renamed resource as `options: {time-slicing: {resource: example.com/slice}}`.",
            source=LayerSource(
                "NVIDIA/k8s-device-plugin", "0.20.0", ("api/config/v1/sharing.go", "internal/lm/resource.go")
            ),
        ),
        Layer(
            name=LayerName.MPS,
            title="NVIDIA MPS",
            smallest_units=None,
            memory=Enforcement.SOFTWARE,
            compute=Enforcement.SOFTWARE,
            places=PlacedBy.SCHEDULER,
            largest_units=50,
            where=frozenset(Where),
            note="On Kubernetes a session has an equal part of the GPU's memory and threads, one for each replica. On "
            "one machine it has what its share says, and one GPU at most. A fault in one session's GPU program ends "
            "the GPU programs of all sessions on that GPU. A GPU has at most 48 GPU programs, 16 below compute "
            "capability 7.5.",
            source=LayerSource(
                "NVIDIA/k8s-device-plugin", "0.20.0", ("cmd/mps-control-daemon/mps/device.go", "internal/rm/rm.go")
            ),
        ),
        Layer(
            name=LayerName.MIG,
            title="NVIDIA MIG",
            smallest_units=None,
            memory=Enforcement.HARDWARE,
            compute=Enforcement.HARDWARE,
            places=PlacedBy.SCHEDULER,
            where=frozenset(Where),
            note="A share is rounded up to the smallest profile of the GPU model that has at least that part of the "
            "compute slices and of the memory slices, and the memory of `gpu.memory.guarantee`: 0.25 GPU gets "
            "`2g.20gb` on an A100 with 80 GB, and `3g.40gb` where only that is there. Profiles that share an "
            "instance's memory (`1c.3g.20gb`) are not used. Create the MIG devices as before: the hub creates "
            "none. On one machine a session has one of the instances that the admin has made.",
            source=LayerSource(
                "NVIDIA/k8s-device-plugin", "0.20.0", ("internal/lm/mig-strategy.go", "internal/rm/devices.go")
            ),
        ),
        Layer(
            name=LayerName.HAMI,
            title="HAMi",
            smallest_units=1,
            memory=Enforcement.SOFTWARE,
            compute=Enforcement.SOFTWARE,
            places=PlacedBy.SCHEDULER,
            observed_by=ObservedBy.NVML,
            note="The hub names HAMi's scheduler in the pod, because HAMi's webhook skips pods that name another one. "
            "HAMi denies privileged containers. A GPU has at most as many sessions as its `deviceSplitCount`, 10 "
            "by default, whatever their shares.",
            source=LayerSource(
                "Project-HAMi/HAMi", "2.10.0", ("pkg/device/nvidia/device.go", "pkg/scheduler/webhook.go")
            ),
        ),
        Layer(
            name=LayerName.KAI,
            title="KAI Scheduler",
            smallest_units=1,
            memory=Enforcement.ACCOUNTED,
            compute=Enforcement.ACCOUNTED,
            places=PlacedBy.SCHEDULER,
            observed_by=ObservedBy.NVML,
            note="GPU sharing must be switched on in KAI Scheduler (`global.gpuSharing=true` in its chart); its "
            "admission webhook rejects fractions otherwise. Create a leaf queue with a limit: without a limit the "
            "queue allows nothing, and -1 means no limit. Pods get the priority class `build`, which KAI "
            "Scheduler does not preempt, and must fit in the queue's quota. With `options: {kai: {priority_class: "
            "train}}` servers can use more than the quota, and KAI Scheduler can end them. `queues: {physics: "
            "physics-notebooks}` names the queue of a quota.",
            source=LayerSource(
                "kai-scheduler/KAI-Scheduler",
                "0.17.0",
                (
                    "pkg/binder/plugins/gpusharing/gpu-request/gpu_request_validator.go",
                    "pkg/common/resources/gpu_sharing.go",
                ),
            ),
        ),
        Layer(
            name=LayerName.DRA,
            title="DRA (NVIDIA's driver)",
            smallest_units=None,
            memory=Enforcement.ACCOUNTED,
            compute=Enforcement.ACCOUNTED,
            places=PlacedBy.SCHEDULER,
            note="A session has a whole GPU or a MIG device. With `options: {dra: {consumable: true}}` it has a part "
            "of a GPU, which nothing enforces: start NVIDIA's driver with its feature gate ConsumableShares and "
            "`--consumable-shares=100`. Needs Kubernetes 1.34 or later. The hub creates a ResourceClaimTemplate "
            "for each template, named by its content. If one of that name differs, the hub does not start the "
            "server: in a namespace of their own, users can create one that asks for more.",
            source=LayerSource(
                "kubernetes-sigs/dra-driver-nvidia-gpu",
                "9593204 (August 2026)",
                ("cmd/gpu-kubelet-plugin/mig.go", "cmd/gpu-kubelet-plugin/consumable_shares.go"),
            ),
        ),
        Layer(
            name=LayerName.METAGPU,
            title="MetaGPU",
            smallest_units=1,
            memory=Enforcement.SOFTWARE,
            compute=Enforcement.ACCOUNTED,
            places=PlacedBy.SCHEDULER,
            legacy=True,
            note="A process that exceeds its part of the memory is killed within 5 s. A share can be split over GPUs.",
            source=LayerSource("cnvrg/metagpu", "aa4ac9c (November 2022)", ("README.md", "config/config.yaml")),
        ),
        Layer(
            name=LayerName.NVSHARE,
            title="nvshare",
            smallest_units=None,
            memory=Enforcement.NONE,
            compute=Enforcement.NONE,
            places=PlacedBy.SCHEDULER,
            observed_by=ObservedBy.NVML,
            oversubscribes=True,
            several_gpus=False,
            legacy=True,
            note="A node has one GPU, and its sessions take turns of 30 s. The size of a share has no effect.",
            source=LayerSource(
                "grgalex/nvshare", "1a8f211 (March 2025)", ("kubernetes/device-plugin/server.go", "src/hook.c")
            ),
        ),
        Layer(
            name=LayerName.KUBESHARE,
            title="KubeShare",
            smallest_units=1,
            memory=Enforcement.SOFTWARE,
            compute=Enforcement.SOFTWARE,
            places=PlacedBy.SCHEDULER,
            observed_by=ObservedBy.NVML,
            legacy=True,
            replaces_pods=True,
            note="Its scheduler deletes the pod and creates it again on the chosen node, so the token of the server "
            "stands in the pod, where the agents can read it.",
            source=LayerSource(
                "NTHU-LSALAB/KubeShare",
                "a862311 (October 2022)",
                ("pkg/scheduler/constants.go", "pkg/scheduler/pod.go"),
            ),
        ),
    )
}
"""Each layer, in the order of the docs."""


@dataclass(frozen=True)
class Promises:
    """The parts of a template that not every layer can keep. What the template does not give promises nothing."""

    share: Share
    engine: str | None = None
    oversubscribe: bool = False
    guarantee: str | None = None
    limit: str | None = None
    downgrade: bool = False
    release: bool = False


@dataclass(frozen=True)
class BrokenPromise:
    """A field of a template that a layer cannot keep."""

    field: str
    """With dots, like ``gpu.memory.limit``."""
    what: str
    """What the layer does instead."""
    advice: str
    """What would be right."""


def broken_promises(promises: Promises, layer: Layer) -> tuple[BrokenPromise, ...]:
    """Return what the layer cannot keep; empty: it keeps all."""
    if layer.name is LayerName.NATIVE:
        return ()
    return (*_of_share(promises.share, layer), *_of_memory(promises, layer), *_of_idle(promises, layer))


def _of_share(share: Share, layer: Layer) -> Iterator[BrokenPromise]:
    if share.count > 1 and not layer.several_gpus:
        yield BrokenPromise("gpu.count", f"{layer.title} gives a server one GPU", "write count: 1, or a fraction")
    if layer.largest_units < share.units < UNITS_PER_GPU:
        most = f"{layer.largest_units / UNITS_PER_GPU:.2f}"
        what = f"a part of a GPU with {layer.title} is at most {most}"
        yield BrokenPromise("gpu.fraction", what, f"write {most} or less, or count: 1")
    if share.units < (layer.smallest_units or 0):
        least = f"{(layer.smallest_units or 0) / UNITS_PER_GPU:.2f}"
        yield BrokenPromise(
            "gpu.fraction", f"the smallest share of {layer.title} is {least}", f"write at least {least}"
        )


def _of_memory(promises: Promises, layer: Layer) -> Iterator[BrokenPromise]:
    if promises.engine is not None:
        what = "the memory engine is a part of the layer native"
        yield BrokenPromise("gpu.memory.engine", what, "remove the line")
    if promises.oversubscribe and not layer.oversubscribes:
        what = f"{layer.title} does not move GPU memory to host memory"
        yield BrokenPromise("gpu.memory.oversubscribe", what, "write oversubscribe: false, or remove the line")
    if promises.guarantee is not None and layer.memory is Enforcement.NONE:
        what = f"{layer.title} does not divide GPU memory"
        yield BrokenPromise("gpu.memory.guarantee", what, "remove the line")
    if promises.limit is None:
        return
    own = promises.guarantee or f"{promises.share.units}%"
    if layer.memory in (Enforcement.NONE, Enforcement.ACCOUNTED):
        if promises.limit != "100%":
            what = f"{layer.title} does not limit GPU memory: a session can allocate all of it"
            yield BrokenPromise("gpu.memory.limit", what, "remove the line")
    elif _size(promises.limit) != _size(own):
        what = f"with {layer.title} a session has the memory of its guarantee ({own}), and no more"
        yield BrokenPromise("gpu.memory.limit", what, "remove the line")


def _size(written: str) -> tuple[bool, int]:
    """Return an amount so that equal ones are equal however they are written; a percentage is equal to no bytes."""
    return written.endswith("%"), resolve_bytes(written, 10**12)


def _of_idle(promises: Promises, layer: Layer) -> Iterator[BrokenPromise]:
    what = f"with {layer.title} an idle server keeps its GPU until it stops"
    advice = "write stop_after alone"
    if promises.downgrade and IdleReach.DOWNGRADE not in layer.reach:
        yield BrokenPromise("idle.downgrade_after", what, advice)
    if promises.release and IdleReach.RELEASE not in layer.reach:
        yield BrokenPromise("idle.release_after", what, advice)


MEMORY_SLICES = 8

Memory = int | Fraction | None
"""Bytes, or a part of the GPU's memory slices; None: the same part as the share. A profile lacks some of the memory of
its slices, which programs cannot have on a whole GPU either."""


@dataclass(frozen=True)
class MigProfile:
    """A MIG profile of one GPU model."""

    name: str
    """As in the name of its resource: a "+" of the driver's name is a "." there."""
    slices: int
    """Compute slices."""
    compute_slices: int
    """Compute slices of the whole GPU."""
    memory_slices: int
    memory_bytes: int
    """At least so much."""

    def holds(self, units: int, memory: Memory = None) -> bool:
        """Return whether it is at least the share (units of 1 %) and has the memory."""
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
        """What profiles are ordered by: the larger part of the GPU, both parts together, and plain ones first."""
        compute, memory = Fraction(self.slices, self.compute_slices), Fraction(self.memory_slices, MEMORY_SLICES)
        return max(compute, memory), compute + memory, len(self.name), self.name


@dataclass(frozen=True)
class MigInstance:
    """An isolated part of a GPU in MIG mode. One session can have it."""

    gpu: str
    """UUID of the GPU."""
    gpu_model: str
    profile: MigProfile


def gpu_label(index: int, instance: MigInstance | None) -> str:
    """Return how texts name a GPU, or an instance of it: "GPU 0", "GPU 0, MIG 1g.10gb"."""
    return f"GPU {index}" + (f", MIG {instance.profile.name}" if instance is not None else "")


def smallest(profiles: Iterable[MigProfile], units: int, memory: Memory = None) -> MigProfile | None:
    """Return the smallest profile that holds a share; None: there is none. See `MigProfile.holds`."""
    return min((one for one in profiles if one.holds(units, memory)), key=lambda one: one.size, default=None)


def guaranteed_memory(guarantee: str | None) -> Memory:
    """Return what a template guarantees of the GPU's memory."""
    if guarantee is None or not guarantee.endswith("%"):
        return None if guarantee is None else resolve_bytes(guarantee, 0)
    return Fraction(guarantee[:-1].strip()) / 100
