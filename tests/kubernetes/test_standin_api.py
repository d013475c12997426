"""The stand-in API server answers Kubernetes' own Python client as an API server does."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import ClientConnectionError
from kubernetes_asyncio.client import ApiException, CoreV1Api
from kubernetes_asyncio.watch import Watch

from tests.present import present

from .standin.client import ApiStatus, KubeClient, path
from .standin.cluster import Cluster, a_pod


@pytest.fixture
async def api(cluster: Cluster) -> AsyncIterator[CoreV1Api]:
    """As the admin."""
    async with cluster.api_client() as client:
        yield CoreV1Api(client)


def config_map(name: str, labels: dict[str, str] | None = None, **data: str) -> Any:
    return {"metadata": {"name": name, "labels": labels or {}}, "data": data}


async def refused(call: Any) -> ApiException:
    with pytest.raises(ApiException) as caught:
        await call
    return caught.value


async def watched(
    cluster: Cluster, version: str, count: int, plural: str = "configmaps", **selectors: Any
) -> list[tuple[str, str]]:
    """(what, name) of the first events after a version."""
    events = []
    async with asyncio.timeout(10):
        async for event in cluster.admin.watch(path(plural, cluster.namespace), version, **selectors):
            if event["type"] != "BOOKMARK":
                events.append((event["type"], event["object"]["metadata"]["name"]))
            if len(events) == count:
                break
    return events


async def version_now(cluster: Cluster) -> str:
    _, version = await cluster.admin.list_with_version(path("configmaps", cluster.namespace))
    return str(version)


# objects


async def test_an_object_from_its_creation_to_its_end(cluster: Cluster, api: CoreV1Api) -> None:
    namespace = cluster.namespace
    made = await api.create_namespaced_config_map(namespace, config_map("one", color="red"))
    assert made.metadata.uid
    assert made.metadata.creation_timestamp
    error = await refused(api.create_namespaced_config_map(namespace, config_map("one")))
    assert (error.status, '"AlreadyExists"' in str(error.body)) == (409, True)
    made.data = {"color": "green"}
    changed = await api.replace_namespaced_config_map("one", namespace, made)
    assert int(changed.metadata.resource_version) > int(made.metadata.resource_version)
    # the same again is no change
    again = await api.replace_namespaced_config_map("one", namespace, changed)
    assert again.metadata.resource_version == changed.metadata.resource_version
    status = await api.delete_namespaced_config_map("one", namespace)
    assert status.status == "Success"
    assert (await refused(api.read_namespaced_config_map("one", namespace))).status == 404


async def test_a_write_on_an_old_version_is_refused(cluster: Cluster, api: CoreV1Api) -> None:
    namespace = cluster.namespace
    old = await api.create_namespaced_config_map(namespace, config_map("one", color="red"))
    await api.patch_namespaced_config_map("one", namespace, {"data": {"color": "green"}})
    old.data = {"color": "blue"}
    error = await refused(api.replace_namespaced_config_map("one", namespace, old))
    assert error.status == 409
    assert "the object has been modified" in str(error.body)
    patch = {"metadata": {"resourceVersion": old.metadata.resource_version}, "data": {"color": "blue"}}
    assert (await refused(api.patch_namespaced_config_map("one", namespace, patch))).status == 409
    assert (await api.read_namespaced_config_map("one", namespace)).data == {"color": "green"}


async def test_the_kinds_of_patches(cluster: Cluster) -> None:
    where = path("pods", cluster.namespace, "one")
    manifest = a_pod("one", annotations={"example.org/a": "1", "example.org/b": "2"})
    await cluster.admin.create(path("pods", cluster.namespace), manifest)
    merged = await cluster.admin.patch(where, {"metadata": {"annotations": {"example.org/a": None}}})
    assert merged["metadata"]["annotations"] == {"example.org/b": "2"}
    operations = [
        {"op": "test", "path": "/metadata/annotations/example.org~1b", "value": "2"},
        {"op": "add", "path": "/metadata/annotations/example.org~1c", "value": "3"},
        {"op": "remove", "path": "/metadata/annotations/example.org~1b"},
    ]
    patched = await cluster.admin.patch(where, operations, "json")
    assert patched["metadata"]["annotations"] == {"example.org/c": "3"}
    with pytest.raises(ApiStatus) as caught:
        await cluster.admin.patch(where, operations, "json")
    assert caught.value.code == 422
    image = {"spec": {"containers": [{"name": "notebook", "image": "standin/notebook:2"}]}}
    strategic = await cluster.admin.patch(where, image, "strategic")
    (container,) = strategic["spec"]["containers"]
    assert (container["image"], container["command"]) == ("standin/notebook:2", ["sleep", "300"])


async def test_status_is_written_through_its_subresource_only(cluster: Cluster) -> None:
    await cluster.create_pod("one")
    where = path("pods", cluster.namespace, "one")
    assert (await cluster.admin.patch(where, {"status": {"phase": "Running"}}))["status"]["phase"] == "Pending"
    changed = await cluster.admin.patch(where + "/status", {"status": {"message": "hello"}, "spec": {"priority": 7}})
    assert changed["status"]["message"] == "hello"
    assert changed["spec"]["priority"] == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nodeSelector": {"a": "b"}}, "pod updates may not change fields"),
        ({"containers": [{"name": "notebook", "env": [{"name": "A", "value": "1"}]}]}, "pod updates may not change"),
    ],
)
async def test_a_pods_spec_is_fixed(cluster: Cluster, change: dict[str, Any], said: str) -> None:
    await cluster.create_pod("one")
    with pytest.raises(ApiStatus, match=said) as caught:
        await cluster.admin.patch(path("pods", cluster.namespace, "one"), {"spec": change}, "strategic")
    assert caught.value.code == 422


@pytest.mark.parametrize(
    ("code", "manifest"),
    [
        (422, a_pod("Upper")),
        (422, a_pod("one", labels={"a": "not a label!"})),
        (422, a_pod("one", annotations={"bad key/": "x"})),
        (422, a_pod("one", limits={"example.org/gpu": "0.5"})),
        (422, a_pod("one", annotations={"a": "x" * 300_000})),
        (400, a_pod("one", annotations={"a": 1})),  # type: ignore[dict-item]
        (400, a_pod("one", limits={"memory": "lots"})),
    ],
)
async def test_wrong_pods_are_refused(cluster: Cluster, code: int, manifest: dict[str, Any]) -> None:
    with pytest.raises(ApiStatus) as caught:
        await cluster.admin.create(path("pods", cluster.namespace), manifest)
    assert caught.value.code == code


async def test_nothing_is_made_in_a_namespace_that_is_not_there(api: CoreV1Api) -> None:
    error = await refused(api.create_namespaced_config_map("nowhere", config_map("one")))
    assert error.status == 404
    assert 'namespaces \\"nowhere\\" not found' in str(error.body)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (0.5, "500m"),
        ("1000", "1k"),
        (100, "100"),
        ("1.5Gi", "1536Mi"),
        (2**30, "1073741824"),
        ("1024Mi", "1Gi"),
        (0, "0"),
    ],
)
async def test_quantities_are_kept_in_their_canonical_form(cluster: Cluster, given: Any, kept: str) -> None:
    manifest = a_pod("one")
    manifest["spec"]["containers"][0]["resources"] = {"limits": {"memory": given}}
    pod = await cluster.admin.create(path("pods", cluster.namespace), manifest)
    assert pod["spec"]["containers"][0]["resources"] == {"limits": {"memory": kept}, "requests": {"memory": kept}}


# deletion


async def test_a_pod_without_a_node_goes_at_once(cluster: Cluster, api: CoreV1Api) -> None:
    await cluster.create_pod("one")
    pod = await api.delete_namespaced_pod("one", cluster.namespace)
    assert pod.metadata.name == "one"
    assert await cluster.pod("one") is None


async def test_a_pod_on_a_node_stays_until_its_kubelet_lets_go(cluster: Cluster, api: CoreV1Api) -> None:
    # a node that exists, with nobody behind it
    await cluster.admin.create(path("nodes"), {"metadata": {"name": f"{cluster.namespace}-empty"}})
    await cluster.create_pod("one", nodeName=f"{cluster.namespace}-empty")
    await api.delete_namespaced_pod("one", cluster.namespace, grace_period_seconds=60)
    pod = await cluster.pod("one")
    assert pod is not None
    assert pod["metadata"]["deletionTimestamp"]
    assert pod["metadata"]["deletionGracePeriodSeconds"] == 60
    wrong: Any = {"preconditions": {"uid": "another"}, "gracePeriodSeconds": 0}
    error = await refused(api.delete_namespaced_pod("one", cluster.namespace, body=wrong))
    assert (error.status, "the UID in the precondition (another) does not match" in str(error.body)) == (409, True)
    await api.delete_namespaced_pod("one", cluster.namespace, grace_period_seconds=0)
    assert await cluster.pod("one") is None
    await cluster.admin.delete(path("nodes", name=f"{cluster.namespace}-empty"))


async def test_an_object_with_a_finalizer_waits_for_it(cluster: Cluster, api: CoreV1Api) -> None:
    item = config_map("one")
    item["metadata"]["finalizers"] = ["example.org/wait"]
    await api.create_namespaced_config_map(cluster.namespace, item)
    await api.delete_namespaced_config_map("one", cluster.namespace)
    assert (await api.read_namespaced_config_map("one", cluster.namespace)).metadata.deletion_timestamp
    await api.patch_namespaced_config_map("one", cluster.namespace, {"metadata": {"finalizers": None}})
    assert (await refused(api.read_namespaced_config_map("one", cluster.namespace))).status == 404


async def test_what_is_selected_is_deleted_together(cluster: Cluster, api: CoreV1Api) -> None:
    for name, color in (("a", "red"), ("b", "red"), ("c", "blue")):
        await api.create_namespaced_config_map(cluster.namespace, config_map(name, {"color": color}))
    await api.delete_collection_namespaced_config_map(cluster.namespace, label_selector="color=red")
    left = await cluster.config_maps("color")
    assert [one["metadata"]["name"] for one in left] == ["c"]


# lists and watches


async def test_a_long_list_comes_in_parts_of_one_version(cluster: Cluster, api: CoreV1Api) -> None:
    for number in range(7):
        await api.create_namespaced_config_map(cluster.namespace, config_map(f"part-{number}", {"part": ""}))
    names, versions = [], set()
    following: dict[str, Any] = {}
    while True:
        found = await api.list_namespaced_config_map(cluster.namespace, limit=3, label_selector="part", **following)
        names += [one.metadata.name for one in found.items]
        versions.add(found.metadata.resource_version)
        if not found.metadata._continue:
            break
        following = {"_continue": found.metadata._continue}
        if len(names) == 3:
            await api.delete_namespaced_config_map("part-6", cluster.namespace)
    assert names == [f"part-{number}" for number in range(7)]
    assert len(versions) == 1


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("color=red", "ad"),
        ("color==red,size=big", "d"),
        ("color!=red", "bc"),
        ("color in (red, blue)", "abd"),
        ("color notin (red)", "bc"),
        ("size", "d"),
        ("!size", "abc"),
        ("color,color notin (blue),!size", "a"),
    ],
)
async def test_label_selectors(cluster: Cluster, selector: str, names: str) -> None:
    for name, labels in (
        ("a", {"color": "red"}), ("b", {"color": "blue"}), ("c", {}), ("d", {"color": "red", "size": "big"}),
    ):  # fmt: skip
        item = config_map(name, labels)
        await cluster.admin.create(path("configmaps", cluster.namespace), item)
    found = await cluster.config_maps(selector)
    own = [one["metadata"]["name"] for one in found if len(one["metadata"]["name"]) == 1]
    assert "".join(own) == names


async def test_field_selectors(cluster: Cluster, api: CoreV1Api) -> None:
    await cluster.create_pod("one")
    await cluster.create_pod("two")
    pods = await api.list_namespaced_pod(cluster.namespace, field_selector="metadata.name=two,status.phase=Pending")
    assert [pod.metadata.name for pod in pods.items] == ["two"]
    error = await refused(api.list_namespaced_pod(cluster.namespace, field_selector="spec.color=red"))
    assert error.status == 400


async def test_a_watch_goes_on_where_a_list_ended(cluster: Cluster, api: CoreV1Api) -> None:
    version = await version_now(cluster)
    await api.create_namespaced_config_map(cluster.namespace, config_map("one"))
    await api.patch_namespaced_config_map("one", cluster.namespace, {"data": {"a": "b"}})
    await api.delete_namespaced_config_map("one", cluster.namespace)
    assert await watched(cluster, version, 3) == [("ADDED", "one"), ("MODIFIED", "one"), ("DELETED", "one")]


async def test_a_watch_with_a_selector_sees_objects_come_and_go(cluster: Cluster, api: CoreV1Api) -> None:
    version = await version_now(cluster)
    await api.create_namespaced_config_map(cluster.namespace, config_map("one", {"color": "blue"}))
    for color in ("red", "blue", "red"):
        await api.patch_namespaced_config_map("one", cluster.namespace, {"metadata": {"labels": {"color": color}}})
    await api.delete_namespaced_config_map("one", cluster.namespace)
    events = await watched(cluster, version, 4, labels="color=red")
    assert [what for what, _ in events] == ["ADDED", "DELETED", "ADDED", "DELETED"]


async def test_the_python_client_watches(cluster: Cluster, api: CoreV1Api) -> None:
    async def see() -> list[str]:
        seen = []
        async with Watch().stream(api.list_namespaced_pod, cluster.namespace, timeout_seconds=2) as stream:
            async for event in stream:
                seen.append(f"{event['type']} {event['object'].metadata.name}")
        return seen

    await cluster.create_pod("old")
    task = asyncio.create_task(see())
    await asyncio.sleep(0.3)
    await cluster.create_pod("new")
    assert [line for line in await task if line.startswith("ADDED")] == ["ADDED old", "ADDED new"]


async def test_a_watch_from_a_forgotten_version_is_told_so(cluster: Cluster) -> None:
    server = cluster.standin("a real API server forgets after minutes")
    version = await version_now(cluster)
    await cluster.admin.create(path("configmaps", cluster.namespace), config_map("one"))
    server.compact()
    with pytest.raises(ApiStatus, match=f"too old resource version: {version} ") as caught:
        await watched(cluster, version, 1)
    assert (caught.value.code, caught.value.reason) == (410, "Expired")


async def test_a_watch_can_be_told_that_its_version_is_too_old(cluster: Cluster) -> None:
    version = await version_now(cluster)
    await cluster.admin.create(path("configmaps", cluster.namespace), config_map("one"))
    cluster.faults.fail_next("watch", "configmaps", "410")
    with pytest.raises(ApiStatus, match="too old resource version") as caught:
        await watched(cluster, version, 1)
    assert (caught.value.code, caught.value.reason) == (410, "Expired")
    assert await watched(cluster, version, 1) == [("ADDED", "one")]


async def test_bookmarks(cluster: Cluster) -> None:
    if cluster.server is not None:
        cluster.server.set_bookmark_interval(0.05)
    version = await version_now(cluster)
    await cluster.admin.create(path("configmaps", cluster.namespace), config_map("one"))
    watch = cluster.admin.watch(path("configmaps", cluster.namespace), version, labels="color", timeout=1)
    events = [event async for event in watch]
    # a real API server promises no time for them
    assert events or cluster.server is None
    for event in events:
        assert event["type"] == "BOOKMARK"
        assert int(event["object"]["metadata"]["resourceVersion"]) > int(version)


# who may do what


async def test_a_token_may_do_what_its_roles_say(cluster: Cluster) -> None:
    rules = [
        {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list", "watch"]},
        {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["mine"], "verbs": ["patch"]},
        {"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]},
    ]
    token = await cluster.service_account("reader", rules)
    for name in ("mine", "other"):
        await cluster.admin.create(path("configmaps", cluster.namespace), config_map(name))
    await cluster.create_pod("one")
    async with KubeClient(cluster.credentials(token)) as reader:
        await reader.list(path("configmaps", cluster.namespace))
        await reader.patch(path("configmaps", cluster.namespace, "mine"), {"data": {"a": "b"}})
        await reader.patch(path("pods", cluster.namespace, "one", "status"), {"status": {"message": "hi"}})
        for method, where in (
            ("GET", path("configmaps", cluster.namespace, "mine")),
            ("PATCH", path("configmaps", cluster.namespace, "other")),
            ("PATCH", path("pods", cluster.namespace, "one")),
            ("GET", path("configmaps")),
            ("GET", path("configmaps", "default")),
            ("GET", path("nodes")),
        ):
            with pytest.raises(ApiStatus) as caught:
                await reader.call(method, where, {}, content="application/merge-patch+json")
            assert caught.value.code == 403, where
            assert f"system:serviceaccount:{cluster.namespace}:reader" in caught.value.message


async def test_a_wrong_token_is_nobody(cluster: Cluster) -> None:
    async with KubeClient(cluster.credentials("wrong")) as nobody:
        with pytest.raises(ApiStatus) as caught:
            await nobody.list(path("pods", cluster.namespace))
    assert caught.value.code == 401


# what goes wrong on demand


async def test_calls_fail_as_told(cluster: Cluster, api: CoreV1Api) -> None:
    cluster.faults.fail_next("create", "configmaps", "500")
    cluster.faults.fail_next("create", "configmaps", "429")
    cluster.faults.fail_next("create", "configmaps", "reset")
    cluster.faults.fail_next("create", "configmaps", "lost")
    assert (await refused(api.create_namespaced_config_map(cluster.namespace, config_map("one")))).status == 500
    error = await refused(api.create_namespaced_config_map(cluster.namespace, config_map("one")))
    assert (error.status, present(error.headers)["Retry-After"]) == (429, "1")
    with pytest.raises(ClientConnectionError):
        await api.create_namespaced_config_map(cluster.namespace, config_map("one"))
    assert (await refused(api.read_namespaced_config_map("one", cluster.namespace))).status == 404
    with pytest.raises(ClientConnectionError):
        await api.create_namespaced_config_map(cluster.namespace, config_map("one"))
    assert (await api.read_namespaced_config_map("one", cluster.namespace)).metadata.name == "one"


async def test_a_part_of_the_calls_fails(cluster: Cluster) -> None:
    cluster.faults.kinds = ("500",)
    cluster.faults.applies_to = lambda ask: (ask.verb, ask.resource) == ("list", "secrets")
    cluster.faults.rate = 0.3
    failed = 0
    for _ in range(100):
        try:
            await cluster.admin.list(path("secrets", cluster.namespace))
        except ApiStatus:
            failed += 1
    assert failed == cluster.faults.failed
    assert 15 <= failed <= 45


async def test_watches_can_be_cut(cluster: Cluster) -> None:
    ended = asyncio.create_task(watched(cluster, await version_now(cluster), 1))
    await asyncio.sleep(0.2)
    cluster.faults.cut_watches()
    assert await ended == []


async def test_lists_can_be_behind(cluster: Cluster) -> None:
    before = await version_now(cluster)
    secret = {"metadata": {"name": "late", "labels": {"mine": ""}}, "data": {"a": base64.b64encode(b"1").decode()}}
    await cluster.admin.create(path("secrets", cluster.namespace), secret)
    cluster.faults.stale_at = int(before)
    where = path("secrets", cluster.namespace)
    stale = await cluster.admin.call("GET", where, query={"resourceVersion": "0", "labelSelector": "mine"})
    assert not stale["items"]
    fresh = await cluster.admin.list(where, labels="mine")
    assert [one["metadata"]["name"] for one in fresh] == ["late"]
    # whoever watches on from there misses nothing
    events = await watched(cluster, stale["metadata"]["resourceVersion"], 1, plural="secrets", labels="mine")
    assert events == [("ADDED", "late")]
