"""The pod of one server: its requests and constraints before its creation, and its manifest with the share.

`build_pod` adds a share to KubeSpawner's manifest: the sharing layer renders the share, and `with_last_word` keeps the
values that the admin's template sets. `fragment` and `put_back` convert between the client's models, which KubeSpawner
and an admin's `modify_pod_hook` use, and the plain data of sharing layers. This module does not call the API server:
see `owned_objects`. ``settings`` are values of the spawner's traits by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kubernetes_asyncio.client.models import (
    V1Affinity,
    V1EnvVar,
    V1NodeAffinity,
    V1NodeSelector,
    V1NodeSelectorTerm,
    V1Pod,
    V1PodResourceClaim,
    V1PreferredSchedulingTerm,
    V1ResourceRequirements,
    V1Toleration,
    V1Volume,
    V1VolumeMount,
)
from kubespawner.utils import get_k8s_model

from gpushare_spawner.model.kubernetes.annotations import HUB, SessionAnnotations, gpu_names
from gpushare_spawner.model.kubernetes.container_requests import NOTEBOOK, memory_bytes, millicores
from gpushare_spawner.model.kubernetes.objects import (
    HOSTNAME_LABEL,
    OBSERVER,
    SESSION_FILES_FOLDER,
    PodConstraints,
    claim_name,
    excluding,
    session_files_volume,
)
from gpushare_spawner.model.layers import LAYER_VARIABLE, LAYERS, ObservedBy
from gpushare_spawner.model.share_status import ANNOTATIONS_VARIABLE
from gpushare_spawner.placement.node import Requested
from gpushare_spawner.sharing.base import LayerCannot, PodChange, PodSpec
from gpushare_spawner.sharing.native import NativeClaimLayer, NativePodLayer, granted_session
from gpushare_spawner.spawner.hub import SpawnRefused
from gpushare_spawner.spawner.kubernetes.cluster.layers import POD_LAYERS
from gpushare_spawner.spawner.kubernetes.cluster.pods import RESERVATION, pod_requests
from gpushare_spawner.spawner.kubernetes.reservations import PodReservation
from gpushare_spawner.spawner.queue.snapshot import LayerOffer
from gpushare_spawner.wording import spawn_failures as words

_SPEC = {"scheduler_name": "schedulerName", "priority_class_name": "priorityClassName"}
"""KubeSpawner's single-valued settings, with their fields in a pod's spec."""
_BY_KEY = {
    "extra_annotations": ("metadata", "annotations"),
    "extra_labels": ("metadata", "labels"),
    "node_selector": ("spec", "nodeSelector"),
}
"""KubeSpawner's settings that map names to values, with their places in a pod."""
_VOLUME = "gpushare-session"
"""The volume with the server's notices."""
_RESOURCES = {"extra_resource_limits": "limits", "extra_resource_guarantees": "requests"}


def rendered_elsewhere(pod: PodSpec, share: PodReservation, offer: LayerOffer, since: float) -> PodSpec:
    """Return a pod with a share that a layer's own scheduler places.

    ``since``: when the share was granted, in seconds since the epoch.

    Settings in the template's ``kubespawner_override`` are not changed. Raises LayerCannot.
    """
    request, gpu_share, tenant = offer.request, offer.request.gpu.share, share.request.tenant
    session = SessionAnnotations(
        session=tenant.session,
        template=request.template.name,
        quota=tenant.quota,
        share_units=gpu_share.units,
        gpus=gpu_names(offer.layer, tenant.session, gpu_share.count),
        gpu_indices=tuple(range(gpu_share.count)),
        tier_since=since,
        effective_units=gpu_share.units,
        layer=offer.layer,
    )
    made = POD_LAYERS[offer.layer].render(pod, request)
    made = PodChange(
        variables={LAYER_VARIABLE: str(offer.layer), ANNOTATIONS_VARIABLE: SESSION_FILES_FOLDER},
        limits={OBSERVER: "1"} if share.observed and observable(offer) else {},
        volumes={_VOLUME: session_files_volume()},
        mounts=[{"name": _VOLUME, "mountPath": SESSION_FILES_FOLDER, "readOnly": True}],
    ).apply(made)
    made = with_last_word(pod, made, request.template.kubespawner_override)
    if offer.excluded_nodes:
        # even if the template sets its own affinity; otherwise an earlier spawn would wait forever
        affinity = excluding(made["spec"].get("affinity"), offer.excluded_nodes)
        made = {**made, "spec": {**made["spec"], "affinity": affinity}}
    metadata = made["metadata"]
    return {
        **made,
        "metadata": {
            "annotations": {**metadata["annotations"], **session.annotations()},
            "labels": {**metadata["labels"], **session.labels()},
        },
    }


