"""Clients of the API: each asks as one caller, and checks each answer against the OpenAPI document."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from jsonschema import Draft202012Validator
from tornado.httpclient import AsyncHTTPClient, HTTPResponse
from tornado.web import RequestHandler

from gpushare_spawner.service.api.api import ADDRESS, openapi_document

PREFIX = "/services/gpushare/"
DOCUMENT: dict[str, Any] = openapi_document(PREFIX)

ACT_OWN, ACT, READ, DRAIN = (f"custom:gpushare:{name}" for name in ("act-own", "act", "read", "drain"))


@dataclass(frozen=True)
class As:
    """A caller as the hub describes it."""

    name: str
    admin: bool = False
    scopes: tuple[str, ...] = ()
    token: bool = False
    service: bool = False
    groups: tuple[str, ...] = ()

    @property
    def model(self) -> dict[str, Any]:
        user = {"kind": "service" if self.service else "user", "name": self.name, "scopes": list(self.scopes)}
        return user if self.service else user | {"admin": self.admin, "groups": list(self.groups)}


CALLERS: Mapping[str, As | None] = {
    "nobody": None,
    "ann in a browser": As("ann"),
    "bob in a browser": As("bob"),
    "a token of ann without a scope": As("ann", token=True),
    "a token of ann with act-own": As("ann", token=True, scopes=(ACT_OWN,)),
    "a token of bob with act-own": As("bob", token=True, scopes=(ACT_OWN,)),
    "a service without a scope": As("robot", token=True, service=True),
    "a service with read": As("robot", token=True, service=True, scopes=(READ,)),
    "a service with act": As("robot", token=True, service=True, scopes=(ACT,)),
    "a service with drain": As("robot", token=True, service=True, scopes=(DRAIN,)),
    "an admin in a browser": As("boss", admin=True),
    "a narrowed token of an admin": As("boss", admin=True, token=True),
    "a full token of an admin": As("boss", admin=True, token=True, scopes=("admin:servers",)),
}
ADMIN = CALLERS["an admin in a browser"]
ANN = CALLERS["ann in a browser"]
BOB = CALLERS["bob in a browser"]


class SignedIn:
    """Stands for the hub's login."""

    access_scopes = ()
    base_url = PREFIX
    login_url = "/hub/login"

    def __init__(self) -> None:
        self.caller: As | None = None

    def get_user(self, handler: Any, *, sync: bool = True) -> Any:
        handler._token_authenticated = self.caller is not None and self.caller.token
        user = self.caller.model if self.caller is not None else None
        return user if sync else asyncio.sleep(0, user)

    def get_session_id(self, handler: RequestHandler) -> str:
        return handler.get_cookie("jupyterhub-session-id") or ""

    def _persist_url_token_if_set(self, handler: object) -> None: ...


@dataclass(frozen=True)
class Got:
    """An answer."""

    status: int
    body: Any
    headers: Mapping[str, str]

    @property
    def message(self) -> str:
        return str(self.body["message"])


class Client:
    """Asks the service, as anybody."""

    def __init__(self, port: int, login: SignedIn) -> None:
        self.url, self.login = f"http://127.0.0.1:{port}{PREFIX}{ADDRESS}", login

    async def ask(
        self,
        method: str,
        path: str,
        caller: As | None = ADMIN,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Got:
        """Ask, and check status and body against the document. ``body``: JSON, or bytes as they are."""
        answer = await self.raw(method, path, caller, body, headers)
        is_json = answer.headers.get("Content-Type", "").startswith("application/json")
        said = json.loads(answer.body) if is_json else answer.body.decode()
        check_documented(method, path, answer.code, said if is_json else None)
        return Got(answer.code, said, dict(answer.headers))

    async def get(self, path: str, caller: As | None = ADMIN) -> Any:
        """Return the body of a 200."""
        got = await self.ask("GET", path, caller)
        assert got.status == 200, got
        return got.body

    async def raw(
        self,
        method: str,
        path: str,
        caller: As | None = ADMIN,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        on_chunk: Callable[[bytes], None] | None = None,
    ) -> HTTPResponse:
        self.login.caller = caller
        return await AsyncHTTPClient().fetch(
            self.url + path,
            method=method,
            body=body if isinstance(body, bytes) or body is None else json.dumps(body),
            headers=dict(headers or {}),
            allow_nonstandard_methods=True,
            raise_error=False,
            follow_redirects=False,
            streaming_callback=on_chunk,
        )


def operation_at(method: str, path: str) -> dict[str, Any] | None:
    """Return the document's operation; None: the document has none there."""
    plain = "/" + urlsplit(path).path
    for address, methods in DOCUMENT["paths"].items():
        if re.fullmatch(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(address)), plain) and method.lower() in methods:
            found: dict[str, Any] = methods[method.lower()]
            return found
    return None


def check_documented(method: str, path: str, status: int, body: Any) -> None:
    """Fail if the document does not have this status, or the body is not of its schema."""
    operation = operation_at(method, path)
    if operation is None:
        assert status in (404, 405), (method, path, status)
        schema: Any = {"$ref": "#/components/schemas/Refusal"}
    else:
        assert str(status) in operation["responses"], (method, path, status, body)
        schema = operation["responses"][str(status)]["content"].get("application/json", {}).get("schema")
    if body is not None:
        Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(body)
