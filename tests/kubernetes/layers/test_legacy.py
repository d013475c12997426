"""MetaGPU and nvshare, for clusters that still run them, from the form to the server that waited."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..standin.cluster import Cluster
from ..standin.layers.nvidia import node_with_devices
from .walk import limits, walk


@pytest.mark.slow
async def test_metagpu_gives_parts_of_gpus(make_hub: Callable[..., Any], cluster: Cluster, templates: Path) -> None:
    (templates / "layers.yaml").write_text("rules: [{layer: metagpu}]")
    ids = [f"cnvrg-meta-0-{part}" for part in range(100)]
    async with node_with_devices(cluster, {"cnvrg.io/metagpu": ids}, {}):
        hub = await make_hub()
        pods = await walk(hub, cluster, "half-gpu", fits=2)
    assert [limits(pod) for pod in pods] == [{"cnvrg.io/metagpu": "50"}] * 2


@pytest.mark.slow
async def test_nvshare_gives_turns_on_a_node_s_gpu(
    make_hub: Callable[..., Any], cluster: Cluster, templates: Path
) -> None:
    (templates / "layers.yaml").write_text("rules: [{layer: nvshare}]")
    async with node_with_devices(cluster, {"nvshare.com/gpu": ["GPU-0__1", "GPU-0__2"]}, {}):
        hub = await make_hub()
        pods = await walk(hub, cluster, "plain-quarter", fits=2)
    assert [limits(pod) for pod in pods] == [{"nvshare.com/gpu": "1"}] * 2
