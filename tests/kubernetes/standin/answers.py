"""Answers to a request, the broken ones included."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from .errors import ApiError, expired
from .faults import Fault


def fail(request: web.Request, fault: Fault | None) -> web.Response:
    if fault == "429":
        error = ApiError(429, "TooManyRequests", "Too many requests, please try again later.", {"retryAfterSeconds": 1})
        answer = json_answer(error.status(), 429)
        answer.headers["Retry-After"] = "1"
        return answer
    if fault == "410":
        status = expired(request.query.get("resourceVersion", ""), 0).status()
        if request.query.get("watch"):
            # the watch begins, and its first event says that it cannot go on
            return raw_answer(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
        return json_answer(status, 410)
    if fault == "500":
        return json_answer(ApiError(500, "InternalError", "Internal error occurred: a fault of the test").status(), 500)
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)


def json_answer(content: Any, status: int = 200) -> web.Response:
    return raw_answer(json.dumps(content).encode(), status)


def raw_answer(content: bytes, status: int = 200) -> web.Response:
    return web.Response(body=content, status=status, content_type="application/json")
