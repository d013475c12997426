"""Rendering for nvshare: a place on a node's only GPU. Its sessions take turns and have all its memory.

Facts: grgalex/nvshare 1a8f211 (March 2025), kubernetes/device-plugin/server.go and README.md.
"""

from __future__ import annotations

from gpushare_spawner.sharing.base import LayerCannot, LayerCapacity, LayerRequest, PodChange, PodSpec

RESOURCE = "nvshare.com/gpu"
"""Resource of its device plugin: a place on a node's GPU."""


def render(form: PodSpec, request: LayerRequest) -> PodSpec:
    """Return the pod with a place on a GPU. Raises LayerCannot for several GPUs: a node has one."""
    _check(request)
    return PodChange(limits={RESOURCE: "1"}, node_labels=request.node_labels()).apply(form)


def free(request: LayerRequest) -> LayerCapacity:
    """Return the free places. Raises LayerCannot as `render` does."""
    _check(request)
    return request.resource_capacity(request.suitable_nodes(), RESOURCE, 1)


def _check(request: LayerRequest) -> None:
    if request.gpu.share.count > 1:
        raise LayerCannot(f"nvshare shares one GPU of each node, and the template asks for {request.gpu.share}.")
