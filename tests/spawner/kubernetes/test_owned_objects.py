"""What is taken out of a pod, and what the API server answers when that is made."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import ANY

import pytest
from kubernetes_asyncio.client import ApiClient, V1Container, V1EnvVar, V1ObjectMeta, V1Pod, V1PodSpec

from gpushare_spawner.clients.api import ApiFailure
from gpushare_spawner.model.kubernetes.annotations import LAYER
from gpushare_spawner.model.layers import LAYERS
from gpushare_spawner.spawner.kubernetes import owned_objects
from gpushare_spawner.spawner.kubernetes.owned_objects import PodObjects, token_secret

LOG = logging.getLogger("test")
TOKEN = "0123456789abcdef"
OWNER = {"apiVersion": "v1", "kind": "Pod", "name": "jupyter-ada", "uid": "u1"}


def pod(*containers: dict[str, str]) -> V1Pod:
    """A pod with these environments, as KubeSpawner makes one."""
    made = [
        V1Container(name=f"c{number}", env=[V1EnvVar(name=name, value=value) for name, value in values.items()])
        for number, values in enumerate(containers)
    ]
    return V1Pod(metadata=V1ObjectMeta(name="jupyter-ada"), spec=V1PodSpec(containers=made))


def test_every_variable_with_the_token_is_read_from_one_secret_and_no_other() -> None:
    made = pod({"A": "b", "JUPYTERHUB_API_TOKEN": TOKEN, "JPY_API_TOKEN": TOKEN, "URL": f"http://x?token={TOKEN}"})
    secret = token_secret(made, TOKEN)
    assert secret is not None
    manifest = secret("u1")
    assert manifest["metadata"]["ownerReferences"] == [OWNER]
    assert manifest["stringData"] == {
        "JUPYTERHUB_API_TOKEN": TOKEN, "JPY_API_TOKEN": TOKEN, "URL": f"http://x?token={TOKEN}",
    }  # fmt: skip
    assert TOKEN not in str(made)
    plain, *hidden = made.spec.containers[0].env
    assert plain.value == "b"
    assert plain.value_from is None
    for variable in hidden:
        reference = variable.value_from.secret_key_ref
        assert (reference.name, reference.key) == (manifest["metadata"]["name"], variable.name)
        assert not reference.optional, "a server without its token must not start"


def test_variables_and_containers_that_a_hook_adds_are_dicts() -> None:
    made: Any = pod({"JUPYTERHUB_API_TOKEN": TOKEN})
    mine, other = {"name": "MINE", "value": TOKEN}, {"name": "MINE", "value": f"not {TOKEN}"}
    made.spec.containers[0].env.append(dict(mine))
    made.spec.containers.append({"name": "side", "env": [dict(mine), {"name": "A", "value": "b"}]})
    made.spec.containers.append({"name": "other", "env": [other]})
    secret = token_secret(made, TOKEN)
    assert secret is not None
    assert secret("u1")["stringData"] == {"JUPYTERHUB_API_TOKEN": TOKEN, "MINE": TOKEN}
    written = ApiClient.__new__(ApiClient).sanitize_for_serialization(made.spec)["containers"]
    (_, first), (second, plain), (third,) = (container["env"] for container in written)
    assert first == second == {"name": "MINE", "valueFrom": {"secretKeyRef": {"key": "MINE", "name": ANY}}}
    assert plain == {"name": "A", "value": "b"}
    assert third == other, "one Secret has one value of a name"


def test_each_pod_has_a_secret_of_its_own_name() -> None:
    """The kubelet would start the next pod of a server with the token of the last one."""
    names = set()
    for _ in range(5):
        secret = token_secret(pod({"JUPYTERHUB_API_TOKEN": TOKEN}), TOKEN)
        assert secret is not None
        names.add(secret("u")["metadata"]["name"])
    assert len(names) == 5


@pytest.mark.parametrize("token", ["", TOKEN])
def test_a_pod_without_the_token_is_left_as_it_is(token: str) -> None:
    made = pod({"A": "b", "EMPTY": ""})
    assert token_secret(made, token) is None
    assert [one.value for one in made.spec.containers[0].env] == ["b", ""]
    assert not [one for one in made.spec.containers[0].env if one.value_from]


class Api:
    """An API server with one pod. ``faults`` are raised one by one; an answer without a status is lost."""

    def __init__(self, *faults: ApiFailure) -> None:
        self.faults = list(faults)
        self.objects: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []

    async def get(self, path: str) -> Any:
        if path == "/api/v1/namespaces/jhub/pods/jupyter-ada":
            return {"metadata": {"uid": "u1"}}
        return self.objects[path]

    async def create(self, path: str, manifest: dict[str, Any]) -> None:
        self.asked.append("create")
        fault = self.faults.pop(0) if self.faults else None
        path += f"/{manifest['metadata']['name']}"
        if path in self.objects:
            raise ApiFailure(409, "exists")
        if fault is None or not fault.status:
            self.objects[path] = manifest
        if fault is not None:
            raise fault

    async def delete(self, path: str) -> None:
        self.asked.append("delete")
        del self.objects[path]


SECRET = "/api/v1/namespaces/jhub/secrets/s"


def objects(api: Any) -> PodObjects:
    return PodObjects(api, None, LOG)  # type: ignore[arg-type]


def manifest(uid: str) -> dict[str, Any]:
    return {"kind": "Secret", "metadata": {"name": "s", "ownerReferences": [OWNER | {"uid": uid}]}, "stringData": {}}


@pytest.mark.parametrize(
    ("faults", "asked"),
    [
        ([], ["create"]),
        ([ApiFailure(503, "busy")], ["create", "create"]),
        ([ApiFailure(429, "busy"), ApiFailure(500, "busy")], ["create", "create", "create"]),
        ([ApiFailure(0, "lost")], ["create", "create"]),
    ],
    ids=["at-once", "unavailable", "busy", "answer-lost"],
)
async def test_a_secret_is_made_however_the_api_fails_for_a_moment(
    faults: list[ApiFailure], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owned_objects, "PAUSES", (0.0, 0.0))
    api = Api(*faults)
    await objects(api).make("jupyter-ada", "jhub", manifest, None)
    assert api.asked == asked
    assert api.objects[SECRET]["metadata"]["ownerReferences"][0]["uid"] == "u1"


async def test_a_secret_of_an_earlier_pod_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned_objects, "PAUSES", (0.0, 0.0))
    api = Api()
    api.objects[SECRET] = manifest("older")
    await objects(api).make("jupyter-ada", "jhub", manifest)
    assert api.asked == ["create", "delete", "create"]
    assert api.objects[SECRET] == manifest("u1")


async def test_what_will_not_pass_is_raised() -> None:
    with pytest.raises(ApiFailure):
        await objects(Api(ApiFailure(403, "forbidden"))).make("jupyter-ada", "jhub", manifest)


async def test_the_right_to_make_secrets_is_asked_for_once_and_a_refusal_again_after_minutes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [False, False, True]

    class Reviews:
        async def create(self, path: str, review: Any) -> Any:
            assert path == "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
            asked = review["spec"]["resourceAttributes"]
            assert (asked["namespace"], asked["verb"], asked["resource"]) == ("jhub", "create", "secrets")
            return {"status": {"allowed": answers.pop(0)}}

    now = [1000.0]
    monkeypatch.setattr("gpushare_spawner.spawner.kubernetes.owned_objects.time.monotonic", lambda: now[0])
    rights = objects(Reviews())
    assert [await rights.may_make_secrets("jhub") for _ in range(3)] == [False] * 3
    now[0] += owned_objects.ASK_AGAIN_SECONDS
    assert not await rights.may_make_secrets("jhub")
    now[0] += owned_objects.ASK_AGAIN_SECONDS
    assert [await rights.may_make_secrets("jhub") for _ in range(3)] == [True] * 3
    said = ["The hub may not create Secrets in the namespace jhub"]
    assert [one.message.partition(",")[0] for one in caplog.records] == said
    answers.append(False)  # the right was taken away: each spawn would fail
    now[0] += owned_objects.ASK_AGAIN_SECONDS
    assert not await rights.may_make_secrets("jhub")
    assert [one.message.partition(",")[0] for one in caplog.records] == said * 2


def test_a_pod_that_its_layer_replaces_keeps_its_token() -> None:
    for layer in LAYERS.values():
        made = pod({"JUPYTERHUB_API_TOKEN": TOKEN})
        made.metadata.labels = {LAYER: str(layer.name)}
        assert (token_secret(made, TOKEN) is None) is layer.replaces_pods
        assert (TOKEN in str(made)) is layer.replaces_pods


@pytest.mark.parametrize(("status", "missing"), [(200, False), (404, True), (403, False), (500, False)])
@pytest.mark.parametrize("kind", ["Secret", "ResourceClaim"])
async def test_a_pod_whose_secret_or_claim_was_never_made_is_known(kind: str, status: int, missing: bool) -> None:
    asked: list[str] = []

    class Reading:
        async def get(self, path: str) -> Any:
            asked.append(path)
            if status != 200:
                raise ApiFailure(status, "failed")

    spec: dict[str, Any] = {"containers": [{"env": [{"name": "A", "value": "b"}]}]}
    if kind == "Secret":
        references = [{"secretKeyRef": {"name": name, "key": "A"}} for name in ("other", "jupyter-ada-01234567")]
        spec["containers"][0]["env"] += [{"name": "B", "valueFrom": reference} for reference in references]
    else:
        spec["resourceClaims"] = [{"name": "gpu", "resourceClaimName": "jupyter-ada-01234567"}]
    left = {"metadata": {"name": "jupyter-ada", "namespace": "jhub"}, "spec": spec}
    assert await objects(Reading()).missing(left) is missing
    where = "/api/v1" if kind == "Secret" else "/apis/resource.k8s.io/v1"
    assert asked == [f"{where}/namespaces/jhub/{kind.lower()}s/jupyter-ada-01234567"]
