"""The chart with ``kubelet: dra``: rights, folders, the class, and the policy that keeps an agent to its own slice."""

from __future__ import annotations

from typing import Any

import pytest

from gpushare_spawner.cli import subcommand_parser
from gpushare_spawner.model.kubernetes.objects import DEVICE_CLASS, DRIVER, slice_name

from .agent_account import AGENT, AGENT_RULES, CLAIM_RULE, CLAIM_RULES, POLICY_KINDS, agent_token, has_policies
from .charts import notes, one, render
from .claims import CLASS
from .standin.claim_allocator import GROUP
from .standin.client import ApiStatus, KubeClient, path
from .standin.cluster import Cluster
from .test_spawner_claims import CLAIM_RULE as HUB_CLAIM_RULE

DRA = {"kubelet": "dra"}


def test_without_it_nothing_of_claims_is_made() -> None:
    items = render({})
    assert not [item for item in items if item["kind"] == "DeviceClass" or "resource.k8s.io" in str(item)]
    assert "plugins_registry" not in str(items)


def test_rights_are_those_that_the_tests_of_agent_and_spawner_have() -> None:
    items = render(DRA)
    assert one(items, "Role", "gpushare")["rules"] == [AGENT_RULES[1], CLAIM_RULE, AGENT_RULES[0]]
    assert one(items, "ClusterRole", "jhub-gpushare-claims")["rules"] == CLAIM_RULES
    assert HUB_CLAIM_RULE in one(items, "Role", "gpushare-hub")["rules"]
    binding = one(items, "ClusterRoleBinding", "jhub-gpushare-claims")
    assert binding["roleRef"]["name"] == "jhub-gpushare-claims"
    assert [subject["name"] for subject in binding["subjects"]] == ["gpushare"]


def test_claims_in_the_users_namespaces() -> None:
    items = render({**DRA, "userNamespaces": True})
    assert CLAIM_RULE in one(items, "ClusterRole", "jhub-gpushare-claims")["rules"]
    assert HUB_CLAIM_RULE in one(items, "ClusterRole", "jhub-gpushare-hub-requests")["rules"]
    assert CLAIM_RULE not in one(items, "Role", "gpushare")["rules"]


def test_the_class_selects_the_driver() -> None:
    made = one(render(DRA), "DeviceClass")
    assert (made["metadata"]["name"], made["spec"]) == (DEVICE_CLASS, CLASS["spec"])


def test_the_agent_gets_the_kubelets_folders_for_plugins() -> None:
    pod = one(render({**DRA, "node": {"kubeletDir": "/data/kubelet"}}), "DaemonSet")["spec"]["template"]["spec"]
    (agent,) = pod["containers"]
    options = subcommand_parser("agent").parse_args(agent["args"][1:])
    assert options.kubernetes == "dra"
    folders = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
    writable = {mount["mountPath"]: mount["name"] for mount in agent["volumeMounts"] if not mount.get("readOnly")}
    assert {where: folders.get(name) for where, name in writable.items()} == {
        "/var/lib/gpushare": "/var/lib/gpushare",
        "/data/kubelet/plugins_registry": "/data/kubelet/plugins_registry",
        f"/data/kubelet/plugins/{DRIVER}": f"/data/kubelet/plugins/{DRIVER}",
        "/tmp": None,
    }
    assert agent["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_notes_say_what_it_asks_for() -> None:
    assert "Pods get GPU shares by claims" in notes(DRA)
    assert "get, create and delete of resourceclaims" in notes({**DRA, "hub": {"createRole": False}})
    assert "claims" not in notes({})


async def test_an_agent_writes_slices_of_its_own_node_and_driver_only(cluster: Cluster) -> None:
    if not await has_policies(cluster):
        pytest.skip("this API server is older than 1.31: it has no tokens that are bound to a node")
    nodes = [(await cluster.make_node()).name for _ in range(2)]
    token = await agent_token(cluster, nodes[0], claims=True)
    assert {item["kind"] for item in render(DRA)} >= POLICY_KINDS.keys()
    unbound = await cluster.token(AGENT)

    def item(name: str, **spec: Any) -> dict[str, Any]:
        pool = {"name": nodes[0], "generation": 1, "resourceSliceCount": 1}
        values = {"driver": DRIVER, "nodeName": nodes[0], "pool": pool, "devices": []}
        return {"metadata": {"name": name}, "spec": values | spec}

    where = path("resourceslices", group=GROUP)
    async with KubeClient(cluster.credentials(token)) as own, KubeClient(cluster.credentials(unbound)) as nobody:
        await own.create(where, item(slice_name(nodes[0])))
        for client, wrong, why in (
            (own, item("one", nodeName=nodes[1]), "of its own node"),
            (own, item("two", nodeName=None, allNodes=True), "of its own node"),
            (own, item("three", driver="gpu.example.org"), "of the driver"),
            (own, item("five", pool={"name": nodes[1], "generation": 9, "resourceSliceCount": 1}), "of the pool"),
            (nobody, item("four"), "which its token has to name"),
        ):
            with pytest.raises(ApiStatus, match=why) as denied:
                await client.create(where, wrong)
            assert denied.value.code == 403
