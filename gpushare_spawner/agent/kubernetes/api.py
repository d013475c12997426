"""The Kubernetes API, as far as the agent needs it: JSON in and out, without the client's model classes.

Those would cost as much memory as the rest of the agent.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

import aiohttp

from gpushare_spawner.clients.service_account import NoCluster, ServiceAccountConnection, watch_lines
from gpushare_spawner.wording.amounts import missing_package, reason

Json = dict[str, Any]

_ANSWER_WITHIN = 15.0
"""Seconds for a call that is no watch."""
_WATCH_FOR = 60
"""Seconds that a watch lasts; then it is renewed, which also finds connections that died in silence."""
_BROKEN = (aiohttp.ClientError, OSError, TimeoutError, ValueError)
"""What keeps a call from an answer. The service account's token is read from a file, which may be empty for a moment:
ValueError."""


class ApiConnection(Protocol):
    """How requests reach the API server. A failure is one of `_BROKEN`."""

    async def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        content: str,
        body: Any,
        timeout: aiohttp.ClientTimeout | None,
    ) -> aiohttp.ClientResponse:
        """Ask; ``content`` is the type of the JSON ``body``."""

    async def close(self) -> None:
        """End the connection."""


class ApiFailure(Exception):
    """A call failed. `status` is HTTP's, 0 where no answer came."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ClusterApi:
    """A connection to the API server. Every call raises ApiFailure."""

    def __init__(self, connection: ApiConnection) -> None:
        self._connection = connection

    @classmethod
    async def connect(cls) -> ClusterApi:
        """As the pod that this runs in, else as $KUBECONFIG says. Raises NoCluster."""
        connection = ServiceAccountConnection.of_this_pod()
        if connection is not None:
            return cls(connection)
        # outside of a cluster, where memory does not matter
        try:
            from gpushare_spawner.clients.cluster import KubeconfigConnection, cluster_client
        except ImportError as error:
            raise NoCluster(missing_package("$KUBECONFIG", error)) from None

        return cls(KubeconfigConnection(await cluster_client()))

    async def close(self) -> None:
        """End the connection."""
        await self._connection.close()

    async def list(self, path: str, **query: str) -> Json:
        """A collection: `items`, and `metadata.resourceVersion` to watch from."""
        return await self._call("GET", path, query)

    async def get(self, path: str) -> Json:
        """One object."""
        return await self._call("GET", path)

    async def create(self, path: str, item: Json, **query: str) -> Json:
        """A new object in a collection."""
        return await self._call("POST", path, query, body=item)

    async def replace(self, path: str, item: Json) -> Json:
        """Put an object in place of the one that it names; its version must be the present one."""
        return await self._call("PUT", path, body=item)

    async def delete(self, path: str) -> Json:
        """Remove an object."""
        return await self._call("DELETE", path)

    async def patch(self, path: str, patch: Json) -> Json:
        """Merge into an object (RFC 7386); the object as it is then."""
        return await self._call("PATCH", path, body=patch, content="application/merge-patch+json")

    async def watch(self, path: str, version: str, **query: str) -> AsyncIterator[Json]:
        """Events after a version until the server ends the watch. Raises ApiFailure, 410 for too old a version."""
        query |= {
            "watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version,
            "timeoutSeconds": str(_WATCH_FOR),
        }  # fmt: skip
        response = await self._request("GET", path, query, timeout=aiohttp.ClientTimeout(
            sock_connect=_ANSWER_WITHIN, sock_read=_WATCH_FOR + 15
        ))  # fmt: skip
        try:
            if response.status >= 400:
                raise _failure(response.status, await response.text())
            async for line in watch_lines(response.content):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _failure(int(event["object"].get("code", 500)), line.decode(errors="replace"))
                yield event
        except (ValueError, KeyError, TypeError) as error:
            raise ApiFailure(0, f"the watch brought something else than events: {error}") from None
        except _BROKEN as error:
            raise ApiFailure(0, f"the watch broke: {reason(error)}") from None
        finally:
            response.close()

    async def _call(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: Json | None = None,
        content: str = "application/json",
    ) -> Json:
        timeout = aiohttp.ClientTimeout(total=_ANSWER_WITHIN)
        response = await self._request(method, path, query or {}, body, content, timeout)
        try:
            text = await response.text()
            if response.status >= 400:
                raise _failure(response.status, text)
            answer = json.loads(text)
        except ValueError:
            raise ApiFailure(0, "the API server's answer is no JSON") from None
        except _BROKEN as error:
            raise ApiFailure(0, f"the API server's answer broke off: {reason(error)}") from None
        finally:
            response.release()
        if not isinstance(answer, dict):
            raise ApiFailure(0, "the API server's answer is no object")
        return answer

    async def _request(
        self,
        method: str,
        path: str,
        query: dict[str, str],
        body: Json | None = None,
        content: str = "application/json",
        timeout: aiohttp.ClientTimeout | None = None,
    ) -> aiohttp.ClientResponse:
        try:
            return await self._connection.request(method, path, query, content, body, timeout)
        except _BROKEN as error:
            raise ApiFailure(0, f"the API server cannot be reached: {reason(error)}") from None


def _failure(status: int, text: str) -> ApiFailure:
    message = text
    try:
        answer = json.loads(text)
        message = str(answer.get("object", answer).get("message", text))
    except (ValueError, AttributeError):
        pass
    return ApiFailure(status, f"the API server says {status}: {message[:500]}")
