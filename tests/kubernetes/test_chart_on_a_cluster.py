"""What the chart makes, as a real API server sees it: every field is known there, and every object valid."""

from __future__ import annotations

from typing import Any

import pytest

from .agent_account import POLICY_KINDS, has_policies
from .charts import render
from .standin.client import path
from .standin.cluster import Cluster
from .test_chart_agent import ALL

USER_NAMESPACES = {"userNamespaces": True, "networkPolicy": {"metricsFrom": [{"podSelector": {}}]}}


NAMED = {"userNamespaces": True, "userNamespaceNames": ["default"]}


@pytest.mark.parametrize(
    "values", [*ALL.values(), USER_NAMESPACES, NAMED], ids=[*ALL, "user namespaces", "named user namespaces"]
)
async def test_an_api_server_takes_every_object(cluster: Cluster, values: dict[str, Any]) -> None:
    if cluster.server is not None:
        pytest.skip("the stand-in knows pods and what belongs to them, not these kinds: set KUBEBUILDER_ASSETS")
    for item in render(values, namespace=cluster.namespace):
        group = item["apiVersion"] if "/" in item["apiVersion"] else ""
        if group.startswith("monitoring.coreos.com"):
            continue  # the Prometheus operator brings that kind
        if item["kind"] in POLICY_KINDS and not await has_policies(cluster):
            continue  # helm would not make it there
        plural = POLICY_KINDS.get(item["kind"], item["kind"].lower().replace("policy", "policie") + "s")
        where = path(plural, item["metadata"].get("namespace", ""), group=group)
        strictly = {"dryRun": "All", "fieldValidation": "Strict"}
        made = await cluster.admin.call("POST", where, item, strictly)
        assert made["metadata"]["name"] == item["metadata"]["name"]
