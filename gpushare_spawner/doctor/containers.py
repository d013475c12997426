"""Checks how containers get a GPU on a node: NVIDIA's container toolkit, or the names of a CDI specification."""

from __future__ import annotations

from pathlib import Path

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.kubernetes.devices.cdi import FOLDERS, cdi_names
from gpushare_spawner.doctor.finding import Finding, Machine, ok, problem, skipped

_SOCKETS = (Path("/run/containerd/containerd.sock"), Path("/run/crio/crio.sock"), Path("/run/docker.sock"))
"""Sockets of container engines."""
_TOOLKIT = ("nvidia-container-runtime", "nvidia-ctk")


def check(gpus: tuple[Gpu, ...], machine: Machine) -> list[Finding]:
    """Return the findings. A container of a cluster, like the agent's, cannot see the node's programs."""
    engines = [str(engine) for engine in (machine.kubelet, *map(machine.path, _SOCKETS)) if engine.exists()]
    if not engines and not machine.in_pod:
        return [skipped("containers", "no kubelet or container engine was found: servers are local processes")]
    results = [ok("containers", ", ".join(engines) or "this is a container of a cluster")]
    names = cdi_names(gpus, folders=map(machine.path, FOLDERS))
    toolkit = next(filter(None, map(machine.program, _TOOLKIT)), None)
    if gpus and all(gpu.uuid in names for gpu in gpus):
        results.append(ok("CDI", "each GPU has a name: " + ", ".join(names.values())))
    elif machine.in_pod and gpus:
        results.append(ok("NVIDIA container toolkit", "installed on the node: this container has the GPUs"))
    elif toolkit is not None:
        results.append(ok(toolkit, "NVIDIA container toolkit is installed"))
    else:
        results.append(
            problem(
                "NVIDIA container toolkit",
                "not installed, and not all GPUs have CDI names: containers get no driver",
                "Install nvidia-container-toolkit and run `nvidia-ctk runtime configure`, or write CDI names with "
                "`nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`.",
            )
        )
    return results
