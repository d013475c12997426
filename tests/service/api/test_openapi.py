"""The OpenAPI document: valid, complete, and served; and what the router answers to wrong requests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from gpushare_spawner.service.api.api import OPERATIONS
from tests.service.api.clients import ADMIN, DOCUMENT, Client


def test_the_document_is_valid_openapi() -> None:
    assert [error.message for error in OpenAPIV31SpecValidator(DOCUMENT).iter_errors()] == []


def test_every_operation_is_named_once_and_has_texts() -> None:
    names = [one.name for one in OPERATIONS]
    assert len(set(names)) == len(names)
    for one in OPERATIONS:
        assert one.summary, one.name
        assert one.description.endswith((".", ":")) or one.description.rstrip().endswith("."), one.name


def fields(schema: Any) -> Any:
    """Every schema within a schema."""
    if isinstance(schema, dict):
        yield schema
        for value in schema.values():
            yield from fields(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from fields(value)


def test_examples_are_of_their_schemas() -> None:
    for one in fields(DOCUMENT["paths"]):
        if "example" in one:
            Draft202012Validator({**one["schema"], "components": DOCUMENT["components"]}).validate(one["example"])


async def test_the_document_is_served(api: Client) -> None:
    assert await api.get("openapi.json") == json.loads(json.dumps(DOCUMENT))


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "nothing", 404, "GET openapi.json lists all addresses"),
        ("GET", "sessions/ann/nothing", 404, "no such address"),
        ("POST", "sessions", 405, "This address does not support POST: use GET."),
        ("GET", "sessions?limit=0", 400, "limit: input should be greater than or equal to 1"),
        ("GET", "sessions?limit=x", 400, "limit: input should be a valid integer"),
        ("GET", "sessions?offset=-1", 400, "offset: "),
        ("GET", "sessions?sort=colour", 400, "sort: input should be 'user', 'node'"),
        ("GET", "sessions?tier=asleep", 400, "tier: "),
        ("GET", "sessions?colour=red", 400, "colour: extra inputs are not permitted"),
        ("GET", "sessions/50%25", 404, "You have no session '50%'."),
        ("GET", "nodes/moon", 404, "There is no node 'moon' with an agent that answers."),
        ("GET", "history?by=colour", 400, "by: 'colour' is not a valid key"),
    ],
)
async def test_a_wrong_request_says_what_is_wrong(api: Client, method: str, path: str, status: int, said: str) -> None:
    got = await api.ask(method, path, ADMIN)
    assert got.status == status
    assert said in got.message
    assert got.body["status"] == status


async def test_a_failure_of_ours_says_nothing_of_its_inside(api: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpushare_spawner.service.api.snapshots import ServiceSnapshots

    async def fails(self: ServiceSnapshots) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(ServiceSnapshots, "current", fails)
    answer = await api.raw("GET", "summary")
    assert answer.code == 500
    assert json.loads(answer.body) == {
        "status": 500,
        "code": "internal",
        "message": "The service failed. Its log says why.",
    }
