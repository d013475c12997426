"""What a container gets with its devices: the GPU, the session's folder, the library, the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.kubernetes.devices import grant_folders
from gpushare_spawner.agent.kubernetes.host_library import HostLibraries
from gpushare_spawner.agent.kubernetes.kubelet import deviceplugin_pb2 as messages
from gpushare_spawner.agent.sessions.environment import session_environment

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
        environment = session_environment([gpu], grant_folders.socket_in(folder), self.libraries.as_seen)
        mounts = [_mount(folder, read_only=True), _mount(self.libraries.preload, read_only=True)]
        if self.preload_file:
            del environment["LD_PRELOAD"]
            mounts.append(_mount(self.libraries.preload_list, read_only=True, at=PRELOAD_FILE))
        if self.libraries.simulated_driver is not None and "SIMGPU_STATE" in environment:
            mounts.append(_mount(self.libraries.simulated_driver, read_only=True))
            mounts.append(_mount(Path(environment["SIMGPU_STATE"]).parent, read_only=False))
        response = messages.ContainerAllocateResponse(mounts=mounts)
        if cdi_name is not None:
            response.cdi_devices.append(messages.CDIDevice(name=cdi_name))
            # the GPU comes by its name: NVIDIA's runtime is not to add what the image's own variable asks for
            environment["NVIDIA_VISIBLE_DEVICES"] = "void"
        elif not gpu.simulated:
            environment["NVIDIA_VISIBLE_DEVICES"] = gpu.uuid
        response.envs.update(environment)
        return response


def _mount(path: Path, read_only: bool, at: Path | None = None) -> messages.Mount:
    return messages.Mount(host_path=os.fspath(path), container_path=os.fspath(at or path), read_only=read_only)
