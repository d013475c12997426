"""The agent's place in its cluster, as read by options.py. This module needs no Kubernetes package."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gpushare_spawner.model.kubernetes.objects import REPORT_REFRESH_SECONDS


@dataclass(frozen=True)
class PublishSettings:
    """Intervals between writes, in seconds."""

    at_most_every: float = 15.0
    """Minimum between two writes if only activity has changed."""
    refresh_every: float = REPORT_REFRESH_SECONDS - 5
    """Time without a change after which the report is rewritten: the hub does not trust an old report."""
    capacity_delay: float = 0.2
    """Delay before a change of capacity is written, so that several changes need only one write."""
    capacity_every: float = 1.0
    """Minimum between any two writes."""
    poll_every: float = 3.0
    """Interval between checks for changes of activity alone."""


@dataclass(frozen=True)
class ClusterSettings:
    """The agent's place in its cluster."""

    namespace: str
    """Namespace of the report and of the notebooks' pods."""
    all_namespaces: bool = False
    """Whether the notebooks' pods can be in any namespace."""
    kubelet_dir: Path = Path("/var/lib/kubelet")
    """The kubelet's root folder."""
    device_plugins_dir: Path = Path("/var/lib/kubelet/device-plugins")
    """The folder for device plugins' sockets: a constant of the kubelet, independent of its root folder."""
    unit_size: int = 1
    """Number of share units of 1 % that one device represents."""
    claims: bool = False
    """Whether pods get GPUs through claims instead of device plugins."""
    taints: bool = True
    """Whether the API server stores taints of claims' devices."""
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
        """The report's metadata.ownerReferences: the agent's pod, with which the cluster removes the ConfigMap.

        Empty if the pod is in another namespace or unknown.
        """
        if self.own_pod is None or not self.own_pod_uid or self.own_pod[0] != self.namespace:
            return []
        pod = {"name": self.own_pod[1], "uid": self.own_pod_uid}
        return [{"apiVersion": "v1", "kind": "Pod", "controller": False, **pod}]
