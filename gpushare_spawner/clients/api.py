"""The Kubernetes API as JSON, without the model classes of kubernetes_asyncio.

The model classes would use as much memory as the rest of the agent. object_watch.py keeps lists current.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp

from gpushare_spawner.clients.service_account import ApiRequest, NoCluster, ServiceAccountConnection, watch_lines
from gpushare_spawner.wording.amounts import missing_package, reason

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient

Json = dict[str, Any]

_LIST_WITHIN = aiohttp.ClientTimeout(total=30.0)
"""Time limit for a list: all pods of a large cluster take longer than one object."""
MERGE_PATCH, STRATEGIC_MERGE_PATCH = "application/merge-patch+json", "application/strategic-merge-patch+json"
"""Patch types: RFC 7386, and Kubernetes' own, which merges lists such as a pod's containers."""
WATCH_SECONDS = 60
"""Seconds after which the API server ends a watch. The next watch continues from there."""
SILENCE = 15.0
"""Seconds of silence, after a watch should have ended, that prove a dead connection."""
_WATCH_WITHIN = aiohttp.ClientTimeout(sock_connect=15.0, sock_read=WATCH_SECONDS + SILENCE)
_BROKEN = (aiohttp.ClientError, OSError, TimeoutError, ValueError)
"""Errors that end a call without an answer.

ValueError: the file of the service account's token can be empty briefly.
"""


class ApiConnection(Protocol):
    """A connection that sends requests to the API server. A failure raises one of `_BROKEN`."""

    async def send(self, request: ApiRequest) -> aiohttp.ClientResponse:
        """Send a request."""

    async def close(self) -> None:
        """End the connection."""


class ApiFailure(Exception):
    """A failed call. `status`: HTTP status; 0: no response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def may_pass(self) -> bool:
        """Whether the same call can succeed later: no response, too many requests, or a server error."""
        return self.status in (0, 429) or self.status >= 500


_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class ListAnswer:
    """JSON object with ``metadata`` and ``items``, in any order."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.version = ""
        """The list's resourceVersion, set after the last item."""

    def items(self) -> Iterator[dict[str, Any]]:
        """Yield each item. Raises ValueError for an invalid list, and KeyError without a version."""
        others: dict[str, Any] = {}
        at = self._after(0, "{")
        while self._next(at) != "}":
            name, at = self._value(at)
            at = self._after(at, ":")
            if name != "items" or self._next(at) != "[":
                others[name], at = self._value(at)
            else:
                at = self._after(at, "[")
                while self._next(at) != "]":
                    item, at = self._value(at)
                    yield item
                    at = self._after(at, ",") if self._next(at) == "," else at
                at = self._after(at, "]")
            at = self._after(at, ",") if self._next(at) == "," else at
        self.version = str(others["metadata"]["resourceVersion"])

    def _value(self, at: int) -> tuple[Any, int]:
        return _DECODER.raw_decode(self._text, self._skip(at))

    def _next(self, at: int) -> str:
        at = self._skip(at)
        return self._text[at : at + 1]

    def _after(self, at: int, mark: str) -> int:
        at = self._skip(at)
        if not self._text.startswith(mark, at):
            raise ValueError(f"not a Kubernetes list: {mark} expected at character {at}")
        return at + len(mark)

    def _skip(self, at: int) -> int:
        match = _SPACE.match(self._text, at)
        return match.end() if match is not None else at


class KubeconfigConnection:
    """Connection through the library's client, for programs that do not need its models.

    It supports kubeconfig files, which a service account's own connection (service_account.py) does not.
    """

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    async def send(self, request: ApiRequest) -> aiohttp.ClientResponse:
        """Send a request. Raises aiohttp.ClientError, OSError, ValueError."""
        from kubernetes_asyncio import config

        headers: dict[str, str] = {"Accept": "application/json", "Content-Type": request.content}
        try:
            await self._client.update_params_for_auth(headers, [], ["BearerToken"])
        except config.ConfigException as error:
            raise ValueError(f"the credentials cannot be read: {error}") from None
        response: aiohttp.ClientResponse = await self._client.rest_client.request(
            request.method,
            f"{self._client.configuration.host}{request.path}",
            query_params=dict(request.query),
            headers=headers,
            body=request.body,
            _preload_content=False,
            _request_timeout=request.timeout,
        )
        return response

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()


