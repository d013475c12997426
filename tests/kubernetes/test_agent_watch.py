"""The watch of a node's pods in front of an API server in trouble."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import certifi
import pytest
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.config import ConfigException

from gpushare_spawner.agent.kubernetes.pods.pod_watch import Pods
from gpushare_spawner.clients.api import ApiFailure, ClusterApi, Json, KubeconfigConnection, ListAnswer
from gpushare_spawner.clients.object_watch import TRIES_OF_A_WATCH
from gpushare_spawner.clients.service_account import ServiceAccountConnection
from gpushare_spawner.model.kubernetes.annotations import labels
from gpushare_spawner.model.kubernetes.objects import MIRROR
from tests.present import present

from .standin.cluster import Cluster


class Script:
    """An API that answers watches from a list: an event's version, or a failure's status."""

    def __init__(self, *watches: int | str) -> None:
        self.watches = list(watches)
        self.asked_from: list[str] = []
        self.lists = 0

    async def list(self, path: str, **query: str) -> ListAnswer:
        self.lists += 1
        return ListAnswer(json.dumps({"items": [], "metadata": {"resourceVersion": f"list{self.lists}"}}))

    async def watch(self, path: str, version: str, opened: Callable[[], None], **query: str) -> AsyncIterator[Json]:
        self.asked_from.append(version)
        if not self.watches:
            await asyncio.Event().wait()
        next = self.watches.pop(0)
        if isinstance(next, int):
            raise ApiFailure(next, "trouble")
        yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": next}}}


@pytest.mark.parametrize(
    "mark",
    [{"annotations": {MIRROR: "x"}}, {"ownerReferences": [{"kind": "Node", "name": "node"}]}],
    ids=["mirror", "owned"],
)
async def test_pods_that_the_node_has_made_are_no_sessions(mark: Json) -> None:
    pods = Pods(Script(), "hub", "node", lambda: None)  # type: ignore[arg-type]
    known = {"namespace": "hub", "creationTimestamp": "2026-01-01T00:00:00Z", "labels": labels()}
    for name, more in (("victim", mark), ("ada", {})):
        item = {
            "metadata": {**known, "name": name, "uid": name, "resourceVersion": "1", **more},
            "spec": {"containers": []},
        }
        pods.enter(item)
    assert [pod.name for pod in pods.objects.values()] == ["ada"]
    assert pods.named("hub", "victim") is None


async def followed(script: Script, seconds: float = 10.0) -> None:
    """Let a watch follow the script to its end."""
    pods = Pods(script, "hub", "node", lambda: None)  # type: ignore[arg-type]
    pods.start()
    try:
        async with asyncio.timeout(seconds):
            while script.watches:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
    finally:
        await pods.close()


async def newest(api: ClusterApi, path: str) -> str:
    answer = await api.list(path)
    assert list(answer.items()) is not None
    return answer.version


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpushare_spawner.clients.object_watch.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("gpushare_spawner.clients.object_watch.LONGEST_PAUSE", 0.05)


@pytest.mark.parametrize("status", [0, 429, 500, 503])
async def test_a_failure_that_passes_does_not_cost_a_list(status: int) -> None:
    script = Script("7", status, status)
    await followed(script)
    assert script.lists == 1
    assert script.asked_from == ["list1", "7", "7", "7"]


async def test_a_list_that_takes_long_is_not_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpushare_spawner.agent.kubernetes.pods.pod_watch.LIST_AGAIN_AFTER", 0.0)
    script = Script()
    go_on = asyncio.Event()
    at_once = script.list

    async def list_slowly(path: str, **query: str) -> ListAnswer:
        answer = await at_once(path, **query)
        await go_on.wait()
        return answer

    script.list = list_slowly  # type: ignore[method-assign]
    pods = Pods(script, "hub", "node", lambda: None)  # type: ignore[arg-type]
    pods.start()
    try:
        for _ in range(5):
            await asyncio.sleep(0.01)
            pods.list_again()
        assert script.lists == 1
        go_on.set()
        async with asyncio.timeout(10):
            while pods.listed_at is None:
                await asyncio.sleep(0.01)
        pods.list_again()
        await asyncio.sleep(0.05)
        assert script.lists == 2
    finally:
        await pods.close()


async def test_after_many_failures_it_lists_anew() -> None:
    script = Script("7", *[500] * TRIES_OF_A_WATCH)
    await followed(script)
    assert script.lists == 2
    assert script.asked_from[-1] == "list2"


async def test_what_is_too_old_is_listed_anew_at_once_but_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpushare_spawner.clients.object_watch.FIRST_PAUSE", 0.5)
    monkeypatch.setattr("gpushare_spawner.clients.object_watch.LONGEST_PAUSE", 60.0)
    script = Script("7", 410, *[410] * 1000)
    with pytest.raises(TimeoutError):
        await followed(script, seconds=1.0)
    # the first at once, the others with pauses that grow
    assert 2 <= script.lists <= 5


async def test_a_refusal_lists_anew() -> None:
    script = Script("7", 403)
    await followed(script)
    assert script.lists == 2


async def test_a_token_that_cannot_be_read_is_a_failed_call() -> None:
    """Its file is replaced by the kubelet, and may be empty for a moment."""
    settings = Configuration(host="https://127.0.0.1:1", api_key={"BearerToken": "Bearer old"})

    def unreadable(_settings: Configuration) -> None:
        raise ConfigException("Token file exists but empty.")

    settings.refresh_api_key_hook = unreadable
    api = ClusterApi(KubeconfigConnection(ApiClient(settings)))
    try:
        with pytest.raises(ApiFailure, match="Token file exists but empty") as failed:
            await api.list("/api/v1/pods")
        assert failed.value.status == 0
    finally:
        await api.close()


async def test_a_pod_of_any_size_is_told_of(cluster: Cluster) -> None:
    api = ClusterApi(KubeconfigConnection(cluster.api_client()))
    try:
        where = f"/api/v1/namespaces/{cluster.namespace}/pods"
        version = await newest(api, where)
        await cluster.create_pod("large", annotations={"notes": "n" * 200 * 1024})
        async with asyncio.timeout(30):
            async for event in api.watch(where, version, lambda: None):
                if event["type"] == "ADDED":
                    break
        assert len(event["object"]["metadata"]["annotations"]["notes"]) == 200 * 1024
    finally:
        await api.close()


async def test_by_the_service_account_it_lists_watches_and_patches(cluster: Cluster, tmp_path: Path) -> None:
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch", "patch"]}]
    (tmp_path / "token").write_text(await cluster.service_account("reader", rules))
    configuration = cluster.api_client().configuration
    # the stand-in's API server speaks HTTP
    (tmp_path / "ca.crt").write_text(Path(configuration.ssl_ca_cert or certifi.where()).read_text())
    api = ClusterApi(ServiceAccountConnection(present(configuration.host), tmp_path))
    where = f"/api/v1/namespaces/{cluster.namespace}/pods"
    try:
        version = await newest(api, where)
        await cluster.create_pod("one")
        async for event in api.watch(where, version, lambda: None):
            if event["type"] == "ADDED":
                break
        patched = await api.patch(f"{where}/one", {"metadata": {"annotations": {"a": "b"}}})
        assert patched["metadata"]["annotations"]["a"] == "b"
        with pytest.raises(ApiFailure) as refused:
            await api.list(f"/api/v1/namespaces/{cluster.namespace}/secrets")
        assert refused.value.status == 403
    finally:
        await api.close()
