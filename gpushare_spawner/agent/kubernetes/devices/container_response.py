"""What a container gets with its devices: the GPU, the session's folder, the library, the environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.kubernetes.devices import grant_folders
from gpushare_spawner.agent.kubernetes.host_library import HostLibraries
from gpushare_spawner.agent.kubernetes.kubelet import deviceplugin_pb2 as messages
from gpushare_spawner.agent.sessions.environment import session_environment
from gpushare_spawner.model.memory_engine import OBSERVES
from gpushare_spawner.model.report import ClaimsReport, MountReport

PRELOAD_FILE = Path("/etc/ld.so.preload")


@dataclass(frozen=True)
class Allocation:
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
        environment = self._environment([gpu], grant_folders.socket_in(folder))
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
        environment = {"GPUSHARE_SOCKET": os.fspath(grant_folders.socket_in(folder)), **OBSERVES}
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
            socket=os.fspath(grant_folders.socket_in(Path())),
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
            messages.Mount(host_path=one.host_path, container_path=one.container_path, read_only=one.read_only)
            for one in mounts
        ]
    )


def _mount(path: Path, read_only: bool = True, at: Path | None = None) -> MountReport:
    return MountReport(host_path=os.fspath(path), container_path=os.fspath(at or path), read_only=read_only)
