"""A cluster for every test that asks for one.

By default the stand-ins. With KUBEBUILDER_ASSETS (a folder with etcd and kube-apiserver) a real API server with the
stand-in scheduler and kubelets. With KUBECONFIG a whole cluster's control plane; its nodes in the tests are stand-in
kubelets too, which register themselves and leave again, so that it needs no GPU.
"""

from __future__ import annotations

import functools
import os
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from kubernetes_asyncio.client import rest

from tests.machine import RENAMED
from tests.spawner.conftest import templates

from .sharing_hub import make_hub, nodes
from .standin.client import Credentials
from .standin.cluster import Cluster, real_cluster, standin_cluster
from .standin.control_plane import api_server, cluster_of

__all__ = ["cluster", "control_plane", "make_hub", "nodes", "templates"]

_KUBECONFIG = os.environ.get(RENAMED["KUBECONFIG"])
_ASSETS = os.environ.get("KUBEBUILDER_ASSETS")


@dataclass
class ControlPlane:
    """A real one; `whole` has controllers and a scheduler of its own."""

    credentials: Credentials
    whole: bool


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane | None]:
    """None: the stand-in is used."""
    if _KUBECONFIG:
        yield ControlPlane(cluster_of(_KUBECONFIG), whole=True)
    elif _ASSETS:
        with api_server(Path(_ASSETS), tmp_path_factory.mktemp("control-plane")) as credentials:
            yield ControlPlane(credentials, whole=False)
    else:
        with pytest.MonkeyPatch.context() as patch:
            # The stand-in speaks HTTP, and every client reads the machine's certificates when it is made: 35 ms.
            context = functools.cache(ssl.create_default_context)
            patch.setattr(rest, "ssl", SimpleNamespace(**(vars(ssl) | {"create_default_context": context})))
            yield None


def cluster_on(control_plane: ControlPlane | None) -> AbstractAsyncContextManager[Cluster]:
    """A namespace of its own; for tests that share one over several steps."""
    if control_plane is None:
        return standin_cluster()
    return real_cluster(control_plane.credentials, control_plane.whole)


@pytest.fixture
async def cluster(control_plane: ControlPlane | None) -> AsyncIterator[Cluster]:
    """Without nodes; see `Cluster.make_node`."""
    async with cluster_on(control_plane) as cluster:
        yield cluster
