"""Checks of the kernel, and of how containers get a GPU.

The kernel must allow the system calls that the agent and the library need; a seccomp profile can forbid them.
Containers get a GPU through NVIDIA's container toolkit or through the names in a CDI specification.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.kubernetes.devices.cdi import FOLDERS, cdi_names
from gpushare_spawner.doctor.finding import Finding, Machine, note, ok, problem, skipped

_SYS_MEMBARRIER = {"x86_64": 324, "aarch64": 283}
_MEMBARRIER_QUERY = 0
_EXPEDITED = 1 << 3 | 1 << 4
"""PRIVATE_EXPEDITED and REGISTER_PRIVATE_EXPEDITED of membarrier(2), Linux 4.14."""


def check(machine: Machine, status: Path = Path("/proc/self/status")) -> list[Finding]:
    """Return the findings. ``status``: the status file of this process."""
    architecture = platform.machine()
    system = f"Linux {platform.release()}, {architecture}"
    results = [ok("kernel", system)]
    if architecture not in _SYS_MEMBARRIER:
        remedy = "Use a machine of one of these architectures."
        results = [problem("kernel", f"{system}: the library exists for x86_64 and aarch64 only", remedy)]
    if not _pidfd():
        what = "refused by the kernel, so the agent cannot detect the end of a notebook server"
        remedy = "Use Linux 5.3 or later. In a container, allow pidfd_open in the seccomp profile."
        results.append(problem("pidfd_open", what, remedy))
    if _membarrier():
        results.append(ok("membarrier", "available to this process"))
    else:
        what = "refused by the kernel, so each kernel launch with the library needs a memory fence"
        remedy = "Use Linux 4.14 or later. In a container, allow membarrier in the seccomp profile."
        results.append(note("membarrier", what, remedy))
    filtered = "this process has a filter" if _seccomp(status) else "this process has no filter"
    results.append(ok("seccomp", f"{filtered}; notebooks in containers can have another one"))
    if _memory_cgroups(machine.path(Path("/sys/fs/cgroup"))):
        results.append(ok("cgroups", "memory limits of servers can be read"))
    else:
        what = "no memory controller was found, so the agent cannot read the servers' memory limits"
        remedy = "Mount the cgroups, or give their folder with `gpushare agent --cgroups DIR`."
        results.append(note("cgroups", what, remedy))
    return results


def _membarrier() -> bool:
    number = _SYS_MEMBARRIER.get(platform.machine())
    if number is None:
        return False
    commands = int(ctypes.CDLL(None, use_errno=True).syscall(number, _MEMBARRIER_QUERY, 0, 0))
    return commands >= 0 and commands & _EXPEDITED == _EXPEDITED


def _pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _seccomp(status: Path) -> bool:
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    return fields.get("Seccomp", "0").strip() not in ("", "0")


def _memory_cgroups(cgroups: Path) -> bool:
    controllers = cgroups / "cgroup.controllers"
    if controllers.is_file():
        return "memory" in controllers.read_text().split()
    return (cgroups / "memory").is_dir()


_SOCKETS = (Path("/run/containerd/containerd.sock"), Path("/run/crio/crio.sock"), Path("/run/docker.sock"))
"""Sockets of container engines."""
_TOOLKIT = ("nvidia-container-runtime", "nvidia-ctk")


def check_containers(gpus: tuple[Gpu, ...], machine: Machine) -> list[Finding]:
    """Return the findings. A container of a cluster, such as the agent's, cannot see the node's programs."""
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
        what = "not installed, and not all GPUs have CDI names: containers get no driver"
        remedy = (
            "Install nvidia-container-toolkit and run `nvidia-ctk runtime configure`, or write CDI names with "
            "`nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`."
        )
        results.append(problem("NVIDIA container toolkit", what, remedy))
    return results
