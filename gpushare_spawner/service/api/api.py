"""All operations of the API, its OpenAPI 3.1 document, and its routes for the service's application."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from gpushare_spawner import __version__
from gpushare_spawner.service.api import acting, reading
from gpushare_spawner.service.api.answers import Document, Refusal
from gpushare_spawner.service.api.router import MOST_LETTERS, Call, Nothing, Operation, Raw, Rule, Services, routes

PARAMETERS = {
    "id": "The id of a session, percent-encoded.",
    "node": "The name of a node, percent-encoded.",
    "uuid": "The UUID of a GPU.",
    "account": "A quota, as in the list of budgets: `group:optics`.",
    "user": "The name of a user, percent-encoded.",
    "server": "The name of a server, percent-encoded; `~` for the default server, and one more `~` before a name that "
    "begins with one.",
}
"""Descriptions of the parameters in addresses."""
ABOUT = """Shows and controls the shared GPUs of a JupyterHub: nodes, sessions, the queue, quotas and the history.

Units are 1 % of a GPU, amounts of memory bytes, times seconds, instants seconds since the epoch."""
_REF = "#/components/schemas/{model}"
_ERRORS = {
    400: "The request is wrong; the message says what would be right.",
    403: "No login, no XSRF token beside a cookie, or a scope is missing.",
    404: "There is no such thing, or the caller may not see it.",
    409: "The action is refused; the message says why.",
    413: "The body is too large.",
    429: "The caller has sent too many actions. `Retry-After` says in how many seconds the next one is possible.",
    502: "The hub, an agent or the API server did not do what was asked; the message says why.",
}

_RETRY_AFTER = {
    "Retry-After": {"description": "Seconds until the next action is possible.", "schema": {"type": "integer"}}
}


def document(operations: Sequence[Operation], version: str, prefix: str) -> dict[str, Any]:
    """Return the document. ``version``: the package's version; ``prefix``: the path prefix on the hub's site."""
    schemas, refs = _schemas(operations)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(f"/{operation.path}", {})[operation.method.lower()] = _operation(operation, refs)
    return {
        "openapi": "3.1.0",
        "info": {"title": "gpushare service", "version": version, "description": ABOUT},
        "servers": [{"url": prefix.rstrip("/")}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "token": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "Authorization",
                    "description": "`token TOKEN`, a token of the hub with the scope "
                    "`access:services!service=gpushare` and those that an operation names.",
                },
                "login": {
                    "type": "apiKey",
                    "in": "cookie",
                    "name": "service-gpushare",
                    "description": "The browser's login. A script also sends the page's XSRF token as `X-XSRFToken`.",
                },
            },
        },
    }


def statuses_of(operation: Operation) -> dict[int, str]:
    """Return an operation's error statuses and their meanings."""
    statuses = {403, 413}  # the server reads the body before the operation is known
    if operation.query is not Nothing:
        statuses.add(400)
    if "{" in operation.path:
        statuses.add(404)
    if operation.acts:
        statuses |= {400, 409, 429, 502}
    if operation.body is not Nothing:
        statuses.add(400)
    return dict(sorted(({status: _ERRORS[status] for status in statuses} | dict(operation.errors)).items()))


def _operation(operation: Operation, refs: Mapping[tuple[Any, JsonSchemaMode], Any]) -> dict[str, Any]:
    content = {"schema": refs[operation.answer, "serialization"]}
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "description": " ".join(operation.description.split()),
        "tags": [operation.path.partition("/")[0]],
        "parameters": [*_of_path(operation.path), *_of_query(operation.query), *_of_headers(operation)],
        # a caller needs all scopes of one entry; here each scope is sufficient, so each is a separate entry
        "security": [*({"token": [scope]} for scope in operation.needs.scopes or ()), {"login": []}]
        if operation.needs.scopes
        else [{"token": []}, {"login": []}],
        "responses": {
            "200": {
                "description": "Server-sent events; this is the data of each." if operation.streams else "The answer.",
                "content": {"text/event-stream" if operation.streams else "application/json": content}
                | {kind: {"schema": {"type": "string"}} for kind in operation.other_content},
            },
            **{
                str(status): {
                    "description": meaning,
                    "content": {"application/json": {"schema": refs[Refusal, "serialization"]}},
                    **({"headers": _RETRY_AFTER} if status == 429 else {}),
                }
                for status, meaning in statuses_of(operation).items()
            },
        },
    }
    if operation.body is not Nothing:
        body: dict[str, Any] = {"schema": refs[operation.body, "validation"]}
        if operation.example is not None:
            body["example"] = dict(operation.example)
        described["requestBody"] = {"required": True, "content": {"application/json": body}}
    return described


def _schemas(operations: Iterable[Operation]) -> tuple[dict[str, Any], dict[tuple[Any, JsonSchemaMode], Any]]:
    models: dict[tuple[type[BaseModel], JsonSchemaMode], None] = {(Refusal, "serialization"): None}
    for operation in operations:
        models[operation.answer, "serialization"] = None
        if operation.body is not Nothing:
            models[operation.body, "validation"] = None
    refs, made = models_json_schema(list(models), ref_template=_REF)
    return made.get("$defs", {}), dict(refs)


def _of_path(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "description": PARAMETERS[name], "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]


def _of_query(query: type[BaseModel]) -> list[dict[str, Any]]:
    schema = query.model_json_schema()
    parameters = []
    for name, field in schema.get("properties", {}).items():
        described = {
            key: value for key, value in _inlined(field, schema).items() if key not in ("description", "title")
        }
        parameters.append(
            {
                "name": name,
                "in": "query",
                "required": name in schema.get("required", ()),
                "description": field.get("description", ""),
                "schema": described,
            }
        )
    return parameters


def _inlined(part: Any, schema: dict[str, Any]) -> Any:
    """Inline references to the schema's own definitions, because parameters cannot have definitions."""
    if isinstance(part, list):
        return [_inlined(item, schema) for item in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        return _inlined(schema["$defs"][part["$ref"].rpartition("/")[2]], schema)
    return {key: _inlined(value, schema) for key, value in part.items()}


def _of_headers(operation: Operation) -> list[dict[str, Any]]:
    if not operation.acts:
        return []
    return [
        {
            "name": "Idempotency-Key",
            "in": "header",
            "required": False,
            "description": "Any text, new for each request. A request that is repeated with its key within 10 minutes "
            "is carried out once, and gets the same answer.",
            "schema": {"type": "string", "maxLength": MOST_LETTERS},
        }
    ]


ADDRESS = "api/v1/"
"""Path below the service's prefix."""


OPERATIONS = [*reading.OPERATIONS, *acting.OPERATIONS]


@Operation(OPERATIONS, "GET", "openapi.json", "This document", answer=Document)
async def openapi(call: Call[Nothing, Nothing]) -> Raw:
    """Return this OpenAPI 3.1 document."""
    return Raw(_text(call.services.prefix))


def openapi_document(prefix: str) -> dict[str, object]:
    """Return the OpenAPI document. ``prefix``: the service's prefix, with a trailing slash."""
    return document(OPERATIONS, __version__, prefix + ADDRESS)


@cache
def _text(prefix: str) -> str:
    return json.dumps(openapi_document(prefix))


def api_routes(services: Services) -> list[Rule]:
    """Return the routing rules of the API."""
    return routes(OPERATIONS, services, services.prefix + ADDRESS)
