"""The chart's admission policies: what an agent's token may change, and what not, whatever its Role allows."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python
import pytest

from gpushare_spawner.agent.kubernetes.report_publisher import PublishedReport
from gpushare_spawner.agent.kubernetes.settings import ClusterSettings
from gpushare_spawner.clients.api import ClusterApi, KubeconfigConnection
from gpushare_spawner.model.kubernetes.annotations import (
    BORROWED,
    EFFECTIVE_SHARE,
    GPU,
    HUB,
    KEEP,
    LAYER,
    QUOTA,
    SESSION,
    TEMPLATE,
    TIER,
    ShareChangeAnswer,
    borrowed_patch,
    labels,
    notice_patch,
    resized_patch,
    share_patch,
    tier_patch,
)
from gpushare_spawner.model.kubernetes.objects import (
    HOSTNAME_LABEL,
    MIRROR,
    REPORT_COMPONENT,
    REPORT_COMPONENT_LABEL,
    report_name,
)
from gpushare_spawner.model.report import Report
from gpushare_spawner.model.share import Tier

from .agent_account import ADMISSION, AGENT, POLICY_KINDS, has_policies, make_policies
from .charts import AGENT_CHART, objects, one, render
from .standin.admission import value_of
from .standin.client import ApiStatus, KubeClient, path
from .standin.cluster import Cluster, a_pod

EVERYTHING = [{"apiGroups": [""], "resources": ["pods", "pods/status", "pods/binding", "configmaps"], "verbs": ["*"]}]
"""Rights that are far more than the chart's: only the policies stand in the way."""
FOREIGN = "cni.example.org/ip"


@dataclass
class Agents:
    """Clients with the tokens of two nodes' agents, of none, and of another service account with the same rights."""

    cluster: Cluster
    own: KubeClient
    other: KubeClient
    unbound: KubeClient
    stranger: KubeClient
    own_node: str
    other_node: str

    def pod(self, name: str) -> str:
        return path("pods", self.cluster.namespace, name)

    def report(self, node: str) -> str:
        return path("configmaps", self.cluster.namespace, report_name(node))


@pytest.fixture
async def agents(cluster: Cluster) -> AsyncIterator[Agents]:
    if not await has_policies(cluster):
        pytest.skip("this API server is older than 1.31: it has no tokens that are bound to a node")
    nodes = [(await cluster.make_node()).name for _ in range(2)]
    unbound = await cluster.service_account(AGENT, EVERYTHING)
    stranger = await cluster.service_account("stranger", EVERYTHING)
    await make_policies(cluster, AGENT)
    tokens = [await cluster.token(AGENT, node) for node in nodes]
    clients = [KubeClient(cluster.credentials(token)) for token in (*tokens, unbound, stranger)]
    for name, node in zip(("mine", "theirs"), nodes, strict=True):
        manifest = a_pod(
            name,
            annotations={TIER: "active", SESSION: "ada", FOREIGN: "10.0.0.1"},
            labels=labels(),
            nodeSelector={HOSTNAME_LABEL: node},
        )
        await cluster.admin.create(path("pods", cluster.namespace), manifest)
        await cluster.wait_for_phase(name, "Running")
    for client in clients:
        await client.__aenter__()
    own, other, of_no_node, foreign = clients
    yield Agents(cluster, own, other, of_no_node, foreign, *nodes)
    for client in clients:
        await client.__aexit__(None, None, None)


async def denied(call: Any) -> str:
    """The message of the denial."""
    with pytest.raises(ApiStatus) as refused:
        await call
    assert (refused.value.code, refused.value.reason) == (403, "Forbidden"), refused.value.message
    assert "ValidatingAdmissionPolicy" in refused.value.message
    return refused.value.message


def annotated(**changes: str | None) -> dict[str, Any]:
    return {"metadata": {"annotations": {name.replace("__", "/"): value for name, value in changes.items()}}}


async def test_annotations_with_the_prefix_are_set_changed_and_removed_on_pods_of_the_own_node(agents: Agents) -> None:
    for patch in (
        tier_patch(Tier.RELEASED, 1.0, 0, idle_since=2.0),
        tier_patch(Tier.ACTIVE, 3.0, 25),
        borrowed_patch(5),
        {TIER: None},
    ):
        await agents.own.patch(agents.pod("mine"), {"metadata": {"annotations": patch}})
    found = (await agents.cluster.pod("mine") or {})["metadata"]["annotations"]
    assert TIER not in found
    assert (found[EFFECTIVE_SHARE], found[BORROWED], found[FOREIGN]) == ("25", "5", "10.0.0.1")


