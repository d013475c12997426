"""What a sharing layer sees of a manifest, and the way back."""

from __future__ import annotations

from typing import Any

from kubernetes_asyncio.client import ApiClient
from kubernetes_asyncio.client.models import (
    V1Container,
    V1EnvVar,
    V1HostPathVolumeSource,
    V1ObjectMeta,
    V1Pod,
    V1PodSpec,
    V1ResourceRequirements,
    V1Toleration,
    V1Volume,
    V1VolumeMount,
)

from gpushare_spawner.spawner.kubernetes.pod import fragment, put_back


def manifest() -> V1Pod:
    notebook = V1Container(
        name="notebook",
        env=[V1EnvVar(name="MINE", value="1")],
        resources=V1ResourceRequirements(limits={"cpu": "2"}, requests={"cpu": "1"}),
        volume_mounts=[V1VolumeMount(name="home", mount_path="/home")],
    )
    return V1Pod(
        metadata=V1ObjectMeta(annotations={"theirs": "kept"}, labels={}),
        spec=V1PodSpec(
            containers=[V1Container(name="sidecar"), notebook],
            node_selector={"zone": "a"},
            scheduler_name="user-scheduler",
            volumes=[V1Volume(name="home", host_path=V1HostPathVolumeSource(path="/h"))],
            tolerations=[V1Toleration(key="x")],
        ),
    )


def sent(pod: V1Pod) -> Any:
    """What the API server gets."""
    return ApiClient.sanitize_for_serialization(object.__new__(ApiClient), pod)


def test_a_fragment_that_nobody_changes_leaves_the_manifest_as_it_is() -> None:
    pod = manifest()
    assert sent(put_back(pod, fragment(pod), fragment(pod))) == sent(manifest())


def test_what_a_layer_sees_is_plain_data() -> None:
    seen = fragment(manifest())
    assert seen["spec"]["schedulerName"] == "user-scheduler"
    assert seen["spec"]["nodeSelector"] == {"zone": "a"}
    assert seen["spec"]["volumes"] == [{"name": "home", "hostPath": {"path": "/h"}}]
    (notebook,) = seen["spec"]["containers"]
    assert notebook["resources"] == {"limits": {"cpu": "2"}, "requests": {"cpu": "1"}}
    assert notebook["volumeMounts"] == [{"name": "home", "mountPath": "/home"}]
    assert notebook["env"] == [{"name": "MINE", "value": "1"}]


def test_what_a_layer_adds_and_replaces_reaches_the_api_server() -> None:
    pod = manifest()
    changed = fragment(pod)
    spec = changed["spec"]
    spec |= {"schedulerName": "kai-scheduler", "priorityClassName": "build", "nodeSelector": {"zone": "a", "gpu": "b"}}
    spec["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "quarter"}]
    spec["volumes"] = [*spec["volumes"], {"name": "lib", "hostPath": {"path": "/lib"}}]
    changed["metadata"]["labels"]["kai.scheduler/queue"] = "team"
    (notebook,) = spec["containers"]
    notebook["resources"] = {"limits": {"cpu": "2", "nvidia.com/gpu": "1"}, "requests": {"cpu": "1"}}
    notebook["resources"]["claims"] = [{"name": "gpu"}]
    notebook["env"] = [{"name": "MINE", "value": "2"}, {"name": "NEW", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]
    notebook["volumeMounts"].append({"name": "lib", "mountPath": "/lib", "readOnly": True})
    made = sent(put_back(pod, fragment(pod), changed))
    assert made["metadata"]["labels"] == {"kai.scheduler/queue": "team"}
    assert made["spec"]["schedulerName"] == "kai-scheduler"
    assert made["spec"]["priorityClassName"] == "build"
    assert made["spec"]["nodeSelector"] == {"zone": "a", "gpu": "b"}
    assert made["spec"]["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "quarter"}]
    assert [volume["name"] for volume in made["spec"]["volumes"]] == ["home", "lib"]
    assert made["spec"]["tolerations"] == [{"key": "x"}]
    sidecar, container = made["spec"]["containers"]
    assert sidecar == {"name": "sidecar"}
    assert container["resources"]["limits"] == {"cpu": "2", "nvidia.com/gpu": "1"}
    assert container["resources"]["claims"] == [{"name": "gpu"}]
    assert container["env"] == [
        {"name": "MINE", "value": "2"},
        {"name": "NEW", "valueFrom": {"fieldRef": {"fieldPath": "x"}}},
    ]
    assert container["volumeMounts"][1] == {"name": "lib", "mountPath": "/lib", "readOnly": True}
