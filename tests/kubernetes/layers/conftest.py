"""A hub whose role also reads nodes and the pods of all namespaces."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from ..sharing_hub import SharingHub, kube_access
from ..standin.cluster import Cluster

READS_CLUSTER = [{"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["get", "list", "watch"]}]
READS_LAYERS = [
    {"apiGroups": ["scheduling.run.ai"], "resources": ["queues"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": ["resource.k8s.io"], "resources": ["resourceslices", "resourceclaims"], "verbs": ["list", "watch"]},
    {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaimtemplates"], "verbs": ["create"]},
]


@pytest.fixture
async def make_hub(cluster: Cluster, templates: Path, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Starts hubs; a spawn that waits is answered at once."""
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(kube_access(cluster, cluster_rules=[*READS_CLUSTER, *READS_LAYERS]))

        async def make(configure: Callable[[Any], None] = lambda config: None) -> SharingHub:
            def on_hub(config: Any) -> None:
                config.JupyterHub.tornado_settings.update(slow_spawn_timeout=0.2)
                configure(config)

            hub = SharingHub(tmp_path, templates, cluster, on_hub)
            await stack.enter_async_context(hub)
            return hub

        yield make