@pytest.mark.parametrize(
    ("patch", "why"),
    [
        ({"metadata": {"annotations": {FOREIGN: "6.6.6.6"}}}, "annotations that begin with"),
        ({"metadata": {"annotations": {FOREIGN: None}}}, "annotations that begin with"),
        ({"metadata": {"annotations": {"new.example.org/a": "b"}}}, "annotations that begin with"),
        ({"metadata": {"annotations": {"gpushare-spawner.io.example.org/a": "b"}}}, "annotations that begin with"),
        ({"metadata": {"annotations": {"gpushare-spawner.io/tier": "released", "a": "b"}}}, "annotations that begin"),
        ({"metadata": {"annotations": {SESSION: "bob"}}}, "whose session"),
        ({"metadata": {"annotations": {SESSION: None}}}, "whose session"),
        ({"metadata": {"annotations": {HUB: "http://other"}}}, "whose session"),
        ({"metadata": {"annotations": {TEMPLATE: "never-stops"}}}, "whose session"),
        ({"metadata": {"annotations": {QUOTA: "user/bob"}}}, "whose session"),
        ({"metadata": {"annotations": {KEEP: "{}"}}}, "whose session"),
        ({"metadata": {"annotations": {GPU: "GPU-of-another-node"}}}, "whose session"),
        ({"metadata": {"annotations": {"gpushare-spawner.io/of-a-later-version": "x"}}}, "whose session"),
        ({"metadata": {"labels": {"component": "hub"}}}, "labels, finalizers or owners"),
        ({"metadata": {"labels": None}}, "labels, finalizers or owners"),
        ({"metadata": {"finalizers": ["example.org/keep"]}}, "labels, finalizers or owners"),
        (
            {"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "a", "uid": "1"}]}},
            "labels, finalizers or owners",
        ),
        ({"spec": {"activeDeadlineSeconds": 1}}, "spec or status"),
    ],
    ids=str,
)
async def test_nothing_else_of_the_own_nodes_pods_can_be_changed(agents: Agents, patch: Any, why: str) -> None:
    before = (await agents.cluster.pod("mine") or {})["metadata"]
    assert why in await denied(agents.own.patch(agents.pod("mine"), patch))
    after = (await agents.cluster.pod("mine") or {})["metadata"]
    assert (after["annotations"], after["labels"]) == (before["annotations"], before["labels"])


async def test_neither_image_nor_tolerations_of_a_pod_of_the_own_node_can_be_changed(agents: Agents) -> None:
    pod = await agents.cluster.pod("mine") or {}
    pod["spec"].setdefault("tolerations", []).append({"operator": "Exists"})
    assert "spec or status" in await denied(agents.own.call("PUT", agents.pod("mine"), pod))
    pod = await agents.cluster.pod("mine") or {}
    pod["spec"]["containers"][0]["image"] = "evil:1"
    assert "spec or status" in await denied(agents.own.call("PUT", agents.pod("mine"), pod))


async def test_pods_are_neither_created_nor_deleted_nor_written_through_subresources(agents: Agents) -> None:
    namespace = agents.cluster.namespace
    status = f"{agents.pod('mine')}/status"
    for call in (
        agents.own.create(path("pods", namespace), a_pod("evil")),
        agents.own.delete(agents.pod("mine")),
        agents.own.patch(status, {"status": {"phase": "Failed"}}),
        agents.own.patch(status, {"metadata": {"labels": {"a": "b"}}}),
        agents.own.patch(status, {"metadata": {"annotations": {TIER: "released"}}}),
    ):
        assert "not create or delete them, and not their subresources" in await denied(call)
    assert (await agents.cluster.pod("mine") or {})["status"]["phase"] == "Running"


async def test_a_pod_of_another_node_is_denied_and_so_is_a_token_without_a_node(agents: Agents) -> None:
    patch = {"metadata": {"annotations": {TIER: "released"}}}
    assert "own node" in await denied(agents.own.patch(agents.pod("theirs"), patch))
    assert "own node" in await denied(agents.unbound.patch(agents.pod("mine"), patch))
    await agents.other.patch(agents.pod("theirs"), patch)


async def test_no_agent_may_change_a_pod_that_is_not_scheduled_yet(agents: Agents) -> None:
    await agents.cluster.create_pod("waits", nodeSelector={"there-is": "no-such-node"})
    patch = {"metadata": {"annotations": {TIER: "released"}}}
    for client in (agents.own, agents.unbound):
        said = await denied(client.patch(agents.pod("waits"), patch))
        assert "an agent may only change pods of its own node" in said


async def test_a_nodes_credential_makes_no_session_and_changes_no_annotation_of_one(agents: Agents) -> None:
    cluster, node = agents.cluster, agents.own_node
    uid = (await cluster.node(node))["metadata"]["uid"]
    credentials = await cluster.node_credentials(node, EVERYTHING)
    owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid, "controller": True}

    def mirror(name: str, **metadata: Any) -> dict[str, Any]:
        pod = a_pod(name, annotations={MIRROR: "1"} | metadata.pop("annotations", {}))
        pod["metadata"] |= {"ownerReferences": [owner]} | metadata
        pod["spec"]["nodeName"] = node
        return pod

    async with KubeClient(credentials) as kubelet:
        pods, mine = path("pods", cluster.namespace), agents.pod("mine")
        for forged in (
            mirror("forged", labels=labels(), annotations={SESSION: "victim"}),
            mirror("forged", labels=labels()),
            mirror("forged", labels={LAYER: "mig"}),
            mirror("forged", annotations={SESSION: "victim"}),
        ):
            assert "a node may not create pods" in await denied(kubelet.create(pods, forged))
        assert await cluster.pod("forged") is None
        for where in (mine, f"{mine}/status"):
            for name, text in ((SESSION, "victim"), (SESSION, None), (TIER, "released"), (KEEP, "{}")):
                patch = {"metadata": {"annotations": {name: text}}}
                assert "a node may not change annotations" in await denied(kubelet.patch(where, patch, "strategic"))
        # what a kubelet does: its static pods, and the status of all its pods
        await kubelet.create(pods, mirror("static-pod", annotations={FOREIGN: "a"}, labels={"tier": "control-plane"}))
        conditions = {"status": {"conditions": [{"type": "Ready", "status": "True"}], "message": "told"}}
        for name in ("mine", "static-pod"):
            await kubelet.patch(f"{agents.pod(name)}/status", conditions, "strategic")
            assert (await cluster.pod(name) or {})["status"]["message"] == "told"
        await kubelet.patch(f"{mine}/status", annotated(**{FOREIGN: "10.0.0.2"}), "strategic")
        # the agent has an account of its own
        await agents.own.patch(mine, {"metadata": {"annotations": borrowed_patch(5)}})
        assert (await cluster.pod("mine") or {})["metadata"]["annotations"][SESSION] == "ada"


