"""The devices' content for a container: the GPU, the session's folder, the library and the environment.

This module also decides which GPUs belong to this agent, because NVIDIA's own device plugin can run on the same node.
Either the agent's pod requests whole GPUs from NVIDIA's plugin (``nvidia.com/gpu: 4``) and shares those, or no NVIDIA
plugin runs on the node and the agent shares all GPUs. One rule covers both cases: a GPU that is offered as an
``nvidia.com/`` resource on this node, or that a pod holds as such a resource, is shared only if the agent's own pod
holds it. The rule is checked again before each grant: the agent never allocates a GPU that is not its own, regardless
of its configuration.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.kubernetes.devices import owners
from gpushare_spawner.agent.kubernetes.devices.pod_resources import KubeletAssignments, PodKey
from gpushare_spawner.agent.kubernetes.host_library import HostLibraries
from gpushare_spawner.agent.kubernetes.kubelet import deviceplugin_pb2 as messages
from gpushare_spawner.agent.sessions.environment import session_environment
from gpushare_spawner.model.layers import OBSERVES
from gpushare_spawner.model.report import ClaimsReport, MountReport

log = logging.getLogger(__name__)


PRELOAD_FILE = Path("/etc/ld.so.preload")


@dataclass(frozen=True)
class ContainerResponses:
    """Responses for all the node's GPUs.

    Each mount has the same path in the container and on the node, so a variable with a path is valid in both.
    """

    libraries: HostLibraries
    preload_file: bool = False
    """Whether to preload the library through /etc/ld.so.preload instead of LD_PRELOAD, which a program can replace."""

    def answer(self, gpu: Gpu, folder: Path, cdi_name: str | None) -> messages.ContainerAllocateResponse:
        """Return the response for a container that gets devices of this GPU.

        `folder`: the folder of its grant. `cdi_name`: the GPU's name in the node's CDI specifications; None if it has
        none.
        """
        environment = self._environment([gpu], owners.socket_in(folder))
        mounts = self._mounts(environment)
        if cdi_name is not None:
            # the CDI name adds the GPU: NVIDIA's runtime must not add GPUs requested by the image's own variable
            environment["NVIDIA_VISIBLE_DEVICES"] = "void"
        elif not gpu.simulated:
            environment["NVIDIA_VISIBLE_DEVICES"] = gpu.uuid
        response = _response(folder, mounts, environment)
        if cdi_name is not None:
            response.cdi_devices.append(messages.CDIDevice(name=cdi_name))
        return response

    def to_observe(self, folder: Path) -> messages.ContainerAllocateResponse:
        """Return the response for a container with another layer's GPU: socket and library.

        The library reports GPU work. `folder`: the folder of its grant.
        """
        environment = {"GPUSHARE_SOCKET": os.fspath(owners.socket_in(folder)), **OBSERVES}
        if not self.preload_file:
            environment["LD_PRELOAD"] = os.fspath(self.libraries.preload)
        return _response(folder, self._mounts({}), environment)

    def of_claims(self, gpus: Iterable[Gpu], folder: Path) -> ClaimsReport:
        """Return the part of the report from which the spawner configures the pod in place of `answer`.

        `folder`: the parent of the claims' folders.
        """
        environment = self._environment(gpus, folder)
        mounts = self._mounts(environment)
        for name in ("GPUSHARE_SOCKET", "CUDA_VISIBLE_DEVICES"):
            del environment[name]
        return ClaimsReport(
            folder=os.fspath(folder),
            socket=os.fspath(owners.socket_in(Path())),
            environment=environment,
            mounts=tuple(mounts),
        )

    def _environment(self, gpus: Iterable[Gpu], socket: Path) -> dict[str, str]:
        environment = session_environment(gpus, socket, self.libraries)
        if self.preload_file:
            del environment["LD_PRELOAD"]
        return environment

    def _mounts(self, environment: Mapping[str, str]) -> list[MountReport]:
        """Return the mounts other than the session's folder."""
        mounts = [_mount(self.libraries.preload)]
        if self.preload_file:
            mounts.append(_mount(self.libraries.preload_list, at=PRELOAD_FILE))
        if self.libraries.simulated_driver is not None and "SIMGPU_STATE" in environment:
            mounts.append(_mount(self.libraries.simulated_driver))
            mounts.append(_mount(Path(environment["SIMGPU_STATE"]).parent, read_only=False))
        return mounts


