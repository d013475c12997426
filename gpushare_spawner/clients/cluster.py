"""The client of the cluster's API server, in a pod or outside of the cluster."""

from __future__ import annotations

from kubernetes_asyncio import config
from kubernetes_asyncio.client import ApiClient, Configuration


class NoCluster(RuntimeError):
    """No cluster is configured; the message says which settings are missing."""


async def cluster_client() -> ApiClient:
    """As the pod's service account, or outside of a cluster as ``$KUBECONFIG`` says. The caller closes it.

    A service account's token, which the kubelet renews long before it expires, is read again every minute.
    Raises NoCluster.
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
