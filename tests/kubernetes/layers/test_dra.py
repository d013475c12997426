"""NVIDIA's DRA driver with consumable capacity, from the form to the server that waited."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..standin.client import path
from ..standin.cluster import Cluster
from ..standin.layers.dra import GROUP, dra, shared_gpu
from .walk import walk


async def test_servers_share_a_gpu_by_claims(make_hub: Callable[..., Any], cluster: Cluster, templates: Path) -> None:
    (templates / "layers.yaml").write_text("rules: [{layer: dra, options: {dra: {consumable: true}}}]")
    async with dra(cluster, [shared_gpu(0)]):
        hub = await make_hub()
        pods = await walk(hub, cluster, "half-gpu", fits=2)
        claims = await cluster.admin.list(path("resourceclaims", cluster.namespace, group=GROUP))
    (named,) = pods[0]["spec"]["resourceClaims"]
    assert named["resourceClaimTemplateName"].startswith("gpushare-half-gpu-")
    assert pods[0]["spec"]["containers"][0]["resources"]["claims"] == [{"name": named["name"]}]
    shares = [claim["status"]["allocation"]["devices"]["results"][0]["consumedCapacity"]["shares"] for claim in claims]
    assert shares == ["50", "50"]