def observable(offer: LayerOffer) -> bool:
    """Return whether the pod can request the library of an observing agent.

    On a node without a free library device the pod could not run, so each suitable node must have a free device; other
    pods can request these devices too. Without the library the agent observes the pod's GPU work in the driver's
    counters; without an agent the work is not observed.
    """
    nodes, facts = offer.request.suitable_nodes(), offer.request.facts
    by_library = LAYERS[offer.layer].observed_by is ObservedBy.LIBRARY
    return by_library and bool(nodes) and all(facts.free(node, OBSERVER) for node in nodes)


def with_last_word(pod: PodSpec, made: PodSpec, override: Mapping[str, Any]) -> PodSpec:
    """Return a layer's result with the original values of all settings in an admin's override."""
    spec, metadata = dict(made["spec"]), {name: dict(made["metadata"][name]) for name in ("annotations", "labels")}
    extra: Mapping[str, Any] = override.get("extra_pod_config") or {}
    for setting, field in _SPEC.items():
        if setting in override or field in extra or setting in extra:
            spec[field] = pod["spec"].get(field)
    for setting, (part, field) in _BY_KEY.items():
        own = {key: pod[part].get(field, {}).get(key) for key in override.get(setting) or {}}
        if own and part == "metadata":
            metadata[field].update(own)
        elif own:
            spec[field] = {**(spec.get(field) or {}), **own}
    (before,), (container,) = pod["spec"]["containers"], spec["containers"]
    resources = dict(container["resources"])
    for setting, field in _RESOURCES.items():
        own = {key: before["resources"].get(field, {}).get(key) for key in override.get(setting) or {}}
        resources[field] = {**resources.get(field, {}), **own}
    spec["containers"] = [{**container, "resources": resources}]
    return {**made, "metadata": {**made["metadata"], **metadata}, "spec": spec}


def rendered(pod: PodSpec, share: PodReservation, unit_size: int, name: str, namespace: str) -> PodSpec:
    """Return the pod with its share, as the sharing layer renders it. Raises LayerCannot.

    ``unit_size``: units of 1 % of one device of the agent's plugin; ``name``: the name of the pod in ``namespace``.
    """
    since = time.time()
    if share.offer is not None:
        return rendered_elsewhere(pod, share, share.offer, since)
    claims = claim_layer(share, since, name, namespace)
    if claims is not None:
        return claims.render(pod)
    return NativePodLayer(_session(share, since), share.placement.node, unit_size).render(pod)


def _session(share: PodReservation, since: float) -> SessionAnnotations:
    indices = {gpu.uuid: gpu.index for gpu in share.gpus}
    return granted_session(share.request.tenant, share.request.template, share.placement, indices, since)


def claim_layer(share: PodReservation, since: float, pod: str, namespace: str) -> NativeClaimLayer | None:
    """Return the layer of a share on a node that allocates GPUs by claims; None for any other node."""
    if share.claims is None:
        return None
    claim = claim_name(pod, share.token)
    return NativeClaimLayer(_session(share, since), share.placement.node, share.gpus, share.claims, namespace, claim)


CONSTRAINING = ("node_selector", "node_affinity_required", "tolerations", "extra_pod_config", "modify_pod_hook")
"""The traits that `pod_constraints` and `pinned_node` read."""
REQUESTING = (
    "cpu_guarantee", "mem_guarantee", "extra_resource_guarantees", "cpu_limit", "mem_limit", "extra_resource_limits",
    "extra_containers", "init_containers",
)  # fmt: skip
"""The traits that `requested` reads."""


def pinned_node(settings: Mapping[str, Any]) -> str:
    """Return the node to which the settings pin a server; empty: none."""
    pinned = settings["node_selector"].get(HOSTNAME_LABEL)
    for key in ("nodeSelector", "node_selector"):
        pinned = (settings["extra_pod_config"].get(key) or {}).get(HOSTNAME_LABEL, pinned)
    return str(pinned or "")