@pytest.mark.parametrize("operation", ["CREATE", "UPDATE"])
@pytest.mark.parametrize("part", ["annotations", "labels"])
@pytest.mark.parametrize("before", [None, {}, {"a": "b"}])
def test_what_a_node_is_denied_has_its_sentence_where_a_pod_lacks_labels_or_annotations(
    operation: str, part: str, before: dict[str, str] | None
) -> None:
    values = {"rbac": {"admissionPolicy": "always"}}
    policy = one(render(values), "ValidatingAdmissionPolicy", "jhub-gpushare-nodes")["spec"]
    expressions = {item["name"]: item["expression"] for item in policy["variables"]}

    def pod(given: dict[str, str] | None) -> dict[str, Any]:
        return {"metadata": {"name": "n"} | ({} if given is None else {part: given})}

    def sentences(now: dict[str, str] | None) -> list[str]:
        old = pod(before) if operation == "UPDATE" else None
        data = {"request": {"operation": operation, "userInfo": {}}, "object": pod(now), "oldObject": old}
        checks = policy["validations"]
        return [check["message"] for check in checks if value_of(check["expression"], data, expressions) is not True]

    word = "create pods with" if operation == "CREATE" else f"change {part}"
    (said,) = sentences({**(before or {}), SESSION: "victim"})
    assert said.startswith(f"a node may not {word}")
    assert sentences(before) == sentences({**(before or {}), "x": "y"}) == []


@pytest.mark.parametrize("user", [{}, {"groups": []}, {"groups": ["system:serviceaccounts", "system:authenticated"]}])
def test_the_policy_of_nodes_is_about_nobody_else(user: dict[str, Any]) -> None:
    values = {"rbac": {"admissionPolicy": "always"}}
    policy = one(render(values), "ValidatingAdmissionPolicy", "jhub-gpushare-nodes")["spec"]
    (condition,) = policy["matchConditions"]
    for groups, matched in ((user, False), ({"groups": ["system:nodes", "system:authenticated"]}, True)):
        assert value_of(condition["expression"], {"request": {"userInfo": groups}}) is matched


