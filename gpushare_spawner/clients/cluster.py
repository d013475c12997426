"""Client of the cluster's API server, in a pod or outside of the cluster. Lists and watches: object_watch.py."""

from __future__ import annotations

import aiohttp
from kubernetes_asyncio import config
from kubernetes_asyncio.client import ApiClient, Configuration

from gpushare_spawner.clients.service_account import ApiRequest, NoCluster


class KubeconfigConnection:
    """Requests through the library's client, for programs that do not need its models.

    It supports kubeconfig files, which a service account's own connection (service_account.py) does not.
    """

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    async def send(self, request: ApiRequest) -> aiohttp.ClientResponse:
        """Send a request. Raises aiohttp.ClientError, OSError, ValueError."""
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
    """Return a client with the pod's service account, or with ``$KUBECONFIG`` outside of a cluster.

    The caller closes it. A service account's token, which the kubelet renews long before it expires, is read again
    every minute. Raises NoCluster.
    """
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
