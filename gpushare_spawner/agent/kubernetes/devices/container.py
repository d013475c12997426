"""What a container gets with its devices: the GPU, the session's folder, the library, the environment.

Which GPUs are this agent's to give out: NVIDIA's own device plugin may be on the same node.

Two ways lead to a GPU. The agent's pod may ask NVIDIA's plugin for whole GPUs (``nvidia.com/gpu: 4``) and shares those;
or no NVIDIA plugin runs on the node, and the agent shares all. One rule holds for both: a GPU that an ``nvidia.com/``
resource offers on this node, or that a pod holds as such, is shared only if the agent's own pod holds it. It is asked
again before devices are given to a container: the agent gives out no GPU that is not its own, whatever was configured.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.kubernetes.devices import owners
from gpushare_spawner.agent.kubernetes.devices.pod_resources import Handed, PodKey
from gpushare_spawner.agent.kubernetes.host_library import HostLibraries
from gpushare_spawner.agent.kubernetes.kubelet import deviceplugin_pb2 as messages
from gpushare_spawner.agent.sessions.environment import session_environment
from gpushare_spawner.model.placement import OBSERVES
from gpushare_spawner.model.report import ClaimsReport, MountReport

log = logging.getLogger(__name__)


PRELOAD_FILE = Path("/etc/ld.so.preload")


@dataclass(frozen=True)
class ContainerResponses:
    """Answers for every GPU of the node.

    Everything is mounted under the path that it has on the node, so that a variable with a path means the same inside
    and outside.
    """

    libraries: HostLibraries
    preload_file: bool = False
    """Preload the library by /etc/ld.so.preload rather than LD_PRELOAD, which a program may replace."""

    def answer(self, gpu: Gpu, folder: Path, cdi_name: str | None) -> messages.ContainerAllocateResponse:
        """For a container that gets devices of this GPU. `folder`: its grant's; `cdi_name`: what the node's CDI
        specifications call the GPU, where they have it."""
        environment = self._environment([gpu], owners.socket_in(folder))
        mounts = [
            MountReport(host_path=os.fspath(folder), container_path=os.fspath(folder)),
            *self._mounts(environment),
        ]
        response = _response(mounts)
        if cdi_name is not None:
            response.cdi_devices.append(messages.CDIDevice(name=cdi_name))
            # the GPU comes by its name: NVIDIA's runtime is not to add what the image's own variable asks for
            environment["NVIDIA_VISIBLE_DEVICES"] = "void"
        elif not gpu.simulated:
            environment["NVIDIA_VISIBLE_DEVICES"] = gpu.uuid
        response.envs.update(environment)
        return response

    def to_observe(self, folder: Path) -> messages.ContainerAllocateResponse:
        """For a container whose GPU another layer gives: the socket, and the library to report GPU work. `folder`: its
        grant's."""
        environment = {"GPUSHARE_SOCKET": os.fspath(owners.socket_in(folder)), **OBSERVES}
        mounts = [MountReport(host_path=os.fspath(folder), container_path=os.fspath(folder)), *self._mounts({})]
        if not self.preload_file:
            environment["LD_PRELOAD"] = os.fspath(self.libraries.preload)
        response = _response(mounts)
        response.envs.update(environment)
        return response

    def of_claims(self, gpus: Iterable[Gpu], folder: Path) -> ClaimsReport:
        """For the report of a node with these GPUs, where the spawner does what `answer` does. `folder`: that of all
        claims' folders."""
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
        environment = session_environment(gpus, socket, self.libraries.as_seen)
        if self.preload_file:
            del environment["LD_PRELOAD"]
        return environment

    def _mounts(self, environment: Mapping[str, str]) -> list[MountReport]:
        """Beside the session's folder."""
        mounts = [_mount(self.libraries.preload)]
        if self.preload_file:
            mounts.append(_mount(self.libraries.preload_list, at=PRELOAD_FILE))
        if self.libraries.simulated_driver is not None and "SIMGPU_STATE" in environment:
            mounts.append(_mount(self.libraries.simulated_driver))
            mounts.append(_mount(Path(environment["SIMGPU_STATE"]).parent, read_only=False))
        return mounts


