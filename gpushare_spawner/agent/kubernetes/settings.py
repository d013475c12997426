"""The agent's place in its cluster, as options.py reads it; no package for Kubernetes is needed for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gpushare_spawner.model.kubernetes.objects import REPORT_REFRESH_SECONDS


@dataclass(frozen=True)
class PublishSettings:
    """Rates, in seconds."""

    at_most_every: float = 15.0
    """Between two writes for changes of activity only."""
    refresh_every: float = REPORT_REFRESH_SECONDS - 5
    """A report is written again after this long without a change: the hub does not trust an old one."""
    settle: float = 0.2
    """A change of capacity is written after this long, so that several changes need one write."""
    capacity_every: float = 1.0
    """Between any two writes."""
    poll_every: float = 3.0
    """Between two checks for changes of activity only."""


@dataclass(frozen=True)
class ClusterSettings:
    """The agent's place in its cluster."""

    namespace: str
    """Namespace of the report and of the notebooks' pods."""
    all_namespaces: bool = False
    """The notebooks' pods can be in any namespace."""
    kubelet_dir: Path = Path("/var/lib/kubelet")
    """The kubelet's root folder."""
    device_plugins_dir: Path = Path("/var/lib/kubelet/device-plugins")
    """The folder for sockets of device plugins: a constant of the kubelet, wherever its root folder is."""
    unit_size: int = 1
    """Share units of 1 % that one device stands for."""
    claims: bool = False
    """Pods get GPUs by claims, not by device plugins."""
    taints: bool = True
    """The API server keeps taints of the devices of claims."""
    own_pod: tuple[str, str] | None = None
    """(namespace, name) of the agent's own pod."""
    own_pod_uid: str | None = None
    publish: PublishSettings = field(default_factory=PublishSettings)

    @property
    def pod_resources(self) -> Path:
        """The kubelet's socket that lists devices by pod."""
        return self.kubelet_dir / "pod-resources" / "kubelet.sock"

    @property
    def pods_namespace(self) -> str:
        """Namespace of the notebooks' pods; empty: all."""
        return "" if self.all_namespaces else self.namespace

    @property
    def owners(self) -> list[dict[str, object]]:
        """The report's metadata.ownerReferences: the agent's pod, after which the cluster removes the ConfigMap.

        Empty if the pod is in another namespace, or unknown.
        """
        if self.own_pod is None or not self.own_pod_uid or self.own_pod[0] != self.namespace:
            return []
        pod = {"name": self.own_pod[1], "uid": self.own_pod_uid}
        return [{"apiVersion": "v1", "kind": "Pod", "controller": False, **pod}]
