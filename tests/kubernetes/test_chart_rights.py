"""The chart's Roles and ClusterRoles: agent, spawner and service do their work with no more, and use every right."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tornado.httpclient import AsyncHTTPClient, HTTPRequest

from gpushare_spawner.agent.sessions.host_memory import HostUse
from gpushare_spawner.model.control import CordonRequest, TierRequest
from gpushare_spawner.model.controls import Cordon
from gpushare_spawner.model.frames import Kind
from gpushare_spawner.model.report import HostUseReport
from gpushare_spawner.model.share import Tier
from gpushare_spawner.service.kubernetes.cluster import Cluster as ServiceCluster
from gpushare_spawner.service.kubernetes.cluster import NodeAgent as SeenNode
from gpushare_spawner.service.kubernetes.released_requests import ReleasedRequests
from gpushare_spawner.service.templates import TemplateSource
from tests.agent.conftest import short_folder  # noqa: F401
from tests.agent.peers import FIRST, GIB

from .agent_account import agent_token
from .charts import one, render
from .node_agent import NodeAgent
from .sharing_hub import SharingHub, kube_access, tolerates_own_nodes
from .standin.client import ApiStatus, KubeClient, path
from .standin.cluster import HUB_RULES, Cluster
from .standin.programs import Listeners

Right = tuple[str, str]
"""Verb and resource."""
QUARTER = """
name: quarter-gpu
display_name: 0.25 GPU
gpu: {fraction: 0.25}
resources: {cpu: {guarantee: 200m, limit: 4}, memory: {guarantee: 128Mi, limit: 4Gi}}
idle: {release_after: 45m, release_resources: {cpu: 100m}}
"""


def rights(rules: Iterable[dict[str, Any]]) -> set[Right]:
    return {(verb, resource) for rule in rules for verb in rule["verbs"] for resource in rule["resources"]}


@dataclass
class Asked:
    """What service accounts have asked of the API server, by their names."""

    here: dict[str, set[Right]] = field(default_factory=lambda: defaultdict(set))
    """In the cluster's namespace."""
    everywhere: dict[str, set[Right]] = field(default_factory=lambda: defaultdict(set))
    """In all namespaces, or of objects that are in none."""


@dataclass(frozen=True)
class Rules:
    """The rules that the chart makes."""

    agent: list[dict[str, Any]]
    hub: list[dict[str, Any]]
    hub_everywhere: list[dict[str, Any]]
    """Those of its ClusterRole: for the reader of nodes' capacity."""


