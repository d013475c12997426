"""What a spawner's settings say of its pod before there is one: the nodes that can take it, and what it requests there.

``settings`` are values of the spawner's traits, by their names. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kubernetes_asyncio.client.models import V1NodeSelectorTerm, V1Toleration
from kubespawner.utils import get_k8s_model

from gpushare_spawner.model.kubernetes import HOSTNAME_LABEL, PodConstraints, memory_bytes, millicores
from gpushare_spawner.placement import Requested
from gpushare_spawner.sharing.pod_changes import NOTEBOOK
from gpushare_spawner.spawner.kubernetes.cluster.pod_requests import pod_requests

CONSTRAINING = ("node_selector", "node_affinity_required", "tolerations", "extra_pod_config", "modify_pod_hook")
"""The traits that `pod_constraints` and `pinned_node` look at."""
REQUESTING = (
    "cpu_guarantee", "mem_guarantee", "extra_resource_guarantees", "cpu_limit", "mem_limit", "extra_resource_limits",
    "extra_containers", "init_containers",
)  # fmt: skip
"""The traits that `requested` looks at."""


def pinned_node(settings: Mapping[str, Any]) -> str:
    """Return the node that the settings pin a server to; empty where they do not."""
    pinned = settings["node_selector"].get(HOSTNAME_LABEL)
    for key in ("nodeSelector", "node_selector"):
        pinned = (settings["extra_pod_config"].get(key) or {}).get(HOSTNAME_LABEL, pinned)
    return str(pinned or "")


def pod_constraints(settings: Mapping[str, Any], values: Callable[[Any], list[Any]]) -> PodConstraints | None:
    """Return what the pod demands of nodes; None where the hook or ``extra_pod_config`` may change that.

    ``values`` returns the values of a setting that may be a list or a dict; they are models or dicts.
    """
    extra = settings["extra_pod_config"]
    if settings["modify_pod_hook"] is not None:
        # it may add tolerations: the scheduler decides
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
    """Return what the pod requests of its node."""
    own = {
        "name": NOTEBOOK,
        "resources": {
            "requests": _amounts(settings, "guarantee"),
            "limits": _amounts(settings, "limit"),
        },
    }
    # containers that an admin wrote as models are rare, and the scheduler counts them all the same
    others = [container for container in settings["extra_containers"] if isinstance(container, Mapping)]
    before = [container for container in settings["init_containers"] if isinstance(container, Mapping)]
    amounts = pod_requests({"spec": {"containers": [own, *others], "initContainers": before}})
    return Requested(millicores(amounts), memory_bytes(amounts), pods=1)


def _amounts(settings: Mapping[str, Any], kind: str) -> dict[str, Any]:
    amounts = {"cpu": settings[f"cpu_{kind}"], "memory": settings[f"mem_{kind}"]}
    amounts.update(settings[f"extra_resource_{kind}s"])
    return {name: amount for name, amount in amounts.items() if amount is not None}
