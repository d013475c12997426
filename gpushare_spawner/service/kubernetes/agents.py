"""The agents of a cluster's nodes, for `gpushare service --namespace`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

from gpushare_spawner.model.template import Template
from gpushare_spawner.service.reports import Agents, NoAgents
from gpushare_spawner.wording.amounts import missing_package

FIRST_LISTS = 3.0
"""Maximum seconds that the start waits for a cluster's first lists. Without them, it continues and reports the problem.
The hub exits if a service that it has started does not listen within 10 s (jupyterhub/objects.py, wait_up)."""


@contextlib.asynccontextmanager
async def agents_of_cluster(
    namespace: str,
    all_namespaces: bool,
    on_change: Callable[[], None],
    hub: str,
    templates: Callable[[], Mapping[str, Template]],
) -> AsyncIterator[Agents]:
    """Connect to the agents of a cluster's nodes through the API server. Sessions can be in ``all_namespaces``.

    ``on_change`` is called when reports or pods may have changed. ``hub`` is the hub's own address of its API (empty:
    unknown). ``templates`` returns the valid templates by name. While connected, the requests of released sessions'
    pods follow their templates. Raises NoAgents.
    """
    try:
        # an optional extra, which a single machine does not need
        from gpushare_spawner.clients.api import cluster_client
        from gpushare_spawner.clients.service_account import NoCluster
        from gpushare_spawner.service.kubernetes.cluster import Cluster
        from gpushare_spawner.service.kubernetes.released_requests import ReleasedRequests
    except ImportError as error:
        raise NoAgents(missing_package("--namespace", error)) from None
    try:
        client = await cluster_client()
    except NoCluster as error:
        raise NoAgents(f"--namespace: {error}") from None
    async with client:

        def changed() -> None:
            on_change()
            requests.changed()

        cluster = Cluster(client, namespace, changed, all_namespaces, hub=hub)
        requests = ReleasedRequests(cluster, templates)
        async with requests.running():
            try:
                await cluster.start(FIRST_LISTS)
                yield cluster
            finally:
                await cluster.close()
