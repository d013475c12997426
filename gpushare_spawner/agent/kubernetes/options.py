"""``gpushare agent --kubernetes``: its options, and the cluster that they describe.

Without this option, no Kubernetes package is imported.

`WithoutProcesses` is NVML without its per-process figures. The driver uses the host's process IDs. If the agent runs in
its own pid namespace (a pod without hostPID), it cannot match any of them: the kernel reports pid 0 for a process in
another namespace, and an ID that exists in both namespaces belongs to different processes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.command import Answer, Unusable
from gpushare_spawner.agent.gpus.nvml import Gpu, GpuSource, GpuState, NoGpu, Utilisation
from gpushare_spawner.agent.kubernetes.host_library import CannotBeLoaded, install
from gpushare_spawner.agent.kubernetes.settings import ClusterSettings
from gpushare_spawner.agent.node import Node
from gpushare_spawner.agent.session_socket import SessionEndpoints
from gpushare_spawner.agent.sessions.environment import simulated_state
from gpushare_spawner.agent.state_folder import StateFolder
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.wording.amounts import missing_package

log = logging.getLogger(__name__)


DEVICE_PLUGIN, DRA, OBSERVE = "device-plugin", "dra", "observe"
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group("on Kubernetes")
    group.add_argument(
        "--kubernetes",
        nargs="?",
        choices=(DEVICE_PLUGIN, DRA, OBSERVE),
        const=DEVICE_PLUGIN,
        help="sessions are pods of this node, not processes. How pods get GPUs: device-plugin (the default): as "
        "extended resources; dra: by claims of dynamic resource allocation, with shares as consumable capacity, which "
        "needs Kubernetes 1.36, or 1.34 with feature gates; observe: from another sharing layer. Then the agent offers "
        "no GPU, and reports when the pods of that layer last used one, so that the culler finds idle servers",
    )
    group.add_argument(
        "--namespace",
        default=None,
        metavar="NAME",
        help="namespace of the notebooks' pods and of the report (default: $POD_NAMESPACE, else this pod's)",
    )
    group.add_argument(
        "--all-namespaces",
        action="store_true",
        help="in a cluster with one namespace per user: read the pods of all namespaces",
    )
    group.add_argument(
        "--host-dir",
        type=Path,
        default=Path("/var/lib/gpushare"),
        metavar="DIR",
        help="a folder of the node, mounted here under the same path: sockets, the library and the agent's state "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--kubelet-dir",
        type=Path,
        default=Path("/var/lib/kubelet"),
        metavar="DIR",
        help="the kubelet's root folder, which contains pod-resources/ (default: %(default)s)",
    )
    group.add_argument(
        "--device-plugins-dir",
        type=Path,
        default=Path("/var/lib/kubelet/device-plugins"),
        metavar="DIR",
        help="the kubelet's folder for device plugins, which is independent of its root folder (default: %(default)s)",
    )
    group.add_argument(
        "--unit-size",
        type=_unit_size,
        default=1,
        metavar="UNITS",
        help="units of 1 %% that one device represents; the hub's configuration must have the same number (default: 1)",
    )
    group.add_argument(
        "--cdi",
        default="auto",
        metavar="auto|off|KIND",
        help="CDI names for GPUs in containers. auto: where the node has a CDI specification; off: never; KIND: only "
        "names of this kind, like nvidia.com/gpu (default: auto)",
    )
    group.add_argument(
        "--preload",
        choices=("env", "file"),
        default="env",
        help="how processes in a container load the library. env: LD_PRELOAD; file: a mounted /etc/ld.so.preload, "
        "which no image and no user setting replaces (default: env)",
    )


@dataclass(frozen=True)
class ClusterOptions:
    """The values of `--kubernetes` and its options."""

    settings: ClusterSettings
    host_dir: Path
    cdi: str
    preload_file: bool
    observes: bool = False
    """Whether another layer allocates the GPUs."""

    def allocatable(self, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
        """Return the agent's GPUs among the given ones. Raises NoGpu."""
        from gpushare_spawner.agent.kubernetes.devices.container import named_by

        visible = os.environ.get("NVIDIA_VISIBLE_DEVICES")
        mine = named_by(visible, gpus)
        if not mine:
            raise NoGpu(f"$NVIDIA_VISIBLE_DEVICES names {visible}, and NVML lists {', '.join(g.uuid for g in gpus)}")
        return mine

    def source(self, nvml: GpuSource, gpus: tuple[Gpu, ...]) -> GpuSource:
        """Return NVML without the figures that cannot be matched with connected processes."""
        return matched(nvml, gpus)

    def endpoints(self, folder: StateFolder) -> SessionEndpoints:
        """Return the factory of sockets for sessions of pods."""
        from gpushare_spawner.agent.kubernetes.pods.sessions import PodEndpoints

        return PodEndpoints(folder)

    def whole_devices(self, units: int) -> int:
        """Return a GPU's share units in whole devices; the remainder is not used."""
        return units // self.settings.unit_size * self.settings.unit_size

    @asynccontextmanager
    async def joined(self, node: Node) -> AsyncIterator[Answer]:
        """Run the node as part of the cluster while the context is open; yield the handler of control requests.

        Raises Unusable or OSError.
        """
        from gpushare_spawner.agent.kubernetes.claims.probe import ClaimsUnavailable, check_kubelet_folder, probe
        from gpushare_spawner.agent.kubernetes.cluster_agent import OnKubernetes, answer_in_cluster
        from gpushare_spawner.agent.kubernetes.devices.cdi import CdiNames
        from gpushare_spawner.agent.kubernetes.devices.container import ContainerResponses
        from gpushare_spawner.agent.kubernetes.observing import ObservingNode
        from gpushare_spawner.clients.api import ClusterApi
        from gpushare_spawner.clients.service_account import NoCluster

        try:
            installed = install(node.libraries, self.host_dir / "lib")
        except CannotBeLoaded as error:
            raise Unusable(f"--host-dir: {error}") from None
        if installed.simulated_driver is not None:
            # notebooks do not run as the agent's user
            os.chmod(simulated_state(), 0o666)
        gpus = node.gpus.values()
        allocation = ContainerResponses(installed, self.preload_file)
        settings = self.settings
        try:
            api = await ClusterApi.connect()
        except NoCluster as error:
            raise Unusable(f"--kubernetes: {error}") from None
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(api.close)
            if self.observes:
                observing = ObservingNode(node, api, allocation, settings)
                await stack.enter_async_context(observing.running())
            else:
                if settings.claims:
                    try:
                        check_kubelet_folder(settings.kubelet_dir)
                        taints = await probe(api, node.settings.name, settings.pods_namespace)
                    except ClaimsUnavailable as error:
                        raise Unusable(str(error)) from None
                    settings = replace(settings, taints=taints)
                cluster = OnKubernetes(node, api, allocation, CdiNames(gpus, self.cdi), settings)
                await stack.enter_async_context(cluster.running())
            yield partial(answer_in_cluster, node)


