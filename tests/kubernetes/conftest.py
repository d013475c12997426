"""A cluster for every test that asks for one.

By default the stand-ins; with KUBEBUILDER_ASSETS a real API server with the stand-in scheduler and kubelets; with
KUBECONFIG a whole cluster's control plane with stand-in kubelets as its nodes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from .sharing_hub import make_hub, nodes, templates
from .standin.cluster import Cluster, standin_cluster

__all__ = ["cluster", "make_hub", "nodes", "templates"]


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Without nodes; see `Cluster.make_node`."""
    async with standin_cluster() as cluster:
        yield cluster