@pytest.mark.parametrize("resource", ["pods", "nodes", "configmaps", "resourceslices"])
@pytest.mark.parametrize("operation", ["CREATE", "UPDATE", "DELETE"])
@pytest.mark.parametrize("bare", [True, False])
def test_whatever_a_request_lacks_each_condition_says_its_sentence(resource: str, operation: str, bare: bool) -> None:
    """An object has what the API server requires of it, and nothing else; or more."""
    values = {"rbac": {"admissionPolicy": "always"}, "kubelet": "dra"}
    policies = [item for item in render(values) if item["kind"] == "ValidatingAdmissionPolicy"]
    (policy,) = [policy["spec"] for policy in policies if _about(policy) == resource]
    spec: dict[str, Any] = (
        {"driver": "x", "pool": {"name": "p"}} if resource == "resourceslices" else {"containers": []}
    )
    thing: dict[str, Any] = {"metadata": {"name": "n"}, "spec": spec}
    if not bare:
        thing["metadata"] |= {"annotations": {"a": "b"}, "labels": {"a": "b"}, "ownerReferences": []}
        thing |= {"spec": {**spec, "nodeName": "n"}, "status": {"phase": "Running"}}
    user: dict[str, Any] = {"username": "agent"}
    if not bare:
        user["extra"] = {"authentication.kubernetes.io/node-name": ["n"]}
    request = {"operation": operation, "name": "n", "namespace": "jhub", "userInfo": user}
    before, after = operation != "CREATE" and thing, operation != "DELETE" and thing
    data = {"request": request, "object": after or None, "oldObject": before or None, "variables": {}}
    expressions = {part["name"]: part["expression"] for part in policy["variables"]}
    for check in policy["validations"]:
        assert isinstance(value_of(check["expression"], data, expressions), bool), check["message"]


