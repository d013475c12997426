"""Objects that a layer needs in the server's namespace, where users can make objects too."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest

from gpushare_spawner.clients.api import ApiFailure
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.layers_file import DraOptions
from gpushare_spawner.sharing import dra
from gpushare_spawner.sharing.base import ClusterDevice, ClusterFacts, ClusterNode, ClusterSlice, LayerRequest
from gpushare_spawner.spawner.hub import SpawnRefused
from gpushare_spawner.spawner.kubernetes.owned_objects import PodObjects
from gpushare_spawner.spawner.queue.snapshot import LayerOffer
from tests.sharing.requests import GIB, request

SHARED = ClusterDevice(
    "gpu-0", {"type": "gpu", "uuid": "GPU-0", "productName": "A100"}, {"memory": 80 * GIB, "shares": 100}, shared=True
)


def asked(gpu: dict[str, Any]) -> LayerRequest:
    facts = ClusterFacts((ClusterNode("a"),), slices=(ClusterSlice("gpu.nvidia.com", "a", "a", (SHARED,)),))
    return request(gpu, DraOptions(consumable=True), facts)


class Api:
    """The API server's claim templates. ``deleted``: how often somebody deletes one before it is read."""

    def __init__(self, found: dict[str, Any] | None = None, deleted: int = 0) -> None:
        self.found = found or {}
        self.deleted = deleted
        self.created = 0

    async def create(self, path: str, item: Any) -> None:
        assert path == "/apis/resource.k8s.io/v1/namespaces/ada/resourceclaimtemplates"
        self.created += 1
        if item["metadata"]["name"] in self.found:
            raise ApiFailure(409, "exists")
        self.found[item["metadata"]["name"]] = item

    async def get(self, path: str) -> Any:
        name = path.rpartition("/")[2]
        if self.deleted:
            self.deleted -= 1
            del self.found[name]
            raise ApiFailure(404, "404")
        return self.found[name]


def as_the_server_shows_it(template: dict[str, Any]) -> dict[str, Any]:
    """With the defaults of the API server, and amounts as it writes them."""
    shown = copy.deepcopy(template)
    (one,) = shown["spec"]["spec"]["devices"]["requests"]
    one["exactly"] = {"allocationMode": "ExactCount", "count": 1, **one["exactly"]}
    amounts = one["exactly"].get("capacity", {}).get("requests", {})
    amounts.update({"memory": "40Gi"} if "memory" in amounts else {})
    return shown


async def created(api: Api, request: LayerRequest) -> None:
    objects = PodObjects(api, None, logging.getLogger("test"))  # type: ignore[arg-type]
    await objects.make_for_layer("ada", LayerOffer(LayerName.DRA, request))


async def test_an_object_that_is_there_is_used_if_it_says_the_same() -> None:
    half = asked({"fraction": 0.5, "models": ["*A100*"]})
    api = Api()
    await created(api, half)
    (name,) = api.found
    assert api.found[name]["spec"]["spec"]["devices"]["requests"][0]["exactly"]["capacity"]["requests"] == {
        "shares": "50", "memory": "40960Mi",
    }  # fmt: skip
    api.found[name] = as_the_server_shows_it(api.found[name])
    await created(api, half)
    assert api.created == 2


@pytest.mark.parametrize(
    "forged",
    [
        {"count": 8},
        {"allocationMode": "All"},
        {"adminAccess": True},
        {"selectors": []},
        {"deviceClassName": "mig.nvidia.com"},
        {"capacity": {"requests": {"shares": "50", "memory": "80Gi"}}},
        {"capacity": {"requests": {"shares": "50", "memory": "40Gi", "cores": "9"}}},
        {"tolerations": [{"operator": "Exists"}]},
    ],
    ids=str,
)
async def test_an_object_that_asks_for_something_else_is_refused(forged: dict[str, Any]) -> None:
    half = asked({"fraction": 0.5, "models": ["*A100*"]})
    (template,) = dra.objects(half)
    theirs = as_the_server_shows_it(template)
    theirs["spec"]["spec"]["devices"]["requests"][0]["exactly"].update(forged)
    with pytest.raises(SpawnRefused) as refused:
        await created(Api({template["metadata"]["name"]: theirs}), half)
    assert refused.value.refusal == "other-object"
    assert "in namespace ada does not match the template" in refused.value.jupyterhub_message


async def test_a_second_request_in_the_object_is_refused() -> None:
    half = asked({"fraction": 0.5})
    (template,) = dra.objects(half)
    theirs = as_the_server_shows_it(template)
    theirs["spec"]["spec"]["devices"]["requests"] *= 2
    with pytest.raises(SpawnRefused):
        await created(Api({template["metadata"]["name"]: theirs}), half)


async def test_an_object_that_is_deleted_before_it_is_read_is_made_again_a_few_times() -> None:
    half = asked({"fraction": 0.5})
    (template,) = dra.objects(half)
    name = template["metadata"]["name"]
    api = Api({name: template}, 1)
    await created(api, half)
    assert (api.created, api.found) == (2, {name: template})

    class Deleting(Api):
        async def create(self, *arguments: Any) -> None:
            self.found[name] = template
            await super().create(*arguments)

    with pytest.raises(ApiFailure, match="404"):
        await created(Deleting(deleted=9), half)
