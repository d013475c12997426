"""The connection to the cluster's API server."""

from __future__ import annotations

from kubernetes_asyncio import config
from kubernetes_asyncio.client import ApiClient, Configuration


class NoCluster(RuntimeError):
    """There is no cluster to talk to; the text says what was looked for."""


async def connect() -> ApiClient:
    """As the pod's service account, or outside of a cluster as ``$KUBECONFIG`` says. The caller closes it.

    Tokens are read again when they are about to expire. Raises NoCluster.
    """
    configuration = Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException:
        try:
            await config.load_kube_config(client_configuration=configuration)
        except (config.ConfigException, OSError) as error:
            raise NoCluster(
                "there is neither a service account of a pod (/var/run/secrets/kubernetes.io/serviceaccount) "
                f"nor a usable $KUBECONFIG or ~/.kube/config: {error}"
            ) from None
    return ApiClient(configuration)
