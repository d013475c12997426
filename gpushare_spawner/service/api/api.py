"""All operations of the API, its OpenAPI document, and its routes for the service's application."""

from __future__ import annotations

import json
from functools import cache

from gpushare_spawner import __version__
from gpushare_spawner.service.api import acting, reading
from gpushare_spawner.service.api.answers import Document
from gpushare_spawner.service.api.openapi import document
from gpushare_spawner.service.api.router import AnyOperation, Call, Nothing, Operation, Raw, Rule, Services, routes

ADDRESS = "api/v1/"
"""Below the service's prefix."""


async def openapi(call: Call[Nothing, Nothing]) -> Raw:
    """Return this document: OpenAPI 3.1."""
    return Raw(_text(call.services.prefix))


OPERATIONS: list[AnyOperation] = [
    *reading.OPERATIONS,
    *reading.HISTORY_OPERATIONS,
    *acting.OPERATIONS,
    *acting.SPAWN_OPERATIONS,
    *acting.DRAIN_OPERATIONS,
    Operation("GET", "openapi.json", openapi, "This document", Document, Nothing, Nothing),
]


def openapi_document(prefix: str) -> dict[str, object]:
    """Return the OpenAPI document. ``prefix``: of the service, with a slash at its end."""
    return document(OPERATIONS, __version__, prefix + ADDRESS)


@cache
def _text(prefix: str) -> str:
    return json.dumps(openapi_document(prefix))


def api_routes(services: Services) -> list[Rule]:
    """Return the rules of the API's addresses."""
    return routes(OPERATIONS, services, services.prefix + ADDRESS)
