"""Checks how containers get a GPU on a node: NVIDIA's container toolkit, or the names of a CDI specification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.kubernetes.devices.cdi import FOLDERS, cdi_names
from gpushare_spawner.doctor.finding import Finding, Machine, ok, problem, skipped

_SOCKETS = (Path("/run/containerd/containerd.sock"), Path("/run/crio/crio.sock"), Path("/run/docker.sock"))
"""Sockets of container engines."""
_TOOLKIT = ("nvidia-container-runtime", "nvidia-ctk")


@dataclass(frozen=True)
class ContainerFacts:
    """Facts that the probe has read."""

    gpus: tuple[Gpu, ...]
    engines: tuple[str, ...] = ()
    """Paths of a kubelet or a container engine."""
    toolkit: str = ""
    """Path of a program of NVIDIA's container toolkit; empty: none."""
    cdi: Mapping[str, str] = field(default_factory=dict)
    """UUID -> CDI name."""
    in_pod: bool = False
    """Whether this is a container of a cluster, like the agent's. It cannot see the node's programs."""


def check(gpus: tuple[Gpu, ...], machine: Machine) -> list[Finding]:
    """Return the findings."""
    return findings(probe(gpus, machine))


def probe(gpus: tuple[Gpu, ...], machine: Machine) -> ContainerFacts:
    """Read the facts."""
    engines = (machine.kubelet, *map(machine.path, _SOCKETS))
    return ContainerFacts(
        gpus=gpus,
        engines=tuple(str(engine) for engine in engines if engine.exists()),
        toolkit=next(filter(None, map(machine.program, _TOOLKIT)), ""),
        cdi=cdi_names(gpus, folders=map(machine.path, FOLDERS)),
        in_pod=machine.in_pod,
    )


def findings(facts: ContainerFacts) -> list[Finding]:
    """Return the findings that follow from the facts."""
    if not facts.engines and not facts.in_pod:
        return [skipped("containers", "no kubelet or container engine was found: servers are local processes")]
    results = [ok("containers", ", ".join(facts.engines) or "this is a container of a cluster")]
    without = [gpu for gpu in facts.gpus if gpu.uuid not in facts.cdi]
    if facts.gpus and not without:
        return [*results, ok("CDI", "each GPU has a name: " + ", ".join(facts.cdi.values()))]
    if facts.in_pod and facts.gpus:
        return [*results, ok("NVIDIA container toolkit", "installed on the node: this container has the GPUs")]
    if facts.toolkit:
        return [*results, ok(facts.toolkit, "NVIDIA container toolkit is installed")]
    return [
        *results,
        problem(
            "NVIDIA container toolkit",
            "not installed, and not all GPUs have CDI names: containers get no driver",
            "Install nvidia-container-toolkit and run `nvidia-ctk runtime configure`, or write CDI names with "
            "`nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`.",
        ),
    ]
