"""What is taken out of a pod, and what the API server answers when that is made."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
from kubernetes_asyncio.client import ApiClient, V1Container, V1EnvVar, V1ObjectMeta, V1Pod, V1PodSpec
from kubernetes_asyncio.client.rest import ApiException

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


class Core:
    """An API server with one pod. ``faults`` are raised one by one."""

    def __init__(self, *faults: Exception | None) -> None:
        self.api_client = SimpleNamespace()
        self.faults = list(faults)
        self.secrets: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []

    async def read_namespaced_pod(self, name: str, namespace: str) -> Any:
        return SimpleNamespace(metadata=SimpleNamespace(uid="u1"))

    async def create_namespaced_secret(self, namespace: str, manifest: dict[str, Any]) -> None:
        self.asked.append("create")
        fault = self.faults.pop(0) if self.faults else None
        if manifest["metadata"]["name"] in self.secrets:
            raise ApiException(status=409)
        if not isinstance(fault, ApiException):
            self.secrets[manifest["metadata"]["name"]] = manifest
        if fault is not None:
            raise fault

    async def read_namespaced_secret(self, name: str, namespace: str) -> Any:
        owners = [SimpleNamespace(uid=one["uid"]) for one in self.secrets[name]["metadata"]["ownerReferences"]]
        return SimpleNamespace(metadata=SimpleNamespace(owner_references=owners))

    async def delete_namespaced_secret(self, name: str, namespace: str) -> None:
        self.asked.append("delete")
        del self.secrets[name]


def objects(core: Core) -> PodObjects:
    return PodObjects(core, None, LOG)  # type: ignore[arg-type]


def manifest(uid: str) -> dict[str, Any]:
    return {"kind": "Secret", "metadata": {"name": "s", "ownerReferences": [OWNER | {"uid": uid}]}, "stringData": {}}


@pytest.mark.parametrize(
    ("faults", "asked"),
    [
        ([], ["create"]),
        ([ApiException(status=503)], ["create", "create"]),
        ([ApiException(status=429), ApiException(status=500)], ["create", "create", "create"]),
        ([TimeoutError()], ["create", "create"]),
    ],
    ids=["at-once", "unavailable", "busy", "answer-lost"],
)
async def test_a_secret_is_made_however_the_api_fails_for_a_moment(
    faults: list[Exception], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owned_objects, "PAUSES", (0.0, 0.0))
    core = Core(*faults)
    await objects(core).make("jupyter-ada", "jhub", manifest, None)
    assert core.asked == asked
    assert core.secrets["s"]["metadata"]["ownerReferences"][0]["uid"] == "u1"


async def test_a_secret_of_an_earlier_pod_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned_objects, "PAUSES", (0.0, 0.0))
    core = Core()
    core.secrets["s"] = manifest("older")
    await objects(core).make("jupyter-ada", "jhub", manifest)
    assert core.asked == ["create", "delete", "create"]
    assert core.secrets["s"] == manifest("u1")


async def test_what_will_not_pass_is_raised() -> None:
    with pytest.raises(ApiException):
        await objects(Core(ApiException(status=403))).make("jupyter-ada", "jhub", manifest)


async def test_the_right_to_make_secrets_is_asked_for_once_and_a_refusal_again_after_minutes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [False, False, True]

    class Reviews:
        def __init__(self, client: object) -> None:
            pass

        async def create_self_subject_access_review(self, review: Any) -> Any:
            asked = review.spec.resource_attributes
            assert (asked.namespace, asked.verb, asked.resource) == ("jhub", "create", "secrets")
            return SimpleNamespace(status=SimpleNamespace(allowed=answers.pop(0)))

    monkeypatch.setattr(owned_objects, "AuthorizationV1Api", Reviews)
    now = [1000.0]
    monkeypatch.setattr("gpushare_spawner.spawner.kubernetes.owned_objects.time.monotonic", lambda: now[0])
    rights = objects(Core())
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

    class Objects(PodObjects):
        def __init__(self) -> None:
            """Without an API."""

        async def _owners(self, namespace: str, kind: str, name: str) -> list[str]:
            asked.append(f"{kind} {namespace}/{name}")
            if status != 200:
                raise ApiException(status=status)
            return ["u1"]

    spec: dict[str, Any] = {"containers": [{"env": [{"name": "A", "value": "b"}]}]}
    if kind == "Secret":
        references = [{"secretKeyRef": {"name": name, "key": "A"}} for name in ("other", "jupyter-ada-01234567")]
        spec["containers"][0]["env"] += [{"name": "B", "valueFrom": reference} for reference in references]
    else:
        spec["resourceClaims"] = [{"name": "gpu", "resourceClaimName": "jupyter-ada-01234567"}]
    left = {"metadata": {"name": "jupyter-ada", "namespace": "jhub"}, "spec": spec}
    assert await Objects().missing(left) is missing
    assert asked == [f"{kind} jhub/jupyter-ada-01234567"]