def pod_constraints(settings: Mapping[str, Any], values: Callable[[Any], list[Any]]) -> PodConstraints | None:
    """Return the pod's constraints on nodes; None if the hook or ``extra_pod_config`` may change them.

    ``values`` returns the values (models or dicts) of a setting that may be a list or a dict.
    """
    extra = settings["extra_pod_config"]
    if settings["modify_pod_hook"] is not None:
        # The hook may add tolerations, so only the scheduler can decide.
        return None
    if any(key in extra for key in ("nodeSelector", "node_selector", "affinity", "tolerations")):
        return None
    terms, tolerations = values(settings["node_affinity_required"]), values(settings["tolerations"])
    return PodConstraints.of(
        settings["node_selector"],
        [get_k8s_model(V1NodeSelectorTerm, term).to_dict(serialize=True) for term in terms],
        [get_k8s_model(V1Toleration, toleration).to_dict(serialize=True) for toleration in tolerations],
    )


def requested(settings: Mapping[str, Any]) -> Requested:
    """Return the resources that the pod requests from its node."""
    own = {
        "name": NOTEBOOK,
        "resources": {"requests": _amounts(settings, "guarantee"), "limits": _amounts(settings, "limit")},
    }
    # containers that an admin defines as models are rare, and the scheduler counts them in any case
    others = [container for container in settings["extra_containers"] if isinstance(container, Mapping)]
    before = [container for container in settings["init_containers"] if isinstance(container, Mapping)]
    amounts = pod_requests({"spec": {"containers": [own, *others], "initContainers": before}})
    return Requested(millicores(amounts), memory_bytes(amounts), pods=1)


def _amounts(settings: Mapping[str, Any], kind: str) -> dict[str, Any]:
    amounts = {"cpu": settings[f"cpu_{kind}"], "memory": settings[f"mem_{kind}"]}
    amounts.update(settings[f"extra_resource_{kind}s"])
    return {name: amount for name, amount in amounts.items() if amount is not None}


_POD = {"nodeSelector": "node_selector", "schedulerName": "scheduler_name", "priorityClassName": "priority_class_name"}
"""Fields of a pod's spec that a layer can replace, with their names in the client's model."""
_POD_LISTS = {"resourceClaims": ("resource_claims", V1PodResourceClaim), "volumes": ("volumes", V1Volume)}
"""Lists in a pod's spec that a layer can extend, with their names in the client's model and the types of their items.
"""
_AMOUNTS = ("limits", "requests")


def fragment(pod: V1Pod) -> PodSpec:
    """Return the parts of a manifest that a sharing layer reads and changes, as plain data."""
    container = _notebook(pod)
    resources = {name: dict(_get(container.resources, name) or {}) for name in _AMOUNTS}
    claims = _plain(_get(container.resources, "claims"))
    spec = {name: _plain(getattr(pod.spec, attribute)) for name, attribute in _POD.items()}
    spec |= {name: _plain(getattr(pod.spec, attribute)) for name, (attribute, _) in _POD_LISTS.items()}
    return {
        "metadata": {"annotations": dict(pod.metadata.annotations or {}), "labels": dict(pod.metadata.labels or {})},
        "spec": {
            "affinity": _plain(pod.spec.affinity) or {},
            **{name: value for name, value in spec.items() if value},
            "containers": [
                {
                    "name": container.name,
                    "resources": {**resources, **({"claims": claims} if claims else {})},
                    "env": [_plain(variable) for variable in container.env or []],
                    "volumeMounts": [_plain(mount) for mount in container.volume_mounts or []],
                }
            ],
        },
    }


def put_back(pod: V1Pod, before: PodSpec, changed: PodSpec) -> V1Pod:
    """Write a sharing layer's result for the manifest's `fragment` into the manifest; the rest is unchanged.

    ``before``: the original fragment; layers do not change it in place.
    """
    pod.metadata.annotations = changed["metadata"]["annotations"]
    pod.metadata.labels = changed["metadata"]["labels"]
    spec = changed["spec"]
    if spec["affinity"] != before["spec"]["affinity"]:
        _require_node(pod.spec, spec["affinity"])
    for name, attribute in _POD.items():
        if spec.get(name) != before["spec"].get(name):
            setattr(pod.spec, attribute, spec.get(name))
    for name, (attribute, model) in _POD_LISTS.items():
        _add(pod.spec, attribute, model, before["spec"].get(name) or [], spec.get(name) or [])
    (was,), (rendered,) = before["spec"]["containers"], spec["containers"]
    _put_back_container(_notebook(pod), was, rendered)
    return pod