@pytest.fixture
def asked(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What each service account of the cluster's namespace has asked of the API server."""
    seen = Asked()
    draw = cluster.faults.draw

    def watching(ask: Any) -> Any:
        if ask.user.startswith(f"system:serviceaccount:{cluster.namespace}:") and ask.resource:
            where = {cluster.namespace: seen.here, "": seen.everywhere}[ask.namespace]
            where[ask.user.rpartition(":")[2]].add((ask.verb, ask.resource))
        return draw(ask)

    monkeypatch.setattr(cluster.faults, "draw", watching)
    return seen


@pytest.fixture
def roles() -> Rules:
    """The rules of all Roles and ClusterRoles that the chart makes."""
    items = render({})
    everywhere = "jhub-gpushare-hub-capacity"
    found = {(item["kind"], item["metadata"]["name"]) for item in items if item["kind"] in ("Role", "ClusterRole")}
    assert found == {("Role", "gpushare"), ("Role", "gpushare-hub"), ("ClusterRole", everywhere)}
    return Rules(
        one(items, "Role", "gpushare")["rules"],
        one(items, "Role", "gpushare-hub")["rules"],
        one(items, "ClusterRole", everywhere)["rules"],
    )


@pytest.fixture
async def agent(cluster: Cluster, roles: Rules, short_folder: Path) -> AsyncIterator[NodeAgent]:  # noqa: F811
    kubelet = await cluster.make_node(programs=Listeners())
    token = await agent_token(cluster, kubelet.name, roles.agent)
    agent = NodeAgent(cluster, kubelet, token, short_folder)
    await agent.start()
    await agent.ready()
    yield agent
    await agent.stop()


async def test_each_has_what_it_needs_and_needs_what_it_has(
    cluster: Cluster,
    asked: Asked,
    roles: Rules,
    agent: NodeAgent,
    templates: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (templates / "quarter-gpu.yaml").write_text(QUARTER)
    # the stand-in's pods have no cgroups
    used = HostUseReport(cpu_millicores=0, memory_bytes=0)
    monkeypatch.setattr(HostUse, "of_pod", lambda use, uid: used)
    async with (
        kube_access(cluster, [*HUB_RULES, *roles.hub], roles.hub_everywhere),
        SharingHub(tmp_path, templates, cluster, tolerates_own_nodes) as hub,
    ):
        response = await hub.start_server("ada", {"profile": "quarter-gpu"})
        assert response.code == 201, response.body
        await agent.session("ada", 20)
        peer = await agent.peer("ada")
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 7200},
        }
        answer = await cluster.admin.create(path("serviceaccounts", cluster.namespace, "hub", "token"), request)
        async with cluster.api_client(answer["status"]["token"]) as client:
            service = ServiceCluster(client, cluster.namespace)
            await service.start(10)
            try:
                node = await _seen(agent, service, lambda session: session.confirmed and not session.gpu_busy)
                await node.send(CordonRequest(cordon=Cordon(by="boss", since=1.0)))
                await node.send(CordonRequest(cordon=None))
                await node.send(TierRequest(id="ada", tier=Tier.RELEASED, effective_units=0, reason="idle"))
                await agent.until(lambda: _tier(agent) is Tier.RELEASED)
                await _seen(agent, service, lambda session: session.host_use == used)
                requests = ReleasedRequests(service, TemplateSource(templates))
                async with asyncio.timeout(20):
                    while await _requested_cpu(cluster) != "100m":
                        await requests.poll()  # refused while the pod has changed since the watch brought it
                        await asyncio.sleep(0.05)
                peer.send(Kind.REQUEST, GIB, 0, gpu=FIRST.uuid)
                await _seen(agent, service, lambda session: session.tier is Tier.ACTIVE)
            finally:
                await service.close()
        # the reader of capacity began with the spawn
        await agent.until(lambda: asked.everywhere["hub"] >= rights(roles.hub_everywhere), 20)
        assert (await hub.stop_server("ada")).code in (202, 204)
        await agent.until(lambda: agent.node.report().session("ada") is None, 20)
    of_the_chart = rights(roles.hub)
    assert asked.here == {"agent": rights(roles.agent), "hub": asked.here["hub"]}
    assert of_the_chart <= asked.here["hub"] <= of_the_chart | rights(HUB_RULES)
    # KubeSpawner's own reader of events is no part of the table
    of_the_hub = {right for right in asked.here["hub"] if right[1] != "events"} - of_the_chart
    assert of_the_hub <= documented_rights()["the hub's"].of_zero_to_jupyterhub
    # which every account may
    asked.everywhere["hub"] -= {("create", "selfsubjectaccessreviews")}
    assert asked.everywhere == {"hub": rights(roles.hub_everywhere)}


@pytest.mark.parametrize("secrets", [True, False])
async def test_an_agents_token_reads_no_token_of_a_server_where_the_hub_may_make_secrets(
    cluster: Cluster, roles: Rules, templates: Path, tmp_path: Path, secrets: bool
) -> None:
    """KubeSpawner writes a server's token as a plain value into its pod, and no right on pods leaves values out."""
    lacking: set[str] = set() if secrets else {"secrets"}
    hub_rules = [rule | {"resources": sorted(set(rule["resources"]) - lacking)} for rule in HUB_RULES]
    (templates / "plain.yaml").write_text("name: plain\ndisplay_name: No GPU\n")
    servers, elsewhere = await cluster.make_node(programs=Listeners()), await cluster.make_node()
    async with (
        kube_access(cluster, [*hub_rules, *roles.hub], roles.hub_everywhere),
        SharingHub(tmp_path, templates, cluster, tolerates_own_nodes) as hub,
    ):
        response = await hub.start_server("ada", {"profile": "plain"})
        assert response.code == 201, response.body
        token = await agent_token(cluster, elsewhere.name, roles.agent)
        async with KubeClient(cluster.credentials(token)) as agent:
            (pod,) = [
                one for one in await agent.list(path("pods", cluster.namespace)) if "ada" in one["metadata"]["name"]
            ]
            with pytest.raises(ApiStatus) as refused:
                await agent.list(path("secrets", cluster.namespace))
        assert pod["spec"]["nodeName"] in (servers.name, elsewhere.name)
        assert refused.value.code == 403
        values = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]}
        api_token = hub.spawner("ada").api_token
        assert api_token
        assert (api_token in json.dumps(pod)) is not secrets
        if secrets:
            (secret,) = await cluster.admin.list(path("secrets", cluster.namespace))
            assert [owner["uid"] for owner in secret["metadata"]["ownerReferences"]] == [pod["metadata"]["uid"]]
            assert (await hub.stop_server("ada")).code in (202, 204)
            return
        request = HTTPRequest(
            f"{hub.url}/api/user", headers={"Authorization": f"token {values['JUPYTERHUB_API_TOKEN']}"}
        )
        seen = json.loads((await AsyncHTTPClient().fetch(request)).body)
        assert seen["name"] == "ada"
        assert "access:servers!server=ada/" in seen["scopes"]
        # what the token of another server gives is no more: the hub itself stays out of reach
        assert not [scope for scope in seen["scopes"] if scope.startswith(("admin", "users!", "servers", "delete"))]
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "trust.md").read_text()
    assert "JUPYTERHUB_API_TOKEN" in page


