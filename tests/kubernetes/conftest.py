"""A cluster for every test that asks for one.

By default the stand-ins; with KUBEBUILDER_ASSETS a real API server with the stand-in scheduler and kubelets; with
KUBECONFIG a whole cluster's control plane with stand-in kubelets as its nodes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from .standin.cluster import Cluster, standin_cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Without nodes; see `Cluster.make_node`."""
    async with standin_cluster() as cluster:
        yield cluster
