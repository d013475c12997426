"""A hub with the rights that the chart gives it for other sharing layers, and no more."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from ..charts import one, render
from ..sharing_hub import SharingHub, kube_access
from ..standin.cluster import HUB_RULES, Cluster


@pytest.fixture
async def make_hub(cluster: Cluster, templates: Path, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Starts hubs; a spawn that waits is answered at once."""
    chart = render({"hub": {"layers": ["kai", "dra"]}})
    here = [*HUB_RULES, *one(chart, "Role", "gpushare-hub")["rules"]]
    everywhere = one(chart, "ClusterRole", "jhub-gpushare-hub-capacity")["rules"]
    # the other one promises to be downgraded and released, which no other layer can do
    (templates / "plain-quarter.yaml").write_text("{name: plain-quarter, display_name: Q, gpu: {fraction: 0.25}}")
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(kube_access(cluster, here, everywhere))

        async def make(configure: Callable[[Any], None] = lambda config: None) -> SharingHub:
            def on_hub(config: Any) -> None:
                config.JupyterHub.tornado_settings.update(slow_spawn_timeout=0.2)
                configure(config)

            hub = SharingHub(tmp_path, templates, cluster, on_hub)
            await stack.enter_async_context(hub)
            return hub

        yield make
