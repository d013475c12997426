"""A cluster for a test: an API server, a scheduler where it has none, and nodes on demand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes_asyncio.client import ApiClient, Configuration

from .api_server import StandInApiServer
from .client import ApiStatus, Credentials, KubeClient, path
from .faults import Faults
from .front import Front
from .kubelet import KubeletSettings, StandInKubelet
from .loopback import PodAddresses
from .own_nodes import LABEL, taint
from .programs import Programs
from .quantities import quantity
from .scheduler import Scheduler

RBAC = "rbac.authorization.k8s.io/v1"

# What z2jh gives its hub: the rules of the chart's hub Role.
HUB_RULES = [
    {
        "apiGroups": [""],
        "resources": ["pods", "persistentvolumeclaims", "secrets", "services"],
        "verbs": ["get", "watch", "list", "create", "delete"],
    },
    {"apiGroups": [""], "resources": ["events"], "verbs": ["get", "watch", "list"]},
]


class Cluster:
    """`url`: plain HTTP, on the loopback interface. `namespace` is this test's own. `admin` may do everything."""

    def __init__(
        self, url: str, admin_token: str, folder: Path, faults: Faults, waits: bool = False, controllers: bool = False
    ) -> None:
        self.url = url
        self.admin_token = admin_token
        self.namespace = f"gpushare-test-{secrets.token_hex(4)}"
        self.folder = folder
        self.faults = faults
        self.server: StandInApiServer | None = None
        """The stand-in, for the few tests that are about it alone; see `standin`."""
        self.calls: Counter[tuple[str, str]] = Counter()
        """How often each (verb, resource) was asked for, without the tests' own access reviews; before a real API
        server without the scheduler's."""
        self.nodes: dict[str, StandInKubelet] = {}
        self.admin = KubeClient(self.credentials(admin_token))
        self._node_client = KubeClient(self.credentials(admin_token), patience=30.0)
        self._addresses = PodAddresses()
        self._waits_for_roles = waits
        self.has_controllers = controllers
        """Whether it is a whole cluster, whose controllers do things of their own."""
        self._cluster_wide: list[str] = []
        self._stack = contextlib.AsyncExitStack()
        self._runs = secrets.token_hex(3)

    async def __aenter__(self) -> Cluster:
        await self._stack.enter_async_context(self.admin)
        await self._stack.enter_async_context(self._node_client)
        await self.make_namespace()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.faults.clear()
        try:
            for node in list(self.nodes.values()):
                await node.__aexit__(None, None, None)
            for namespace in await self.admin.list(path("namespaces")):
                if (name := namespace["metadata"]["name"]).startswith(self.namespace):
                    await self._remove_namespace(name)
            for where in set(self._cluster_wide):
                await self.admin.delete(where)
        finally:
            self._addresses.close()
            await self._stack.aclose()

    async def make_namespace(self, suffix: str = "") -> str:
        """One more namespace, ready for pods. All whose names begin with the test's go with the cluster."""
        name = self.namespace + suffix
        metadata = {"name": name, "labels": {LABEL: self.namespace}}
        await self.admin.create(path("namespaces"), {"metadata": metadata})
        if self.has_controllers:
            await self._wait_for(path("serviceaccounts", name, "default"))
            await self._wait_for(path("configmaps", name, "kube-root-ca.crt"))
        return name

    async def make_node(
        self,
        name: str | None = None,
        settings: KubeletSettings | None = None,
        programs: Programs | None = None,
        **options: Any,
    ) -> StandInKubelet:
        """A node with a kubelet, ready for pods. Options are those of KubeletSettings."""
        # unique, so that runs at the same time on one real cluster stay apart
        name = name or f"node-{self._runs}-{len(self.nodes)}"
        settings = settings or KubeletSettings(**options)
        settings = replace(settings, labels={**settings.labels, LABEL: self.namespace})
        if self.has_controllers:
            settings = replace(settings, taints=[*settings.taints, taint(self.namespace)])
        # Unix sockets' paths are short: not below pytest's folders
        kubelet = StandInKubelet(name, self._node_client, self.folder / name, self._addresses, settings, programs)
        await kubelet.start()
        self.nodes[name] = kubelet
        if self.has_controllers:
            await self._wait_until_ready(name)
        return kubelet

    async def name_nodes(self, *names: str) -> None:
        """Large nodes without a kubelet, for pods that say they are there. Tests at the same time may share them.

        Controllers of a whole cluster remove pods of nodes that are not there, and an API server resizes no such pod.
        """
        labels = {LABEL: self.namespace, "kubernetes.io/os": "linux"}
        size = {"cpu": "64", "memory": "512Gi", "pods": "500"}
        for name in names:
            with contextlib.suppress(ApiStatus):
                await self.admin.create(path("nodes"), {"metadata": {"name": name, "labels": labels}})
            status = {"status": {"capacity": size, "allocatable": size}}
            await self.admin.patch(path("nodes", name=name, subresource="status"), status)
            self._cluster_wide.append(path("nodes", name=name))

    async def require_resize(self) -> None:
        """Skip the test where the API server has no pods/resize (before Kubernetes 1.33)."""
        resources = (await self.admin.get("/api/v1"))["resources"]
        if "pods/resize" not in [resource["name"] for resource in resources]:
            pytest.skip("this API server has no pods/resize")

    def standin(self, why: str) -> StandInApiServer:
        """The stand-in API server, for a test that only it can serve; the test is skipped elsewhere, and says why."""
        if self.server is None:
            pytest.skip(why)
        return self.server

    async def _wait_for(self, where: str) -> None:
        """For what a controller makes in a new namespace."""
        async with asyncio.timeout(60):
            while await self._get(where) is None:
                await asyncio.sleep(0.05)

    async def _wait_until_ready(self, node: str) -> None:
        """A new node is tainted as not ready until a controller has looked at it."""
        async with asyncio.timeout(60):
            while any(found["key"] != LABEL for found in (await self.node(node))["spec"].get("taints") or []):
                await asyncio.sleep(0.1)

    async def service_account(
        self, name: str, rules: list[dict[str, Any]], cluster_rules: list[dict[str, Any]] | None = None
    ) -> str:
        """A bearer token of a new service account that may do this in the cluster's namespace, and no more."""
        namespace = self.namespace
        metadata = {"name": name, "namespace": namespace}
        await self.admin.create(path("serviceaccounts", namespace), {"metadata": metadata})
        subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
        await self._bind("Role", metadata, rules, subject, namespace)
        if cluster_rules:
            full_name = {"name": f"{namespace}-{name}"}
            await self._bind("ClusterRole", full_name, cluster_rules, subject, "")
        token = await self.token(name)
        if self._waits_for_roles and rules:
            await self._wait_for_role(token, rules[-1])
        return token

    async def make_cluster_wide(self, plural: str, group: str, item: dict[str, Any]) -> None:
        """An object that is in no namespace, and goes with the cluster."""
        await self.admin.create(path(plural, group=group), item)
        self._cluster_wide.append(path(plural, name=item["metadata"]["name"], group=group))

    async def token(self, service_account: str, node: str = "") -> str:
        """One more token of a service account; with `node` like that of a pod on this node."""
        spec: dict[str, Any] = {"expirationSeconds": 7200}
        if node:
            uid = (await self.node(node))["metadata"]["uid"]
            spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        where = path("serviceaccounts", self.namespace, service_account, "token")
        token: str = (await self.admin.create(where, request))["status"]["token"]
        return token

    async def node_credentials(self, node: str, rules: list[dict[str, Any]]) -> Credentials:
        """Of a node's kubelet, which may do this in the cluster's namespace beside what nodes may."""
        user = f"system:node:{node}"
        subject = {"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}
        await self._bind("Role", {"name": f"node-{node}", "namespace": self.namespace}, rules, subject, self.namespace)
        if self.server is not None:
            return self.credentials(self.server.access.add_user(user, "system:nodes"))
        return replace(self.credentials(), impersonated=(user, "system:nodes"))

    async def _remove_namespace(self, name: str) -> None:
        with contextlib.suppress(ApiStatus):
            # no kubelet is there any more to let go of them
            for pod in await self.admin.list(path("pods", name)):
                await self.admin.delete(path("pods", name, pod["metadata"]["name"]), grace=0)
            await self.admin.delete(path("namespaces", name=name))

    async def _bind(
        self, kind: str, metadata: dict[str, str], rules: list[dict[str, Any]], subject: dict[str, str], namespace: str
    ) -> None:
        roles, bindings = f"{kind.lower()}s", f"{kind.lower()}bindings"
        if not namespace:
            self._cluster_wide += [path(plural, name=metadata["name"], group=RBAC) for plural in (bindings, roles)]
        await self.admin.create(
            path(roles, namespace, group=RBAC), {"apiVersion": RBAC, "kind": kind, "metadata": metadata, "rules": rules}
        )
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": metadata["name"]}
        binding = {"apiVersion": RBAC, "kind": f"{kind}Binding", "metadata": metadata}
        await self.admin.create(
            path(bindings, namespace, group=RBAC), {**binding, "roleRef": reference, "subjects": [subject]}
        )

    async def _wait_for_role(self, token: str, rule: dict[str, Any]) -> None:
        """A real API server knows a new role a moment later."""
        asked = {
            "namespace": self.namespace,
            "verb": rule["verbs"][-1],
            "group": rule["apiGroups"][0],
            "resource": rule["resources"][-1],
            "name": (rule.get("resourceNames") or [""])[0],
        }
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        where = path("selfsubjectaccessreviews", group="authorization.k8s.io/v1")
        async with KubeClient(self.credentials(token)) as client:
            for _ in range(100):
                answer = await client.create(where, {**review, "spec": {"resourceAttributes": asked}})
                if answer["status"]["allowed"]:
                    return
                await asyncio.sleep(0.1)
        raise AssertionError(f"the role of {rule} does not come into force")

    def credentials(self, token: str | None = None) -> Credentials:
        """Of a service account's token, or of the admin."""
        return Credentials(self.url, token or self.admin_token)

    def api_client(self, token: str | None = None) -> ApiClient:
        """kubernetes_asyncio's client; use it with ``async with``."""
        configuration = Configuration(host=self.url)
        configuration.api_key = {"BearerToken": f"Bearer {token or self.admin_token}"}
        return ApiClient(configuration)

    def kubeconfig(self, token: str | None = None) -> Path:
        """A file that a client's usual configuration is read from (JSON, which is YAML)."""
        file = self.folder / f"kubeconfig-{secrets.token_hex(4)}"
        file.touch(mode=0o600)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "test", "user": {"token": token or self.admin_token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": self.namespace}}],
        }
        file.write_text(json.dumps(config))
        return file

    # looks

    async def pods(self, labels: str = "") -> list[dict[str, Any]]:
        """In the cluster's namespace."""
        return await self.admin.list(path("pods", self.namespace), labels)

    async def pod(self, name: str) -> dict[str, Any] | None:
        return await self._get(path("pods", self.namespace, name))

    async def config_maps(self, labels: str = "") -> list[dict[str, Any]]:
        return await self.admin.list(path("configmaps", self.namespace), labels)

    async def node(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = await self.admin.get(path("nodes", name=name))
        return found

    async def events(self, pod: str) -> list[tuple[str, str]]:
        """(reason, message) of the events about a pod, oldest first."""
        events = await self.admin.list(path("events", self.namespace), fields=f"involvedObject.name={pod}")
        events.sort(key=lambda event: int(event["metadata"]["resourceVersion"]))
        return [(event["reason"], event["message"]) for event in events]

    async def create_pod(self, name: str, **spec: Any) -> dict[str, Any]:
        """A pod with one container `notebook`; arguments are those of `a_pod`."""
        created: dict[str, Any] = await self.admin.create(path("pods", self.namespace), a_pod(name, **spec))
        return created

    async def make_claim(self, name: str) -> None:
        """A claim of a volume that is there; the files are the node's."""
        volume = f"{self.namespace}-{name}"
        size = {"storage": "1Gi"}
        await self.admin.create(
            path("persistentvolumes"),
            {
                "metadata": {"name": volume, "labels": {LABEL: self.namespace}},
                "spec": {
                    "capacity": size,
                    "accessModes": ["ReadWriteOnce"],
                    "hostPath": {"path": str(self.folder / "volumes")},
                    "claimRef": {"namespace": self.namespace, "name": name},
                    "persistentVolumeReclaimPolicy": "Retain",
                },
            },
        )
        self._cluster_wide.append(path("persistentvolumes", name=volume))
        spec = {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": size},
            "storageClassName": "",
            "volumeName": volume,
        }
        claims = path("persistentvolumeclaims", self.namespace)
        await self.admin.create(claims, {"metadata": {"name": name}, "spec": spec})

    async def wait_for_pod(
        self, name: str, accept: Callable[[dict[str, Any]], bool], timeout: float = 20.0
    ) -> dict[str, Any]:
        """The pod once it is as wanted."""
        end = asyncio.get_running_loop().time() + timeout
        while True:
            pod = await self.pod(name)
            if pod is not None and accept(pod):
                return pod
            if asyncio.get_running_loop().time() > end:
                raise AssertionError(f"after {timeout} s the pod {name} is: {json.dumps((pod or {}).get('status'))}")
            await asyncio.sleep(0.05)

    async def wait_for_phase(self, name: str, *phases: str, timeout: float = 20.0) -> dict[str, Any]:
        return await self.wait_for_pod(name, lambda pod: pod["status"].get("phase") in phases, timeout)

    async def wait_until_gone(self, name: str, timeout: float = 20.0) -> None:
        end = asyncio.get_running_loop().time() + timeout
        while await self.pod(name) is not None:
            if asyncio.get_running_loop().time() > end:
                raise AssertionError(f"after {timeout} s the pod {name} is still there")
            await asyncio.sleep(0.05)

    async def wait_for_allocatable(self, node: str, resource: str, amount: int, timeout: float = 20.0) -> None:
        """Until the node's status offers so many of a resource."""
        end = asyncio.get_running_loop().time() + timeout
        while True:
            status = (await self.node(node))["status"]
            if quantity(status["allocatable"].get(resource, 0)) == amount:
                return
            if asyncio.get_running_loop().time() > end:
                raise AssertionError(f"after {timeout} s {node} has {status['allocatable']} of {status['capacity']}")
            await asyncio.sleep(0.05)

    async def _get(self, where: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = await self.admin.get(where)
        except ApiStatus as error:
            if error.code == 404:
                return None
            raise
        return found


def a_pod(
    name: str,
    command: list[str] | None = None,
    limits: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    labels: dict[str, str] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """A manifest with one container, `notebook`, that sleeps unless told otherwise; the rest goes into its spec."""
    container = {
        "name": "notebook",
        "image": "standin/notebook:1",
        "command": command or ["sleep", "300"],
        "env": [{"name": key, "value": value} for key, value in (env or {}).items()],
        "resources": {"limits": {key: str(amount) for key, amount in (limits or {}).items()}},
    }
    metadata = {"name": name, "annotations": annotations or {}, "labels": labels or {}}
    return {
        "metadata": metadata,
        "spec": {"containers": [container], "restartPolicy": "OnFailure", "terminationGracePeriodSeconds": 5, **spec},
    }


def restarts(pod: dict[str, Any]) -> int:
    """How often its first container was started again."""
    statuses = pod["status"].get("containerStatuses") or [{"restartCount": 0}]
    return int(statuses[0]["restartCount"])


@contextlib.asynccontextmanager
async def standin_cluster(faults: Faults | None = None, port: int = 0) -> AsyncIterator[Cluster]:
    """The stand-in API server with the stand-in scheduler."""
    folder = Path(tempfile.mkdtemp(prefix="gpushare-k8s-"))
    try:
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(StandInApiServer(faults, port))
            token = server.access.add_user("system:kube-scheduler", "system:masters")
            client = await stack.enter_async_context(KubeClient(Credentials(server.url, token), patience=30.0))
            await stack.enter_async_context(Scheduler(client))
            cluster = Cluster(server.url, server.admin_token, folder, server.faults)
            cluster.server, cluster.calls = server, server.calls
            yield await stack.enter_async_context(cluster)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def real_cluster(backend: Credentials, has_controllers: bool) -> AsyncIterator[Cluster]:
    """A real API server, with the stand-in scheduler unless it is a whole cluster; nodes are stand-ins in any case."""
    folder = Path(tempfile.mkdtemp(prefix="gpushare-k8s-"))
    try:
        async with contextlib.AsyncExitStack() as stack:
            front = await stack.enter_async_context(Front(backend, Faults()))
            if not has_controllers:
                client = await stack.enter_async_context(KubeClient(backend, patience=30.0))
                await stack.enter_async_context(Scheduler(client))
            cluster = Cluster(front.url, front.admin_token, folder, front.faults, True, has_controllers)
            cluster.calls = front.calls
            front.keep_to = cluster.namespace if has_controllers else ""
            yield await stack.enter_async_context(cluster)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
