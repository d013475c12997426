"""Renders the share of another sharing layer into a pod, and keeps what the admin's template sets itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from gpushare_spawner.model.kubernetes import (
    OBSERVER,
    SESSION_FILES_FOLDER,
    LayerSession,
    PodSession,
    gpu_names,
    kept_off,
    session_files_volume,
)
from gpushare_spawner.model.layers import LAYER_VARIABLE, LAYERS, ObservedBy
from gpushare_spawner.model.share_status import ANNOTATIONS_VARIABLE
from gpushare_spawner.sharing.base import PodSpec, SharingLayer, Tenant
from gpushare_spawner.sharing.nodes import suitable
from gpushare_spawner.sharing.pod_changes import PodChange
from gpushare_spawner.sharing.pod_layers import POD_LAYERS
from gpushare_spawner.spawner.queue.other_layers import LayerOffer

_SPEC = {"scheduler_name": "schedulerName", "priority_class_name": "priorityClassName"}
"""KubeSpawner's settings of one value, and the fields of a pod's spec that they stand for."""
_BY_KEY = {
    "extra_annotations": ("metadata", "annotations"),
    "extra_labels": ("metadata", "labels"),
    "node_selector": ("spec", "nodeSelector"),
}
"""KubeSpawner's settings with names and values, and where these stand in a pod."""
_VOLUME = "gpushare-session"
"""The volume by which the server reads its notices."""
_RESOURCES = {"extra_resource_limits": "limits", "extra_resource_guarantees": "requests"}


class ForeignPodLayer(SharingLayer[PodSpec]):
    """A share that a layer's own scheduler places."""

    name: ClassVar[str] = "another layer"

    def __init__(self, tenant: Tenant, offer: LayerOffer, since: float, observed: bool = True) -> None:
        """``since``: when the share was granted, in seconds since the epoch. ``observed``: see `PodShare`. Raises
        ValueError for a template without a GPU."""
        self._observed = observed
        share = offer.request.gpu.share
        self._offer = offer
        said = PodSession(
            session=tenant.session,
            template=offer.request.template.name,
            quota=tenant.quota,
            share_units=share.units,
            gpus=gpu_names(offer.layer, tenant.session, share.count),
            gpu_indices=tuple(range(share.count)),
            tier_since=since,
            effective_units=share.units,
        )
        self._session = LayerSession(offer.layer, said)

    def render(self, form: PodSpec) -> PodSpec:
        """Return the pod with the share.

        What the template's ``kubespawner_override`` sets itself stays as it is. Raises LayerCannot.
        """
        request = self._offer.request
        made = POD_LAYERS[self._offer.layer].render(form, request)
        limits = {OBSERVER: "1"} if self._observed and observable(self._offer) else {}
        made = PodChange(
            variables={LAYER_VARIABLE: str(self._offer.layer), ANNOTATIONS_VARIABLE: SESSION_FILES_FOLDER},
            limits=limits,
            volumes={_VOLUME: session_files_volume()},
            mounts=[{"name": _VOLUME, "mountPath": SESSION_FILES_FOLDER, "readOnly": True}],
        ).apply(made)
        made = with_last_word(form, made, request.template.kubespawner_override)
        if self._offer.kept_off:
            # also where the template sets its own affinity: an earlier spawn would wait without end
            affinity = kept_off(made["spec"].get("affinity"), self._offer.kept_off)
            made = {**made, "spec": {**made["spec"], "affinity": affinity}}
        metadata = made["metadata"]
        return {
            **made,
            "metadata": {
                "annotations": {**metadata["annotations"], **self._session.annotations()},
                "labels": {**metadata["labels"], **self._session.labels()},
            },
        }


def observable(offer: LayerOffer) -> bool:
    """Return whether the pod can ask for the library of an agent that observes.

    On a node without a free one the pod could not run, so all nodes must have one that the pod can go to: others than
    our servers can ask for them too. Elsewhere the agent sees the pod's GPU work as the driver counts it, and without
    an agent nobody does.
    """
    nodes, facts = suitable(offer.request), offer.request.facts
    by_library = LAYERS[offer.layer].observed_by is ObservedBy.LIBRARY
    return by_library and bool(nodes) and all(facts.free(node, OBSERVER) for node in nodes)


def with_last_word(form: PodSpec, made: PodSpec, override: Mapping[str, Any]) -> PodSpec:
    """Return what a layer made of a form, with the values of the form where an admin's override sets them."""
    spec, metadata = dict(made["spec"]), {name: dict(made["metadata"][name]) for name in ("annotations", "labels")}
    extra: Mapping[str, Any] = override.get("extra_pod_config") or {}
    for setting, field in _SPEC.items():
        if setting in override or field in extra or setting in extra:
            spec[field] = form["spec"].get(field)
    for setting, (part, field) in _BY_KEY.items():
        own = {key: form[part].get(field, {}).get(key) for key in override.get(setting) or {}}
        if own and part == "metadata":
            metadata[field].update(own)
        elif own:
            spec[field] = {**(spec.get(field) or {}), **own}
    (before,), (container,) = form["spec"]["containers"], spec["containers"]
    resources = dict(container["resources"])
    for setting, field in _RESOURCES.items():
        own = {key: before["resources"].get(field, {}).get(key) for key in override.get(setting) or {}}
        resources[field] = {**resources.get(field, {}), **own}
    spec["containers"] = [{**container, "resources": resources}]
    return {**made, "metadata": {**made["metadata"], **metadata}, "spec": spec}
