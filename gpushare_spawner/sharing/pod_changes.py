"""What a sharing layer changes in a pod, apart from how it decides on it. Pods are plain data, and are never changed in
place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpushare_spawner.model.kubernetes import required_of_node
from gpushare_spawner.sharing.base import PodSpec

NOTEBOOK = "notebook"
"""KubeSpawner's name of the container that the notebook server runs in."""


@dataclass(frozen=True)
class PodChange:
    """Additions to a pod. What the pod has already under the same name is replaced."""

    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    """Of the notebook server's container. Of these resources requests equal limits."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the notebook server's container."""
    node_labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The values of which a node's label must have one."""
    scheduler: str = ""
    """Empty: the pod's own."""
    priority_class: str = ""
    """Empty: the pod's own."""
    claim_templates: Mapping[str, str] = field(default_factory=dict)
    """ResourceClaimTemplates that the notebook server's container has a claim of, by the claim's name in the pod."""
    volumes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Sources of volumes by name."""
    mounts: Sequence[Mapping[str, Any]] = ()
    """Where the notebook server's container has them."""

    def apply(self, form: PodSpec) -> PodSpec:
        """Return the pod with the additions. Raises ValueError for a pod without containers."""
        metadata, spec = form.get("metadata") or {}, form.get("spec") or {}
        notebook = notebook_container(spec)
        changed = self._container(notebook)
        named = {
            "annotations": {**(metadata.get("annotations") or {}), **self.annotations},
            "labels": {**(metadata.get("labels") or {}), **self.labels},
        }
        new_spec = {**spec, "containers": [changed if one is notebook else one for one in spec["containers"]]}
        if self.node_labels:
            new_spec["affinity"] = with_node_labels(spec.get("affinity"), self.node_labels)
        if self.scheduler:
            new_spec["schedulerName"] = self.scheduler
        if self.priority_class:
            new_spec["priorityClassName"] = self.priority_class
        if self.claim_templates:
            claims = [{"name": name, "resourceClaimTemplateName": of} for name, of in self.claim_templates.items()]
            new_spec["resourceClaims"] = _replaced(spec.get("resourceClaims") or [], claims)
        if self.volumes:
            volumes = [{"name": name, **source} for name, source in self.volumes.items()]
            new_spec["volumes"] = _replaced(spec.get("volumes") or [], volumes)
        return {**form, "metadata": {**metadata, **named}, "spec": new_spec}

    def _container(self, notebook: dict[str, Any]) -> dict[str, Any]:
        resources = dict(notebook.get("resources") or {})
        resources["limits"] = {**(resources.get("limits") or {}), **self.limits}
        if self.claim_templates:
            names = [{"name": name} for name in self.claim_templates]
            resources["claims"] = _replaced(resources.get("claims") or [], names)
        changed = {**notebook, "resources": resources}
        if self.variables:
            variables = [{"name": name, "value": value} for name, value in self.variables.items()]
            changed["env"] = _replaced(notebook.get("env") or [], variables)
        if self.mounts:
            changed["volumeMounts"] = [*(notebook.get("volumeMounts") or []), *self.mounts]
        return changed


def notebook_container(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the notebook server's container: the one with that name, else the first. Raises ValueError without one."""
    containers: list[dict[str, Any]] = spec.get("containers") or []
    if not containers:
        raise ValueError("the pod has no container")
    return next((container for container in containers if container.get("name") == NOTEBOOK), containers[0])


def with_node_labels(affinity: Mapping[str, Any] | None, labels: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return a pod's affinity that also requires of each of these labels of a node one of the values."""
    added = [{"key": key, "operator": "In", "values": list(values)} for key, values in labels.items()]
    return required_of_node(affinity, "matchExpressions", added)


def _replaced(there: Iterable[Mapping[str, Any]], added: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a list of named parts with these parts, which replace those with the same names."""
    names = {part["name"] for part in added}
    return [*(dict(part) for part in there if part.get("name") not in names), *(dict(part) for part in added)]