def _put_back_container(container: Any, was: Mapping[str, Any], rendered: Mapping[str, Any]) -> None:
    if container.resources is None:
        container.resources = V1ResourceRequirements()
    resources = rendered["resources"]
    if isinstance(container.resources, dict):
        container.resources = {
            **container.resources,
            **{name: amounts for name, amounts in resources.items() if amounts},
        }
    else:
        for name in _AMOUNTS:
            if resources.get(name) != was["resources"].get(name):
                setattr(container.resources, name, resources[name])
        # the client's model of claims has a different name in each client version
        _add(container.resources, "claims", dict, was["resources"].get("claims") or [], resources.get("claims") or [])
    set_here = {variable["name"]: variable for variable in rendered["env"] if variable not in was["env"]}
    if set_here:
        kept = [variable for variable in container.env or [] if _get(variable, "name") not in set_here]
        container.env = kept + [get_k8s_model(V1EnvVar, variable) for variable in set_here.values()]
    _add(container, "volume_mounts", V1VolumeMount, was["volumeMounts"], rendered.get("volumeMounts") or [])


def _add(target: Any, attribute: str, model: type, before: Sequence[Any], items: Sequence[Any]) -> None:
    """Append a layer's additions to a list of models."""
    added = [item if model is dict else get_k8s_model(model, item) for item in items if item not in before]
    if added:
        setattr(target, attribute, [*(getattr(target, attribute) or []), *added])


def _require_node(spec: Any, affinity: Mapping[str, Any]) -> None:
    """Set the required node affinity, as models, which is what KubeSpawner passes to an admin's hook."""
    required = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    if isinstance(spec.affinity, Mapping):
        spec.affinity = dict(affinity)
        return
    _node_affinity(spec).required_during_scheduling_ignored_during_execution = V1NodeSelector(
        node_selector_terms=[get_k8s_model(V1NodeSelectorTerm, term) for term in required["nodeSelectorTerms"]]
    )


def _node_affinity(spec: Any) -> V1NodeAffinity:
    """Return the node affinity of a pod's spec that holds models, and create it if it is missing."""
    spec.affinity = spec.affinity or V1Affinity()
    node_affinity: V1NodeAffinity = spec.affinity.node_affinity or V1NodeAffinity()
    spec.affinity.node_affinity = node_affinity
    return node_affinity


PREFERENCE = 100
"""The highest weight of a preferred node: the scheduler's other scores differ by less."""


def prefer_node(spec: Any, node: str) -> None:
    """Add a preferred node to the affinity of a pod's spec, which holds KubeSpawner's models or plain data."""
    if isinstance(spec.affinity, Mapping):
        spec.affinity = get_k8s_model(V1Affinity, dict(spec.affinity))
    affinity = _node_affinity(spec)
    terms = affinity.preferred_during_scheduling_ignored_during_execution or []
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    term = get_k8s_model(V1PreferredSchedulingTerm, {"weight": PREFERENCE, "preference": {"matchFields": [field]}})
    affinity.preferred_during_scheduling_ignored_during_execution = [*terms, term]


def _plain(value: Any) -> Any:
    """Return models as the API server writes them, without empty fields; other values unchanged."""
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict(serialize=True))
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items() if item is not None}
    return value


def _notebook(pod: V1Pod) -> Any:
    containers = pod.spec.containers
    return next((container for container in containers if container.name == NOTEBOOK), containers[0])


def _get(item: Any, name: str) -> Any:
    # KubeSpawner accepts both models and dicts in several settings and does not convert them
    if item is None:
        return None
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name)


WITHOUT_GPU = {"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": "-1"}
"""Environment that hides the node's GPUs from a server without a GPU in its template, even if its image requests "all".
(NVIDIA Container Toolkit, environment variables: void is "as if there were no GPU".)
"""


def build_pod(pod: V1Pod, share: PodReservation, unit_size: int, hub: str, namespace: str = "") -> V1Pod:
    """Return KubeSpawner's manifest with the share.

    ``hub``: the API URL of the hub that creates the pod in ``namespace``. Raises SpawnRefused for a manifest that is
    pinned to a node other than the share's, and for a share that its sharing layer cannot provide.
    """
    placed, pinned = share.placement.node, (pod.spec.node_selector or {}).get(HOSTNAME_LABEL)
    if placed and pinned not in (None, placed):
        raise SpawnRefused(
            words.pinned_elsewhere(placed, str(pinned), HOSTNAME_LABEL), reason="bad-template", status=500
        )
    before = fragment(pod)
    try:
        changed = rendered(before, share, unit_size, pod.metadata.name, namespace)
    except LayerCannot as error:
        raise SpawnRefused(str(error), reason="bad-template", status=500) from None
    changed["metadata"]["annotations"].update({RESERVATION: share.token, HUB: hub})
    return put_back(pod, before, changed)