async def cluster_client() -> ApiClient:
    """Return a client with the pod's service account, or with ``$KUBECONFIG`` outside a cluster.

    The caller closes it. A service account's token, which the kubelet renews long before it expires, is reread every
    minute. Raises NoCluster.
    """
    from kubernetes_asyncio import config
    from kubernetes_asyncio.client import ApiClient, Configuration

    configuration = Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except config.ConfigException as outside:
        try:
            await config.load_kube_config(client_configuration=configuration)
        except (config.ConfigException, OSError) as error:
            raise NoCluster(
                "there is neither a service account of a pod (/var/run/secrets/kubernetes.io/serviceaccount: "
                f"{outside}) nor a usable $KUBECONFIG or ~/.kube/config: {error}"
            ) from None
    return ApiClient(configuration)


class ClusterApi:
    """A connection to the API server. Every call raises ApiFailure."""

    def __init__(self, connection: ApiConnection) -> None:
        self._connection = connection

    @classmethod
    async def connect(cls) -> ClusterApi:
        """Connect with this pod's service account, or else with $KUBECONFIG. Raises NoCluster."""
        connection = ServiceAccountConnection.of_this_pod()
        if connection is not None:
            return cls(connection)
        # outside a cluster, memory does not matter
        try:
            return cls(KubeconfigConnection(await cluster_client()))
        except ImportError as error:
            raise NoCluster(missing_package("$KUBECONFIG", error)) from None

    async def close(self) -> None:
        """End the connection."""
        await self._connection.close()

    async def list(self, path: str, **query: str) -> ListAnswer:
        """Return a collection, with the version from which to watch."""
        return ListAnswer(await self._text(ApiRequest("GET", path, query, timeout=_LIST_WITHIN)))

    async def get(self, path: str) -> Json:
        """Return one object."""
        return await self._object(ApiRequest("GET", path, {}))

    async def create(self, path: str, item: Json, **query: str) -> Json:
        """Add an object to a collection."""
        return await self._object(ApiRequest("POST", path, query, item))

    async def replace(self, path: str, item: Json) -> Json:
        """Replace the object of the same name. The version must be the current one."""
        return await self._object(ApiRequest("PUT", path, {}, item))

    async def delete(self, path: str, options: Json | None = None) -> Json:
        """Delete an object. ``options``: Kubernetes' DeleteOptions."""
        return await self._object(ApiRequest("DELETE", path, {}, options))

    async def patch(self, path: str, patch: Json, content: str = MERGE_PATCH) -> Json:
        """Merge a patch into an object. Return the merged object."""
        return await self._object(ApiRequest("PATCH", path, {}, patch, content))

    async def watch(
        self, path: str, version: str, opened: Callable[[], None], **query: str
    ) -> AsyncGenerator[Json, None]:
        """Yield events after a version until the server ends the watch. `opened` is called when the watch has begun.

        Raises ApiFailure; 410: the version is too old.
        """
        query |= {
            "watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }  # fmt: skip
        response = await self._send(ApiRequest("GET", path, query, timeout=_WATCH_WITHIN))
        try:
            if response.status >= 400:
                raise _failure(response.status, await response.text())
            opened()
            async for line in watch_lines(response.content):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _failure(int(event["object"].get("code", 500)), line.decode(errors="replace"))
                yield event
        except (ValueError, KeyError, TypeError) as error:
            raise ApiFailure(0, f"the watch sent something other than events: {error}") from None
        except _BROKEN as error:
            raise ApiFailure(0, f"the watch failed: {reason(error)}") from None
        finally:
            response.close()

    async def _object(self, request: ApiRequest) -> Json:
        try:
            answer = json.loads(await self._text(request))
        except ValueError:
            raise ApiFailure(0, "the API server's answer is not JSON") from None
        if not isinstance(answer, dict):
            raise ApiFailure(0, "the API server's answer is not an object")
        return answer

    async def _text(self, request: ApiRequest) -> str:
        response = await self._send(request)
        try:
            text = await response.text()
        except _BROKEN as error:
            raise ApiFailure(0, f"the API server's answer is incomplete: {reason(error)}") from None
        finally:
            response.release()
        if response.status >= 400:
            raise _failure(response.status, text)
        return text

    async def _send(self, request: ApiRequest) -> aiohttp.ClientResponse:
        try:
            return await self._connection.send(request)
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
