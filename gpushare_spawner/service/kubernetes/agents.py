"""The agents of a cluster's nodes, for `gpushare service --namespace`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable

from gpushare_spawner.service.agents import NoAgents
from gpushare_spawner.service.reports import Agent

FIRST_LISTS = 10.0
"""Seconds that the start waits for a cluster's first lists; it goes on without them, and reports the problem."""


@contextlib.asynccontextmanager
async def agents_of_cluster(
    namespace: str, all_namespaces: bool, on_change: Callable[[], None], hub: str
) -> AsyncIterator[Iterable[Agent]]:
    """The agents of a cluster's nodes, through the API server. Sessions may be in ``all_namespaces``.

    ``on_change`` is called when they may have published something; ``hub`` is the address of the hub's API as the hub
    itself says it (empty: not known). Raises NoAgents.
    """
    try:
        # an optional extra: on one machine nothing of this is needed
        from gpushare_spawner.clients.cluster import cluster_client
        from gpushare_spawner.clients.service_account import NoCluster
        from gpushare_spawner.service.kubernetes.cluster import Cluster
    except ImportError as error:
        raise NoAgents(
            f"--namespace needs the packages for Kubernetes ({error.name} is missing): "
            "pip install 'gpushare-spawner[kubernetes]'"
        ) from None
    try:
        client = await cluster_client()
    except NoCluster as error:
        raise NoAgents(f"--namespace: {error}") from None
    async with client:
        cluster = Cluster(client, namespace, on_change, all_namespaces, hub=hub)
        try:
            await cluster.start(FIRST_LISTS)
            yield cluster
        finally:
            await cluster.close()