def _about(policy: dict[str, Any]) -> str:
    """The resource that a policy is about; "nodes": the pods that nodes write."""
    (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
    return "nodes" if policy["metadata"]["name"].endswith("-nodes") else str(rule["resources"][0])


async def test_only_the_own_nodes_report_is_written(agents: Agents) -> None:
    where = path("configmaps", agents.cluster.namespace)

    def named(name: str, **labels: str) -> dict[str, Any]:
        return {"metadata": {"name": name, "labels": labels}, "data": {"a": "b"}}

    await denied(agents.own.create(where, named(report_name(agents.other_node))))
    await denied(agents.own.create(where, named("gpushare-templates")))
    await denied(agents.unbound.create(where, named(report_name(agents.own_node))))
    await denied(agents.own.create(where, {"metadata": {"generateName": "gpushare-report-"}, "data": {}}))
    component = {REPORT_COMPONENT_LABEL: REPORT_COMPONENT}
    await agents.own.create(where, named(report_name(agents.own_node), **component))
    await agents.own.patch(agents.report(agents.own_node), {"data": {"a": "c"}})
    dashboard = {"metadata": {"labels": {"grafana_dashboard": "1"}}}
    assert "label" in await denied(agents.own.patch(agents.report(agents.own_node), dashboard))
    # an admin's label does not keep the agent from writing
    await agents.cluster.admin.patch(agents.report(agents.own_node), {"metadata": {"labels": {"team": "ml"}}})
    await agents.own.patch(agents.report(agents.own_node), {"data": {"a": "d"}})
    for client in (agents.other, agents.unbound):
        await denied(client.patch(agents.report(agents.own_node), {"data": {"a": "x"}}))
        await denied(client.delete(agents.report(agents.own_node)))
    await agents.own.delete(agents.report(agents.own_node))


async def test_the_policies_are_about_the_agents_account_alone(agents: Agents) -> None:
    await agents.stranger.patch(agents.pod("theirs"), {"metadata": {"labels": {"a": "b"}}})
    await agents.cluster.admin.delete(agents.pod("theirs"))


async def test_an_agent_publishes_its_report_with_its_pod_as_the_owner(agents: Agents) -> None:
    api = ClusterApi(KubeconfigConnection(agents.cluster.api_client(agents.own.credentials.token)))
    uid = (await agents.cluster.pod("mine") or {})["metadata"]["uid"]
    report = Report(node=agents.own_node, published_at=1.0, gpus=(), sessions=())
    namespace = agents.cluster.namespace
    place = ClusterSettings(namespace, own_pod=(namespace, "mine"), own_pod_uid=uid)
    published = PublishedReport(api, place, lambda: report)
    try:
        await published._write(report)  # created
        await published._write(report)  # patched
        metadata = (await agents.cluster.admin.get(agents.report(agents.own_node)))["metadata"]
        assert [owner["uid"] for owner in metadata["ownerReferences"]] == [uid]
    finally:
        await api.close()


def test_an_agent_may_change_what_its_patches_name_and_no_other_annotation() -> None:
    items = render({"rbac": {"admissionPolicy": "always"}})
    policies = [item for item in items if item["kind"] == "ValidatingAdmissionPolicy"]
    (policy,) = [policy["spec"] for policy in policies if _about(policy) == "pods"]
    (own,) = [part["expression"] for part in policy["variables"] if part["name"] == "own"]
    patches = (
        tier_patch(Tier.ACTIVE, 1.0, 25),
        notice_patch(None),
        borrowed_patch(0),
        share_patch(25, 25, "100%"),
        resized_patch(ShareChangeAnswer(number=1)),
    )
    assert set(value_of(own, {})) == {name for patch in patches for name in patch}


def rendered(version: str, values: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """What the chart makes where helm sees an API server of this version."""
    shutil.copytree(AGENT_CHART, folder)
    for file in ("_helpers.tpl", "daemonset.yaml"):
        template = folder / "templates" / file
        text, replaced = re.subn(r"\.Capabilities\.KubeVersion\.Version", f'"{version}"', template.read_text())
        assert replaced == 1
        template.write_text(text)
    chart = helm_python.Chart.load(folder)
    return objects(chart.render(values, name="gpushare", namespace="jhub"))


@pytest.mark.parametrize(
    ("version", "policy", "made"),
    [
        ("v1.29.14", "auto", False),
        ("v1.29.14-gke.1000", "auto", False),
        ("v1.30.0", "auto", True),
        ("v1.30.0-eks-1234567", "auto", True),
        ("v1.34.1+k3s1", "auto", True),
        ("v1.29.14", "always", True),
        ("v1.34.1", "never", False),
    ],
)
def test_the_policies_are_made_from_kubernetes_1_30_on_unless_said_otherwise(
    version: str, policy: str, made: bool, tmp_path: Path
) -> None:
    kinds = {item["kind"] for item in rendered(version, {"rbac": {"admissionPolicy": policy}}, tmp_path / "chart")}
    assert (kinds >= POLICY_KINDS.keys()) is made
    assert bool(kinds & POLICY_KINDS.keys()) is made


@pytest.mark.parametrize(("version", "recursively"), [("v1.30.9", False), ("v1.31.0", True)])
def test_cgroups_are_read_only_with_all_that_is_mounted_below_where_kubernetes_can_do_it(
    version: str, recursively: bool, tmp_path: Path
) -> None:
    (agent,) = one(rendered(version, {}, tmp_path / "chart"), "DaemonSet")["spec"]["template"]["spec"]["containers"]
    (mount,) = [mount for mount in agent["volumeMounts"] if mount["mountPath"] == "/sys/fs/cgroup"]
    assert mount["readOnly"]
    assert mount.get("recursiveReadOnly") == ("IfPossible" if recursively else None)


def test_each_policy_is_in_force_for_the_agents_account_wherever_it_is_installed() -> None:
    values = {"serviceAccount": {"name": "mine"}, "rbac": {"admissionPolicy": "always"}}
    items = render(values, name="agents", namespace="hub-2")
    for name in ("hub-2-agents-pods", "hub-2-agents-reports"):
        policy = one(items, "ValidatingAdmissionPolicy", name)
        binding = one(items, "ValidatingAdmissionPolicyBinding", name)
        assert policy["apiVersion"] == binding["apiVersion"] == ADMISSION
        assert binding["spec"] == {"policyName": name, "validationActions": ["Deny"]}
        assert policy["spec"]["failurePolicy"] == "Fail"
        (condition,) = policy["spec"]["matchConditions"]
        assert condition["expression"] == 'request.userInfo.username == "system:serviceaccount:hub-2:mine"'
        assert {check["reason"] for check in policy["spec"]["validations"]} == {"Forbidden"}
    nodes = one(items, "ValidatingAdmissionPolicyBinding", "hub-2-agents-nodes")
    assert nodes["spec"] == {"policyName": "hub-2-agents-nodes", "validationActions": ["Deny"]}
