"""The agents' service account, with no more rights than the chart gives it: its Role and its admission policies."""

from __future__ import annotations

import asyncio
from typing import Any

from .charts import render
from .standin.client import ApiStatus, path
from .standin.cluster import Cluster

AGENT_RULES = [
    {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["create", "patch"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch", "patch"]},
]
"""All that the agent's Role allows."""
CLAIM_RULES = [
    {
        "apiGroups": ["resource.k8s.io"],
        "resources": ["resourceslices"],
        "verbs": ["get", "list", "watch", "create", "update"],
    },
    {"apiGroups": ["resource.k8s.io"], "resources": ["deviceclasses"], "verbs": ["get"]},
]
"""All that the agent's ClusterRole allows where pods get GPUs by claims."""
CLAIM_RULE = {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["get"]}
"""What the agent's Role allows besides then."""
AGENT = "agent"
POLICY_KINDS = {
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings",
}
ADMISSION = "admissionregistration.k8s.io/v1"


async def agent_token(
    cluster: Cluster, node: str, rules: list[dict[str, Any]] = AGENT_RULES, claims: bool = False
) -> str:
    """A token as the agent's pod on this node has it. The account and its policies are made with the first one.

    ``claims``: pods get GPUs by claims.

    Where the API server is too old for tokens that name their node, the agent works without the policies.
    """
    try:
        await cluster.admin.get(path("serviceaccounts", cluster.namespace, AGENT))
    except ApiStatus as error:
        if error.code != 404:
            raise
        await cluster.service_account(AGENT, [*rules, CLAIM_RULE] if claims else rules, CLAIM_RULES if claims else None)
        if await has_policies(cluster):
            await make_policies(cluster, AGENT, claims)
    return await cluster.token(AGENT, node if await has_policies(cluster) else "")


async def has_policies(cluster: Cluster) -> bool:
    """Whether the API server knows the policies, and tokens that are bound to a node (on by default from 1.31)."""
    version = await cluster.admin.get("/version")
    return (int(version["major"]), int(version["minor"].rstrip("+"))) >= (1, 31)


async def make_policies(cluster: Cluster, service_account: str, claims: bool = False) -> None:
    """The chart's admission policies, for this service account of the cluster's namespace; they are in force then."""
    values: dict[str, Any] = {"serviceAccount": {"name": service_account}, "rbac": {"admissionPolicy": "always"}}
    if claims:
        values["kubelet"] = "dra"
    made = [item for item in render(values, namespace=cluster.namespace) if item["kind"] in POLICY_KINDS]
    for item in made:
        await cluster.make_cluster_wide(POLICY_KINDS[item["kind"]], ADMISSION, item)
    if cluster.server is None:
        await asyncio.sleep(3)  # a real API server looks at its policies about once a second
