"""For the tests of the service on a cluster: its namespace, with agents, users and the hub in it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from gpushare_spawner.model.control import AgentUnreachable
from gpushare_spawner.model.kubernetes import annotations as annotations_names
from gpushare_spawner.model.kubernetes.annotations import SessionAnnotations, pod_session
from gpushare_spawner.model.kubernetes.objects import REPORT_COMPONENT, REPORT_COMPONENT_LABEL, REPORT_KEY, report_name
from gpushare_spawner.model.report import GpuReport, Report, SessionReport
from gpushare_spawner.service.kubernetes.cluster import Cluster, NodeAgent
from tests.kubernetes.standin.client import KubeClient, path
from tests.kubernetes.standin.cluster import RBAC
from tests.kubernetes.standin.cluster import Cluster as TestCluster
from tests.service.conftest import Clock

HUB_RULES = [
    # zero-to-jupyterhub's Role gives the first; ours adds the others
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "watch", "list", "create", "delete"]},
    {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list", "watch", "patch"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]},
]


class HubNamespace:
    """A namespace with agents and users; what they do to the API server."""

    def __init__(self, cluster: TestCluster, token: str, now: Callable[[], float]) -> None:
        self.cluster = cluster
        self.name = cluster.namespace
        self.admin = cluster.admin
        self.token = token
        """Of the hub's service account."""
        self.now = now
        self.sessions: dict[str, dict[str, SessionReport]] = {}

    def at(self, plural: str, name: str = "", subresource: str = "") -> str:
        """A path in the namespace."""
        return path(plural, self.name, name, subresource)

    async def rights(self, rules: list[dict[str, Any]]) -> None:
        """What the hub may do from now on."""
        metadata = {"name": "hub", "namespace": self.name}
        await self.admin.update(path("roles", self.name, "hub", group=RBAC), {"metadata": metadata, "rules": rules})
        # a real API server knows it a moment later
        may_patch = any("pods" in rule["resources"] and "patch" in rule["verbs"] for rule in rules)
        asked = {"namespace": self.name, "verb": "patch", "resource": "pods"}
        where = path("selfsubjectaccessreviews", group="authorization.k8s.io/v1")
        async with KubeClient(self.cluster.credentials(self.token)) as client:
            for _ in range(600):
                answer = await client.create(where, {"spec": {"resourceAttributes": asked}})
                if answer["status"]["allowed"] == may_patch:
                    return
                await asyncio.sleep(0.05)
        raise AssertionError("the role does not come into force")

    async def open(
        self,
        user: str,
        node: str = "node-a",
        phase: str = "Running",
        containers: Sequence[dict[str, Any]] = ({"name": "notebook", "image": "notebook"},),
        **changes: Any,
    ) -> SessionReport:
        """A pod with a quarter of the node's GPU; the agent has not reported it yet."""
        said = SessionAnnotations(
            session=user, template="quarter", share_units=25, gpus=(f"GPU-{node}",), gpu_indices=(0,),
            tier_since=self.now(), effective_units=25,
        )  # fmt: skip
        pod = {
            "metadata": {
                "name": f"jupyter-{user}",
                "labels": annotations_names.labels(),
                "annotations": said.annotations(),
            },
            "spec": {"nodeName": node, "containers": list(containers)},
        }
        await self.admin.create(self.at("pods"), pod)
        status = {"status": {"phase": phase}}
        await self.admin.patch(self.at("pods", f"jupyter-{user}", "status"), status)
        values = {
            "id": user, "user": user, "template": "quarter", "gpus": said.gpus, "share_units": 25,
            "tier_since": self.now(), "effective_units": 25, "guaranteed_units": 25, "opened_at": self.now(),
            "kernels": 1, "kernels_busy": 0,
        }  # fmt: skip
        session = SessionReport.model_validate(values | changes)
        self.sessions.setdefault(node, {})[user] = session
        return session

    async def publish(self, node: str = "node-a", **changes: dict[str, Any]) -> None:
        """The node's agent reports its sessions; ``changes`` by user."""
        here = self.sessions.setdefault(node, {})
        for user, change in changes.items():
            here[user] = here[user].model_copy(update=change)
        gpu = GpuReport(index=0, uuid=f"GPU-{node}", model="Simulated GPU 16 GiB", memory_bytes=2**34, simulated=True)
        report = Report(node=node, published_at=self.now(), gpus=(gpu,), sessions=tuple(here.values()))
        await self.write_report(node, report.model_dump_json())

    async def write_report(self, node: str, text: str) -> None:
        name = report_name(node)
        labels = {REPORT_COMPONENT_LABEL: REPORT_COMPONENT}
        item = {"metadata": {"name": name, "labels": labels}, "data": {REPORT_KEY: text}}
        if name in [item["metadata"]["name"] for item in await self.admin.list(self.at("configmaps"))]:
            await self.admin.patch(self.at("configmaps", name), {"data": item["data"]})
        else:
            await self.admin.create(self.at("configmaps"), item)

    async def annotate(self, user: str, annotations: dict[str, str | None]) -> None:
        await self.admin.patch(self.at("pods", f"jupyter-{user}"), {"metadata": {"annotations": annotations}})

    async def session(self, user: str) -> SessionAnnotations:
        """As the pod's annotations have it."""
        pod = await self.admin.get(self.at("pods", f"jupyter-{user}"))
        return pod_session(pod["metadata"]["annotations"])


async def make_namespace(cluster: TestCluster, now: Callable[[], float]) -> HubNamespace:
    """The test cluster's namespace, with a service account ``hub`` that has the hub's rights.

    A clock that is moved by hand begins a moment from now: a session is as old as its pod, by the API server's clock.
    """
    if isinstance(now, Clock):
        now.now = int(time.time()) + 30.0
    await cluster.name_nodes("node-a", "node-b")
    return HubNamespace(cluster, await cluster.service_account("hub", HUB_RULES), now)


@contextlib.asynccontextmanager
async def as_the_hub(
    namespace: HubNamespace, patience: float = 60.0, all_namespaces: bool = False, token: str = ""
) -> AsyncIterator[Cluster]:
    """What the service sees."""
    async with namespace.cluster.api_client(token or namespace.token) as client:
        seen = Cluster(client, namespace.name, all_namespaces=all_namespaces, clock=namespace.now)
        await seen.start(patience)
        try:
            yield seen
        finally:
            await seen.close()


async def eventually(what: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for what a watch brings."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come"
        await asyncio.sleep(0.01)


async def seen(cluster: Cluster, node: str, right: Callable[[Report], bool]) -> NodeAgent:
    """The node's agent as soon as its report is right."""
    end = time.monotonic() + 60
    while True:
        for agent in cluster:
            with contextlib.suppress(AgentUnreachable):
                if agent.node == node and right(await agent.report()):
                    return agent
        assert time.monotonic() < end, "the report did not come"
        await asyncio.sleep(0.01)


def has(user: str, **values: Any) -> Callable[[Report], bool]:
    def right(report: Report) -> bool:
        session = report.session(user)
        return session is not None and all(getattr(session, name) == value for name, value in values.items())

    return right


def all_of(*conditions: Callable[[Report], bool]) -> Callable[[Report], bool]:
    return lambda report: all(condition(report) for condition in conditions)
