"""A thin client of a Kubernetes API server, JSON in and JSON out: for the stand-ins, and for tests' own looks."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

_CONTENT = {
    "json": "application/json-patch+json",
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
}


class ApiStatus(Exception):
    """The API server refused; `code` and `reason` as in its Status."""

    def __init__(self, code: int, body: str) -> None:
        self.code = code
        try:
            status = json.loads(body)
        except ValueError:
            status = {}
        self.reason = status.get("reason", "") if isinstance(status, dict) else ""
        self.message = status.get("message", body) if isinstance(status, dict) else body
        super().__init__(f"{code} {self.reason}: {self.message}")


@dataclass
class Credentials:
    """Where an API server is and as whom to ask it."""

    url: str
    token: str = ""
    ca_file: str | None = None
    client_certificate: tuple[str, str] | None = None
    """(certificate file, key file)"""
    verify: bool = True
    impersonated: tuple[str, str] | None = None
    """(user, group) as whom an admin asks."""

    def ssl_context(self) -> ssl.SSLContext | None:
        if not self.url.startswith("https:"):
            return None
        context = ssl.create_default_context(cafile=self.ca_file)
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.client_certificate:
            context.load_cert_chain(*self.client_certificate)
        return context


Items = list[dict[str, Any]]


@dataclass
class KubeClient:
    """Start with ``async with``. Paths are those of the API, as in `path("pods", "default", "a")`."""

    credentials: Credentials
    patience: float = 0.0
    """Seconds for which a call that fails through no fault of its own (429, 5xx, connection) is made again."""
    _session: aiohttp.ClientSession | None = field(default=None, repr=False)

    async def __aenter__(self) -> KubeClient:
        headers = {"Authorization": f"Bearer {self.credentials.token}"} if self.credentials.token else {}
        if self.credentials.impersonated is not None:
            headers |= dict(zip(("Impersonate-User", "Impersonate-Group"), self.credentials.impersonated, strict=True))
        connector = aiohttp.TCPConnector(ssl=self.credentials.ssl_context() or True, limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        self._session = aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: dict[str, str] | None = None,
        content: str = "application/json",
    ) -> Any:
        """The answer's JSON. Raises ApiStatus for a refusal, OSError or aiohttp.ClientError for a broken connection."""
        assert self._session is not None
        end = asyncio.get_running_loop().time() + self.patience
        while True:
            try:
                async with self._session.request(
                    method,
                    self.credentials.url + path,
                    params=query,
                    data=None if body is None else json.dumps(body),
                    headers={"Content-Type": content},
                    timeout=aiohttp.ClientTimeout(total=30),
                ) as response:
                    text = await response.text()
                    if response.status < 400:
                        return json.loads(text)
                    error: Exception = ApiStatus(response.status, text)
                    if response.status != 429 and response.status < 500:
                        raise error
            except (aiohttp.ClientError, OSError) as broken:
                error = broken
            if asyncio.get_running_loop().time() >= end:
                raise error
            await asyncio.sleep(0.05)

    async def get(self, path: str) -> Any:
        return await self.call("GET", path)

    async def list(self, path: str, labels: str = "", fields: str = "") -> Items:
        return (await self.list_with_version(path, labels, fields))[0]

    async def list_with_version(self, path: str, labels: str = "", fields: str = "") -> tuple[Items, str]:
        answer = await self.call("GET", path, query=_query(labelSelector=labels, fieldSelector=fields))
        return answer["items"], answer["metadata"]["resourceVersion"]

    async def create(self, path: str, item: dict[str, Any]) -> Any:
        return await self.call("POST", path, item)

    async def update(self, path: str, item: dict[str, Any]) -> Any:
        return await self.call("PUT", path, item)

    async def patch(self, path: str, patch: Any, kind: str = "merge") -> Any:
        """`kind`: merge, strategic or json."""
        return await self.call("PATCH", path, patch, content=_CONTENT[kind])

    async def delete(self, path: str, grace: int | None = None, uid: str | None = None) -> Any:
        """`grace` in seconds. What is gone already is no error."""
        options: dict[str, Any] = {"kind": "DeleteOptions", "apiVersion": "v1"}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        try:
            return await self.call("DELETE", path, options)
        except ApiStatus as error:
            if error.code == 404 or (error.code == 409 and uid is not None):
                return None
            raise

    async def watch(
        self, path: str, version: str, labels: str = "", fields: str = "", timeout: float = 300.0
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Events as they come, until the server ends the watch. Raises ApiStatus, also for an ERROR event."""
        assert self._session is not None
        query = _query(labelSelector=labels, fieldSelector=fields, resourceVersion=version)
        query |= {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(int(timeout))}
        async with self._session.get(self.credentials.url + path, params=query) as response:
            if response.status >= 400:
                raise ApiStatus(response.status, await response.text())
            buffer = b""
            async for chunk in response.content.iter_any():
                buffer += chunk
                *lines, buffer = buffer.split(b"\n")
                for line in filter(None, lines):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise ApiStatus(event["object"]["code"], json.dumps(event["object"]))
                    yield event

    async def follow(
        self,
        path: str,
        listed: Callable[[Items], Awaitable[None]],
        changed: Callable[[str, dict[str, Any]], Awaitable[None]],
        fields: str = "",
    ) -> None:
        """List and watch for ever, as informers do: `listed` gets all objects, `changed` each event after that."""
        version = ""
        while True:
            try:
                if not version:
                    items, version = await self.list_with_version(path, fields=fields)
                    await listed(items)
                async for event in self.watch(path, version, fields=fields):
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        await changed(event["type"], event["object"])
            except ApiStatus as error:
                if error.code == 410:
                    version = ""
                else:
                    await asyncio.sleep(0.1)
            except (aiohttp.ClientError, OSError, TimeoutError, json.JSONDecodeError):
                await asyncio.sleep(0.1)


def path(plural: str, namespace: str = "", name: str = "", subresource: str = "", group: str = "") -> str:
    """Of a collection, an object or its subresource; `group` with its version, as in apps/v1."""
    steps = [f"/apis/{group}" if group else "/api/v1"]
    if namespace:
        steps.append(f"namespaces/{namespace}")
    return "/".join(filter(None, [*steps, plural, name, subresource]))


def _query(**values: str) -> dict[str, str]:
    return {name: value for name, value in values.items() if value}
