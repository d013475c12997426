"""The layers that can share a GPU, and the capabilities of each. The form, docs, checks and culler use them.

The rules for layers, and the content of `layers.yaml`, are in `model.layers_file`. This module also defines the
placement of a share, a template's memory engine (how device memory leaves the GPU), and the variables of CUDA
frameworks that a session starts with, unless they are already set.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

LAYER_VARIABLE = "GPUSHARE_LAYER"
"""Environment variable with the layer's name, in a server with a GPU of another layer."""


class LayerName(StrEnum):
    """The name of a layer, as in admins' files."""

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
    """The part of the system that keeps a session within its part of a GPU."""

    NONE = "none"
    """Nothing: sessions can take more at the expense of others, and their parts are not counted."""
    ACCOUNTED = "accounted"
    """Nothing, but sessions with parts that add up to more than the GPU are never placed together."""
    SOFTWARE = "software"
    """The layer's library or daemon, or the driver."""
    HARDWARE = "hardware"
    """The GPU itself."""

    @property
    def enforced(self) -> bool:
        """Whether a session is kept within its part."""
        return self in (Enforcement.SOFTWARE, Enforcement.HARDWARE)


class PlacedBy(StrEnum):
    """The part of the system that chooses the GPU of a session."""

    LEDGER = "ledger"
    """The hub, using its ledger of all allocations."""
    SCHEDULER = "scheduler"
    """The cluster's scheduler, or the layer's own scheduler."""


class IdleReach(StrEnum):
    """The idle action that a layer supports while the server runs. A server can be stopped under every layer."""

    DOWNGRADE = "downgrade"
    RELEASE = "release"
    RESIZE = "resize"


class ObservedBy(StrEnum):
    """How the agent measures the GPU work of sessions to detect idle sessions."""

    LIBRARY = "library"
    """The preload library reports each burst. On Kubernetes, the driver's counters measure the work of processes
    without it. On one machine, such processes are reported, and their work is not measured."""
    NVML = "NVML"
    """The driver's counters of each process. They are used if the layer preloads its own library, or can be configured
    to do so: two such libraries in one container replace each other, or wrap the same functions."""


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
    """The name in texts."""
    smallest_units: int | None = None
    """The smallest share, and the increment of shares, in units of 1 %; None: determined by the nodes' replicas or
    profiles."""
    memory: Enforcement = Enforcement.SOFTWARE
    """What keeps a session within its part of the GPU's memory."""
    compute: Enforcement = Enforcement.SOFTWARE
    """What keeps a session within its part of the GPU's time."""
    places: PlacedBy = PlacedBy.SCHEDULER
    observed_by: ObservedBy = ObservedBy.LIBRARY
    largest_units: int = 100
    """The largest fraction of one GPU, in units of 1 %; a whole GPU is also possible."""
    reach: frozenset[IdleReach] = frozenset()
    oversubscribes: bool = False
    """Whether sessions together can allocate more memory than the GPU has."""
    several_gpus: bool = True
    """Whether a session can have several whole GPUs."""
    parts_of_several_gpus: bool = False
    """Whether a session can have a part of each of several GPUs."""
    legacy: bool = False
    """Whether its project is no longer maintained."""
    replaces_pods: bool = False
    """Whether its scheduler deletes a pod and recreates it. Objects that the first pod owns are then deleted too."""
    where: frozenset[Where] = frozenset({Where.KUBERNETES})
    note: str = ""
    """Additional information for admins, in full sentences."""
    source: LayerSource | None = None
    """The layer's public source; None: our own layer."""