def _response(
    folder: Path, mounts: Iterable[MountReport], environment: Mapping[str, str]
) -> messages.ContainerAllocateResponse:
    """Return the response with these mounts and the grant's folder."""
    return messages.ContainerAllocateResponse(
        mounts=[
            messages.Mount(host_path=mount.host_path, container_path=mount.container_path, read_only=mount.read_only)
            for mount in (_mount(folder), *mounts)
        ],
        envs=environment,
    )


def _mount(path: Path, read_only: bool = True, at: Path | None = None) -> MountReport:
    return MountReport(host_path=os.fspath(path), container_path=os.fspath(at or path), read_only=read_only)


NVIDIA = "nvidia.com/"
_EVERYTHING = ("", "all", "void", "none")


def named_by(visible: str | None, gpus: Iterable[Gpu]) -> tuple[Gpu, ...]:
    """Return the GPUs that $NVIDIA_VISIBLE_DEVICES names, by UUID or index; all GPUs if it names none.

    All of the node's GPUs are visible in a privileged container, regardless of what NVIDIA's plugin assigned: only this
    variable shows the container's GPUs. Indices are the node's: a container with only its own GPUs numbers them from 0.
    """
    names = {part.strip() for part in (visible or "").split(",") if part.strip()}
    seen = tuple(gpus)
    if not names or not names.isdisjoint(_EVERYTHING):
        return seen
    if len(names) == len(seen) and all(part.isdigit() for part in names):
        return seen
    return tuple(gpu for gpu in seen if gpu.uuid in names or str(gpu.index) in names)


def withheld(gpus: Iterable[Gpu], assignments: KubeletAssignments, own: PodKey | None) -> dict[str, str]:
    """Return the UUIDs of GPUs that NVIDIA's plugin can assign to other pods, each with an explanatory sentence.

    `own`: the agent's pod; None: unknown.
    """
    mine = _held_by(assignments, own)
    others = {
        resource: frozenset[str]().union(
            *(_held_by(assignments, pod).get(resource, ()) for pod in assignments.by_pod if pod != own)
        )
        for resource in {name for held in assignments.by_pod.values() for name in held}
    }
    reasons: dict[str, str] = {}
    for gpu in gpus:
        for resource in sorted({*assignments.offered, *others}):
            held = mine.get(resource, frozenset())
            if not resource.startswith(NVIDIA) or any(id.isdigit() for id in held):
                # IDs can be indices on the node, which differ from the indices in this container. All visible GPUs
                # count.
                continue
            if any(_is_of(id, gpu) for id in others.get(resource, ())):
                reasons[gpu.uuid] = (
                    f"GPU {gpu.index} ({gpu.uuid}) is held as {resource} by another pod on this node: "
                    "it is shared when that pod has ended"
                )
                continue
            of_gpu = {id for id in assignments.offered.get(resource, ()) if _is_of(id, gpu)}
            if of_gpu and not of_gpu <= held:
                reasons[gpu.uuid] = (
                    f"GPU {gpu.index} ({gpu.uuid}) is offered as {resource} by another device plugin on this node, "
                    "and this agent's pod does not hold it: let the agent's pod request it, or remove that plugin from "
                    "the node"
                )
    return reasons


def lists_own_pod(assignments: KubeletAssignments, own: PodKey | None) -> bool:
    """Return whether the kubelet's list contains our pod, if known: just after the kubelet's start, it lacks pods."""
    return own is None or own in assignments.by_pod


def _held_by(assignments: KubeletAssignments, pod: PodKey | None) -> dict[str, frozenset[str]]:
    """Return the devices of all containers of a pod."""
    held = assignments.by_pod.get(pod, {}) if pod is not None else {}
    return {resource: frozenset[str]().union(*given) for resource, given in held.items()}


def _is_of(device: str, gpu: Gpu) -> bool:
    # NVIDIA's plugin names a device by the GPU's UUID or index, with the suffix ::n for a time-sliced GPU's replica
    return device.partition("::")[0] in (gpu.uuid, str(gpu.index))
