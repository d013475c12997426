"""Time-slicing, MPS and MIG of NVIDIA's device plugin, from the form to the server that waited."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..standin.cluster import Cluster
from ..standin.layers.nvidia import mig_node, shared_node
from .walk import limits, walk


async def test_servers_share_a_gpu_by_time_slicing(
    make_hub: Callable[..., Any], cluster: Cluster, templates: Path
) -> None:
    (templates / "layers.yaml").write_text("rules: [{models: ['*L4*'], layer: time-slicing}]")
    async with shared_node(cluster, replicas=2):
        hub = await make_hub()
        pods = await walk(hub, cluster, "half-gpu", fits=2)
    assert [limits(pod) for pod in pods] == [{"nvidia.com/gpu.shared": "1"}] * 2


async def test_servers_share_a_gpu_by_mps_on_nodes_with_replicas_of_their_size(
    make_hub: Callable[..., Any], cluster: Cluster, templates: Path
) -> None:
    (templates / "layers.yaml").write_text("rules: [{layer: mps, options: {mps: {resource: nvidia.com/mps}}}]")
    async with shared_node(cluster, 2, "mps", "nvidia.com/mps"), shared_node(cluster, 4, "mps", "nvidia.com/mps"):
        hub = await make_hub()
        pods = await walk(hub, cluster, "half-gpu", fits=2)
        halves = [name for name, node in cluster.nodes.items() if node._labels()["nvidia.com/gpu.replicas"] == "2"]
    assert {pod["spec"]["nodeName"] for pod in pods} == set(halves)


async def test_a_share_becomes_the_smallest_mig_device_that_holds_it(
    make_hub: Callable[..., Any], cluster: Cluster, templates: Path
) -> None:
    (templates / "layers.yaml").write_text("rules: [{models: ['*A100*'], layer: mig}]")
    async with mig_node(cluster, {"1g.10gb": 2, "3g.40gb": 1}):
        hub = await make_hub()
        (pod,) = await walk(hub, cluster, "plain-quarter")
    assert limits(pod) == {"nvidia.com/mig-3g.40gb": "1"}
