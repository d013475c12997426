"""For the tests of the service on a cluster: a namespace on the stand-in API server, and the hub in it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from kubernetes_asyncio.client import ApiClient, Configuration

from gpushare_spawner.model import kubernetes
from gpushare_spawner.model.control import AgentUnreachable
from gpushare_spawner.model.kubernetes import PodSession
from gpushare_spawner.model.report import GpuReport, Report, SessionReport
from gpushare_spawner.service.cluster.cluster import Cluster
from gpushare_spawner.service.cluster.node import NodeAgent
from tests.kubernetes.standin.api_server import StandInApiServer
from tests.kubernetes.standin.client import Credentials, KubeClient, path

NAMESPACE = "jhub"
HUB_RULES = [
    # zero-to-jupyterhub's Role gives the first; ours adds the others
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "watch", "list", "create", "delete"]},
    {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list", "watch"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]},
]


class Room:
    """A namespace with agents and users; what they do to the API server."""

    def __init__(self, server: StandInApiServer, admin: KubeClient, now: Callable[[], float]) -> None:
        self.server = server
        self.admin = admin
        self.now = now
        self.sessions: dict[str, dict[str, SessionReport]] = {}

    async def rights(self, rules: list[dict[str, Any]]) -> None:
        await self.admin.update(
            path("roles", NAMESPACE, "hub", group="rbac.authorization.k8s.io/v1"),
            {"metadata": {"name": "hub", "namespace": NAMESPACE}, "rules": rules},
        )

    async def open(self, user: str, node: str = "node-a", phase: str = "Running", **changes: Any) -> SessionReport:
        """A pod with a quarter of the node's GPU; the agent has not reported it yet."""
        said = PodSession(
            session=user, template="quarter", share_units=25, gpus=(f"GPU-{node}",), gpu_indices=(0,),
            tier_since=self.now(), effective_units=25,
        )  # fmt: skip
        pod = {
            "metadata": {"name": f"jupyter-{user}", "labels": kubernetes.labels(), "annotations": said.annotations()},
            "spec": {"nodeName": node, "containers": [{"name": "notebook", "image": "notebook"}]},
        }
        await self.admin.create(path("pods", NAMESPACE), pod)
        status = {"status": {"phase": phase}}
        await self.admin.patch(path("pods", NAMESPACE, f"jupyter-{user}", "status"), status)
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
        name = kubernetes.report_name(node)
        labels = {kubernetes.REPORT_COMPONENT_LABEL: kubernetes.REPORT_COMPONENT}
        item = {"metadata": {"name": name, "labels": labels}, "data": {kubernetes.REPORT_KEY: text}}
        if name in [item["metadata"]["name"] for item in await self.admin.list(path("configmaps", NAMESPACE))]:
            await self.admin.patch(path("configmaps", NAMESPACE, name), {"data": item["data"]})
        else:
            await self.admin.create(path("configmaps", NAMESPACE), item)

    async def annotate(self, user: str, annotations: dict[str, str | None]) -> None:
        await self.admin.patch(path("pods", NAMESPACE, f"jupyter-{user}"), {"metadata": {"annotations": annotations}})

    async def session(self, user: str) -> PodSession:
        """As the pod's annotations have it."""
        pod = await self.admin.get(path("pods", NAMESPACE, f"jupyter-{user}"))
        return kubernetes.pod_session(pod["metadata"]["annotations"])


@contextlib.asynccontextmanager
async def make_room(now: Callable[[], float]) -> AsyncIterator[Room]:
    """A namespace whose service account ``hub`` has the hub's rights."""
    async with StandInApiServer() as server, KubeClient(Credentials(server.url, server.admin_token)) as admin:
        await admin.create(path("namespaces"), {"metadata": {"name": NAMESPACE}})
        await admin.create(path("serviceaccounts", NAMESPACE), {"metadata": {"name": "hub"}})
        group = "rbac.authorization.k8s.io/v1"
        await admin.create(path("roles", NAMESPACE, group=group), {"metadata": {"name": "hub"}, "rules": HUB_RULES})
        binding = {
            "metadata": {"name": "hub"},
            "subjects": [{"kind": "ServiceAccount", "name": "hub", "namespace": NAMESPACE}],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "hub"},
        }
        await admin.create(path("rolebindings", NAMESPACE, group=group), binding)
        yield Room(server, admin, now)


@contextlib.asynccontextmanager
async def as_the_hub(room: Room, patience: float = 5.0, all_namespaces: bool = False) -> AsyncIterator[Cluster]:
    configuration = Configuration(host=room.server.url)
    configuration.api_key["BearerToken"] = f"Bearer {room.server.access.add_service_account_token(NAMESPACE, 'hub')}"
    async with ApiClient(configuration) as client:
        cluster = Cluster(client, NAMESPACE, all_namespaces=all_namespaces, clock=room.now)
        await cluster.start(patience)
        try:
            yield cluster
        finally:
            await cluster.close()


async def eventually(what: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for what a watch brings."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come"
        await asyncio.sleep(0.01)


async def seen(cluster: Cluster, node: str, right: Callable[[Report], bool]) -> NodeAgent:
    """The node's agent as soon as its report is right."""
    end = time.monotonic() + 5
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