def _response(mounts: Iterable[MountReport]) -> messages.ContainerAllocateResponse:
    return messages.ContainerAllocateResponse(
        mounts=[
            messages.Mount(host_path=mount.host_path, container_path=mount.container_path, read_only=mount.read_only)
            for mount in mounts
        ]
    )


def _mount(path: Path, read_only: bool = True, at: Path | None = None) -> MountReport:
    return MountReport(host_path=os.fspath(path), container_path=os.fspath(at or path), read_only=read_only)


NVIDIA = "nvidia.com/"
_EVERYTHING = ("", "all", "void", "none")


def named_by(visible: str | None, gpus: Iterable[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs that $NVIDIA_VISIBLE_DEVICES names, by UUID or index; all where it names none.

    A privileged container sees every GPU of the node, whatever NVIDIA's plugin gave to it: only this variable tells.
    Indices are those on the node: a container that sees no more GPUs than were given to it numbers them anew.
    """
    wanted = {part.strip() for part in (visible or "").split(",") if part.strip()}
    seen = tuple(gpus)
    if not wanted or not wanted.isdisjoint(_EVERYTHING):
        return seen
    if len(wanted) == len(seen) and all(part.isdigit() for part in wanted):
        return seen
    return tuple(gpu for gpu in seen if gpu.uuid in wanted or str(gpu.index) in wanted)


def withheld(gpus: Iterable[Gpu], handed: Handed, own: PodKey | None) -> dict[str, str]:
    """UUIDs of GPUs that NVIDIA's plugin may give to others, each with a sentence about it.

    `own`: the agent's pod, where it is known.
    """
    mine = _held_by(handed, own)
    others = {
        resource: frozenset[str]().union(
            *(_held_by(handed, pod).get(resource, ()) for pod in handed.by_pod if pod != own)
        )
        for resource in {name for held in handed.by_pod.values() for name in held}
    }
    reasons: dict[str, str] = {}
    for gpu in gpus:
        for resource in sorted({*handed.offered, *others}):
            held = mine.get(resource, frozenset())
            if not resource.startswith(NVIDIA) or any(id.isdigit() for id in held):
                # ids may be indices on the node, which are others than in this container: then what is seen here counts
                continue
            if any(_is_of(id, gpu) for id in others.get(resource, ())):
                reasons[gpu.uuid] = (
                    f"GPU {gpu.index} ({gpu.uuid}) is held as {resource} by another pod on this node: "
                    "it is shared when that pod has ended"
                )
                continue
            of_gpu = {id for id in handed.offered.get(resource, ()) if _is_of(id, gpu)}
            if of_gpu and not of_gpu <= held:
                reasons[gpu.uuid] = (
                    f"GPU {gpu.index} ({gpu.uuid}) is offered as {resource} by another device plugin on this node, "
                    "and this agent's pod does not hold it: let the agent ask for it, or take that plugin off the node"
                )
    return reasons


def tells_of(handed: Handed, own: PodKey | None) -> bool:
    """Whether the kubelet's list can be trusted in this: just after its start it leaves out pods, our own as well."""
    return own is None or own in handed.by_pod


def _held_by(handed: Handed, pod: PodKey | None) -> dict[str, frozenset[str]]:
    """What a pod holds, its containers together."""
    held = handed.by_pod.get(pod, {}) if pod is not None else {}
    return {resource: frozenset[str]().union(*given) for resource, given in held.items()}


def _is_of(device: str, gpu: Gpu) -> bool:
    # NVIDIA's plugin names a device by the GPU's UUID or index; a replica of a time-sliced GPU has ::n after that
    return device.partition("::")[0] in (gpu.uuid, str(gpu.index))