@dataclass
class DocumentedRights:
    """The rights that the table of docs/guides/kubernetes-rights.md gives to an account."""

    here: set[Right] = field(default_factory=set)
    """Of a Role that the chart makes."""
    everywhere: set[Right] = field(default_factory=set)
    """Of a ClusterRole that the chart makes."""
    with_layers: set[Right] = field(default_factory=set)
    """Those of both that need a layer in `hub.layers`."""
    of_zero_to_jupyterhub: set[Right] = field(default_factory=set)

    def add(self, resource: str, verb: str, condition: str) -> None:
        """Add a right. ``condition``: the words in parentheses behind its verb."""
        right = (verb, resource)
        if "own Role" in condition or "that Role" in condition:
            self.of_zero_to_jupyterhub.add(right)
            return
        (self.everywhere if "ClusterRole" in condition else self.here).add(right)
        if "`hub.layers`" in condition:
            self.with_layers.add(right)


def documented_rights() -> dict[str, DocumentedRights]:
    """Read the table; the keys are the account of the hub, of the agent, and of the agent that only observes."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "kubernetes-rights.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    header = rows.index(["part", "service account", "resource", "verbs", "for"])
    found: dict[str, DocumentedRights] = defaultdict(DocumentedRights)
    part = account = ""
    for row in rows[header + 2 :]:
        if len(row) != len(rows[header]):
            break
        part, account = row[0] or part, row[1] or account
        name = account if account == "the hub's" else part.partition(" (")[0]
        names = re.sub(r"\([^)]*\)| of all namespaces", "", row[2])
        for verbs, condition in re.findall(r"([^()]+)(?:\(([^)]*)\))?", row[3]):
            for verb in re.findall(r"\w+", verbs):
                for resource in re.split(r"[;,]|\band\b", names):
                    if resource.strip():
                        found[name].add(resource.replace(" ", ""), verb, condition)
    return found


def test_the_table_of_rights_says_what_the_roles_say() -> None:
    table = documented_rights()
    assert table.keys() == {"the hub's", "agent", "agent that only observes"}
    hub = table["the hub's"]
    for layers, more in (([], set[Right]()), (["dra", "kai"], hub.with_layers)):
        items = render({"hub": {"layers": layers}})
        capacity = one(items, "ClusterRole", "jhub-gpushare-hub-capacity")
        assert rights(one(items, "Role", "gpushare-hub")["rules"]) == hub.here - (hub.with_layers - more)
        assert rights(capacity["rules"]) == hub.everywhere - (hub.with_layers - more)
        assert rights(one(items, "Role", "gpushare")["rules"]) == table["agent"].here
    observing = one(render({"observe": True}), "Role", "gpushare")
    assert rights(observing["rules"]) == table["agent that only observes"].here
    assert hub.of_zero_to_jupyterhub <= rights(HUB_RULES)
    for agent in ("agent", "agent that only observes"):
        assert not table[agent].everywhere | table[agent].of_zero_to_jupyterhub


async def _requested_cpu(cluster: Cluster) -> str:
    (pod,) = [pod for pod in await cluster.admin.list(path("pods", cluster.namespace)) if "ada" in str(pod["metadata"])]
    cpu: str = pod["spec"]["containers"][0]["resources"]["requests"]["cpu"]
    return cpu


def _tier(agent: NodeAgent) -> Tier | None:
    session = agent.node.report().session("ada")
    return session.tier if session is not None else None


async def _seen(agent: NodeAgent, service: ServiceCluster, right: Callable[[Any], bool]) -> SeenNode:
    """The node as the service sees it, once ada's session is so."""
    end = time.monotonic() + 20
    while True:
        for node in service:
            session = (await node.report()).session("ada") if node.node == agent.kubelet.name else None
            if session is not None and right(session):
                return node
        assert time.monotonic() < end, "it did not come"
        await asyncio.sleep(0.05)