LAYERS: dict[LayerName, Layer] = {
    layer.name: layer
    for layer in (
        Layer(
            name=LayerName.NATIVE,
            title="gpushare",
            smallest_units=1,
            places=PlacedBy.LEDGER,
            reach=frozenset(IdleReach),
            oversubscribes=True,
            parts_of_several_gpus=True,
            where=frozenset(Where),
            note="While others are idle, a session can use more than its share. While others work, it gets GPU time "
            "in proportion to its share.",
        ),
        Layer(
            name=LayerName.TIME_SLICING,
            title="NVIDIA time-slicing",
            memory=Enforcement.NONE,
            compute=Enforcement.NONE,
            largest_units=50,
            note="A share is one replica: with 4 replicas of each GPU a template of 0.25 GPU or less gets one, and "
            "0.50 GPU needs nodes with 2. A GPU has as many sessions as it has replicas. Sessions that work "
            "take turns of equal length. Whole GPUs (`count: 1`) are those that the plugin does not share. "
            "Configure a renamed resource with `options: {time-slicing: {resource: example.com/slice}}`.",
            source=LayerSource(
                "NVIDIA/k8s-device-plugin", "0.20.0", ("api/config/v1/sharing.go", "internal/lm/resource.go")
            ),
        ),
        Layer(
            name=LayerName.MPS,
            title="NVIDIA MPS",
            largest_units=50,
            where=frozenset(Where),
            note="On Kubernetes a session has an equal part of the GPU's memory and threads, one for each replica. "
            "On one machine it has the part that its share gives, of one GPU at most. A fault in one session's "
            "GPU program ends the GPU programs of all sessions on that GPU. A GPU runs at most 48 GPU programs, "
            "or 16 below compute capability 7.5.",
            source=LayerSource(
                "NVIDIA/k8s-device-plugin", "0.20.0", ("cmd/mps-control-daemon/mps/device.go", "internal/rm/rm.go")
            ),
        ),
        Layer(
            name=LayerName.MIG,
            title="NVIDIA MIG",
            memory=Enforcement.HARDWARE,
            compute=Enforcement.HARDWARE,
            where=frozenset(Where),
            note="A share is rounded up to the smallest profile of the GPU model that has at least that part of the "
            "compute slices and of the memory slices, and the memory of `gpu.memory.guarantee`: 0.25 GPU gets "
            "`2g.20gb` on an A100 with 80 GB, or `3g.40gb` if no smaller one exists. Profiles that share an "
            "instance's memory (`1c.3g.20gb`) are not used. Create the MIG devices as before: the hub creates "
            "none. On one machine a session has one of the instances that the admin created.",
            source=LayerSource(
                "NVIDIA/k8s-device-plugin", "0.20.0", ("internal/lm/mig-strategy.go", "internal/rm/devices.go")
            ),
        ),
        Layer(
            name=LayerName.HAMI,
            title="HAMi",
            smallest_units=1,
            parts_of_several_gpus=True,
            observed_by=ObservedBy.NVML,
            note="The hub names HAMi's scheduler in the pod, because HAMi's webhook skips pods that name another "
            "scheduler. HAMi denies privileged containers. A GPU has at most as many sessions as its "
            "`deviceSplitCount`, 10 by default, whatever their shares.",
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
            observed_by=ObservedBy.NVML,
            note="GPU sharing must be enabled in KAI Scheduler (`global.gpuSharing=true` in its chart); its "
            "admission webhook rejects fractions otherwise. Create a leaf queue with a limit: without a limit "
            "the queue allows nothing, and -1 means no limit. Pods get the priority class `build`, which KAI "
            "Scheduler does not preempt, and must fit in the queue's quota. With `options: {kai: "
            "{priority_class: train}}` servers can use more than the quota, and KAI Scheduler can end them. "
            "`queues: {physics: physics-notebooks}` names the queue of a quota.",
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
            memory=Enforcement.ACCOUNTED,
            compute=Enforcement.ACCOUNTED,
            note="A session has a whole GPU or a MIG device. With `options: {dra: {consumable: true}}` it has a part "
            "of a GPU, which nothing enforces: start NVIDIA's driver with its feature gate ConsumableShares and "
            "`--consumable-shares=100`. Needs Kubernetes 1.34 or later. The hub creates a ResourceClaimTemplate "
            "for each template, named by its content. If an existing one with that name differs, the hub does "
            "not start the server: in their own namespace, users can create one that requests more.",
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
            compute=Enforcement.ACCOUNTED,
            legacy=True,
            note="A process that exceeds its part of the memory is killed within 5 s. A share can be split over GPUs.",
            source=LayerSource("cnvrg/metagpu", "aa4ac9c (November 2022)", ("README.md", "config/config.yaml")),
        ),
        Layer(
            name=LayerName.NVSHARE,
            title="nvshare",
            memory=Enforcement.NONE,
            compute=Enforcement.NONE,
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
            observed_by=ObservedBy.NVML,
            legacy=True,
            replaces_pods=True,
            note="Its scheduler deletes the pod and creates it again on the chosen node, so the server's token is in "
            "the pod, where the agents can read it.",
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
class Placement:
    """The node and GPUs of a share.

    ``borrowed``: units of the share, on each GPU, that idle sessions have lent. Their owners reclaim them when they
    work again.
    """

    node: str
    gpus: tuple[str, ...]
    """UUIDs, in NVML's format."""
    borrowed: int = 0
    layer: LayerName = LayerName.NATIVE
    """The sharing layer of the GPUs."""


ENGINE_VARIABLE = "GPUSHARE_ENGINE"
"""Environment variable that sets the engine of libgpushare.so."""


OBSERVES = {ENGINE_VARIABLE: "observe"}
"""The variable if another layer shares the GPU: the library then only reports GPU work."""


class MemoryEngine(StrEnum):
    """How sessions together can allocate more memory than the GPU has."""

    MANAGED = "managed"
    """Device memory becomes CUDA managed memory. Its pages move individually, even while the session works."""
    SUSPEND = "suspend"
    """Device memory stays as the program allocates it. The driver moves all of a session's memory and CUDA contexts
    together, while the session is suspended."""


def engine_environment(engine: MemoryEngine) -> dict[str, str]:
    """Return the variables that set the engine of libgpushare.so; none for `managed`, its default."""
    return {} if engine is MemoryEngine.MANAGED else {ENGINE_VARIABLE: engine.value}


FRAMEWORK_DEFAULTS = {
    # JAX reserves 75 % of the GPU when it starts
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    # TensorFlow reserves all of it
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}
"""Variables for a session, unless they are already set, even to an empty value. Other kernels of the session cannot use
memory that a framework reserves in advance."""