def read(options: argparse.Namespace) -> ClusterOptions | None:
    """Return the options; None without `--kubernetes`. Raises Unusable."""
    if options.kubernetes is None:
        return None
    try:
        # packages of the kubelet's protocol; checked before the agent creates or locks anything
        importlib.import_module("grpc")
        importlib.import_module("google.protobuf")
    except ImportError as error:
        raise Unusable(missing_package("--kubernetes", error)) from None
    namespace = options.namespace or os.environ.get("POD_NAMESPACE") or _namespace_of_this_pod()
    if not namespace:
        raise Unusable("--kubernetes outside a pod needs --namespace, the namespace of the notebooks' pods")
    if UNITS_PER_GPU % options.unit_size:
        raise Unusable(f"--unit-size {options.unit_size} does not divide {UNITS_PER_GPU}: use one such as 1, 5 or 25")
    host_dir = Path(os.path.abspath(options.host_dir))
    # simulated GPUs use the same state file on all nodes, and must not have the same UUIDs
    os.environ.setdefault("SIMGPU_NODE", options.node)
    if "SIMGPU_STATE" not in os.environ:
        # the state of simulated GPUs must be in a folder that containers can mount
        state = host_dir / "simgpu-state"
        state.mkdir(parents=True, exist_ok=True)
        os.environ["SIMGPU_STATE"] = str(state / "gpus")
    own = (os.environ.get("POD_NAMESPACE"), os.environ.get("POD_NAME"))
    settings = ClusterSettings(
        namespace=namespace,
        all_namespaces=options.all_namespaces,
        kubelet_dir=Path(os.path.abspath(options.kubelet_dir)),
        device_plugins_dir=Path(os.path.abspath(options.device_plugins_dir)),
        unit_size=options.unit_size,
        claims=options.kubernetes == DRA,
        own_pod=(own[0], own[1]) if own[0] and own[1] else None,
        own_pod_uid=os.environ.get("POD_UID"),
    )
    return ClusterOptions(settings, host_dir, options.cdi, options.preload == "file", options.kubernetes == OBSERVE)


def _unit_size(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= UNITS_PER_GPU:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of share units from 1 to {UNITS_PER_GPU}")
    return int(text)


def _namespace_of_this_pod() -> str | None:
    if not os.environ.get("KUBERNETES_SERVICE_HOST"):
        return None  # as in clients/api.py: the mounted files alone do not mean that the agent is in a pod
    try:
        return _SERVICE_ACCOUNT.read_text().strip() or None
    except OSError:
        return None


class WithoutProcesses:
    """GPU figures without per-process figures."""

    def __init__(self, source: GpuSource) -> None:
        self._source = source

    def state(self, gpu: Gpu) -> GpuState:
        """Return the source's current figures, without its processes. Can block for milliseconds."""
        return replace(self._source.state(gpu), processes={})

    def memory(self, gpu: Gpu) -> GpuState | None:
        """Return the source's current memory figures, without its processes. Can block for milliseconds."""
        state = self._source.memory(gpu)
        return None if state is None else replace(state, processes={})

    def utilisation(self, gpu: Gpu, since: float) -> tuple[Utilisation, ...] | None:
        """Return None, because it is unknown here. GPU time is then estimated from leases."""
        return None


def matched(source: GpuSource, gpus: tuple[Gpu, ...]) -> GpuSource:
    """Return a source with pids of the agent's pid namespace: this source, or a source without processes.

    The simulated driver uses the pids that processes see themselves.
    """
    if all(gpu.simulated for gpu in gpus) or processes.sees_the_host():
        return source
    log.warning(
        "the host's processes are not visible to this agent (hostPID): GPU time is estimated from leases, "
        "and processes that use a GPU without the library are not found"
    )
    return WithoutProcesses(source)
