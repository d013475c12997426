"""The stand-in's pods/resize does what was measured on Kubernetes 1.36.2."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from kubernetes_asyncio.client import ApiException, CoreV1Api

from .standin.client import ApiStatus, path
from .standin.cluster import Cluster, a_pod

SHARE = "gpushare-spawner.io/gpu-0"


@pytest.fixture
async def api(cluster: Cluster) -> AsyncIterator[CoreV1Api]:
    """As the admin, of an API server that has pods/resize."""
    await cluster.require_resize()
    async with cluster.api_client() as client:
        yield CoreV1Api(client)


async def make(cluster: Cluster, requests: dict[str, str] | None, limits: dict[str, str] | None = None) -> None:
    manifest = a_pod("ada", limits={**(limits or {}), SHARE: 25}, nodeSelector={"nowhere": "yes"})
    if requests is not None:
        manifest["spec"]["containers"][0]["resources"]["requests"] = requests
    await cluster.admin.create(path("pods", cluster.namespace), manifest)


async def resize(api: CoreV1Api, cluster: Cluster, resources: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    """The container's resources afterwards."""
    body = {"metadata": metadata, "spec": {"containers": [{"name": "notebook", "resources": resources}]}}
    await api.patch_namespaced_pod_resize(  # type: ignore[call-arg]
        "ada", cluster.namespace, body, _content_type="application/strategic-merge-patch+json"
    )
    pod = await cluster.admin.get(path("pods", cluster.namespace, "ada"))
    assert "more" not in (pod["metadata"].get("annotations") or {})
    found: dict[str, Any] = pod["spec"]["containers"][0]["resources"]
    return found


async def refused(call: Any) -> str:
    with pytest.raises(ApiException) as caught:
        await call
    assert caught.value.status == 422
    return str(caught.value.body)


async def test_requests_change_limits_stay_and_metadata_is_dropped(cluster: Cluster, api: CoreV1Api) -> None:
    await make(cluster, {"cpu": "1", "memory": "1Gi"}, {"cpu": "2", "memory": "2Gi"})
    less = {"requests": {"cpu": "100m", "memory": "64Mi"}}
    found = await resize(api, cluster, less, annotations={"more": "yes"})
    assert found["requests"] == {"cpu": "100m", "memory": "64Mi", SHARE: "25"}
    assert found["limits"] == {"cpu": "2", "memory": "2Gi", SHARE: "25"}


async def test_a_request_that_is_removed_becomes_the_limit(cluster: Cluster, api: CoreV1Api) -> None:
    await make(cluster, {"cpu": "1", "memory": "1Gi"}, {"cpu": "2", "memory": "2Gi"})
    found = await resize(api, cluster, {"requests": {"cpu": None, "memory": "64Mi"}})
    assert found["requests"]["cpu"] == "2"


async def test_the_qos_class_may_not_change(cluster: Cluster, api: CoreV1Api) -> None:
    await make(cluster, None, {"cpu": "1", "memory": "1Gi"})
    said = await refused(resize(api, cluster, {"requests": {"cpu": "100m", "memory": "64Mi"}}))
    assert "Pod QOS Class may not change as a result of resizing" in said


async def test_a_pod_without_requests_cannot_get_one(cluster: Cluster, api: CoreV1Api) -> None:
    await make(cluster, None)
    said = await refused(resize(api, cluster, {"requests": {"cpu": "100m", "memory": "64Mi"}}))
    assert "Pod QOS Class may not change as a result of resizing" in said


async def test_extended_resources_and_other_fields_stay(cluster: Cluster, api: CoreV1Api) -> None:
    await make(cluster, {"cpu": "1", "memory": "1Gi"})
    assert "only cpu and memory resources are mutable" in await refused(
        resize(api, cluster, {"requests": {SHARE: "10"}, "limits": {SHARE: "10"}})
    )
    body = {"spec": {"containers": [{"name": "notebook", "workingDir": "/"}]}}
    patch = api.patch_namespaced_pod_resize(  # type: ignore[call-arg]
        "ada", cluster.namespace, body, _content_type="application/strategic-merge-patch+json"
    )
    assert "only cpu and memory resources are mutable" in await refused(patch)


async def test_an_ordinary_patch_changes_no_resources(cluster: Cluster, api: CoreV1Api) -> None:
    await make(cluster, {"cpu": "1", "memory": "1Gi"})
    body = {"spec": {"containers": [{"name": "notebook", "resources": {"requests": {"cpu": "100m"}}}]}}
    patch = api.patch_namespaced_pod(  # type: ignore[call-arg]
        "ada", cluster.namespace, body, _content_type="application/strategic-merge-patch+json"
    )
    assert "pod updates may not change fields other than" in await refused(patch)


# quotas and ranges of the namespace


async def forbidden(call: Any) -> str:
    with pytest.raises(ApiException) as caught:
        await call
    assert caught.value.status == 403
    return str(caught.value.body)


async def test_a_resize_must_be_within_the_quota_and_gives_back_to_it(cluster: Cluster, api: CoreV1Api) -> None:
    cluster.standin("a real quota is in force only once a controller has seen it")
    quota = {"metadata": {"name": "team"}, "spec": {"hard": {"requests.cpu": "1500m"}}}
    await cluster.admin.create(path("resourcequotas", cluster.namespace), quota)
    await make(cluster, {"cpu": "1", "memory": "1Gi"})
    bob = a_pod("bob", nodeSelector={"nowhere": "yes"})
    bob["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "900m"}}
    where = path("pods", cluster.namespace)
    with pytest.raises(ApiStatus, match=r"exceeded quota: team, requested: requests\.cpu=900m, used: requests\.cpu=1"):
        await cluster.admin.create(where, bob)
    await resize(api, cluster, {"requests": {"cpu": "100m", "memory": "1Gi"}})
    await cluster.admin.create(where, bob)
    said = await forbidden(resize(api, cluster, {"requests": {"cpu": "1", "memory": "1Gi"}}))
    assert "exceeded quota: team" in said


async def test_a_resize_must_be_within_the_limit_range(cluster: Cluster, api: CoreV1Api) -> None:
    limits = [{"type": "Container", "min": {"cpu": "200m"}, "defaultRequest": {"memory": "64Mi"}}]
    await cluster.admin.create(
        path("limitranges", cluster.namespace), {"metadata": {"name": "small"}, "spec": {"limits": limits}}
    )
    await make(cluster, {"cpu": "1"})
    pod = await cluster.admin.get(path("pods", cluster.namespace, "ada"))
    assert pod["spec"]["containers"][0]["resources"]["requests"]["memory"] == "64Mi"
    said = await forbidden(resize(api, cluster, {"requests": {"cpu": "100m", "memory": "64Mi"}}))
    assert "minimum cpu usage per Container is 200m, but request is 100m" in said


async def test_an_older_server_has_no_such_subresource(cluster: Cluster, api: CoreV1Api) -> None:
    cluster.standin("a real API server has what it has").in_place_resize = False
    await make(cluster, {"cpu": "1", "memory": "1Gi"})
    with pytest.raises(ApiException, match="the server could not find the requested resource"):
        await resize(api, cluster, {"requests": {"cpu": "100m", "memory": "1Gi"}})
